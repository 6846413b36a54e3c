"""``python -m notebook_cluster.launchers.pretended_machine SLOW DIES OPTIONS...``: one machine of :mod:`.pretended`.

It runs ``notebook-cluster OPTIONS``. A slow machine's kernels are held again and again for so long that they take SLOW
times as long; when it dies, its agent and its kernels are gone at once, without a word.
"""

import contextlib
import signal
import sys
import time

import psutil

from notebook_cluster.launchers.pretended import DIED

_RUN_S = 0.1
"""For which a slow kernel runs between two times that it is held."""
_LOOK_S = 1.0
"""Between two looks for kernels."""


def main() -> int:
    slow, dies, *options = sys.argv[1:]
    agent = psutil.Popen([sys.executable, "-m", "notebook_cluster", *options])
    signal.signal(signal.SIGTERM, lambda number, frame: agent.terminate())
    end = float("inf")
    kernels: list[psutil.Process] = []
    looked = -_LOOK_S
    while agent.poll() is None:
        now = time.monotonic()
        if now >= end:
            _die(agent)
            return DIED
        if now >= looked + _LOOK_S:
            kernels, looked = _kernels(agent), now
            if kernels and float(dies):
                end = min(end, now + float(dies))  # from when it came: machines may take long to start
        if float(slow) > 1 and kernels:
            time.sleep(_RUN_S)
            _each(kernels, "suspend")
            time.sleep(_RUN_S * (float(slow) - 1))
            _each(kernels, "resume")
        else:
            with contextlib.suppress(psutil.TimeoutExpired):
                agent.wait(min(_LOOK_S, max(end - now, 0.0)) / 4)
    return int(agent.returncode)


def _kernels(agent: psutil.Popen) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.Error):
        for process in agent.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any("ipykernel" in word for word in process.cmdline()):
                    found.append(process)
    return found


def _each(kernels: list[psutil.Process], what: str) -> None:
    for kernel in kernels:
        with contextlib.suppress(psutil.Error):
            getattr(kernel, what)()


def _die(agent: psutil.Popen) -> None:
    kernels = _kernels(agent)
    agent.kill()
    _each(kernels, "kill")
    agent.wait()


if __name__ == "__main__":
    sys.exit(main())
