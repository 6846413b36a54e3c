"""What a kernel has started ends with it, also in sessions and process groups of its own.

``Popen(..., start_new_session=True)``, ``setsid``, ``nohup`` and double forks take a program out of the kernel's
process group, and with the kernel gone nobody would know whose it is. It is known by any of these:

- the kernel's variable NOTEBOOK_CLUSTER_CELL_MARK in its environment, which is of this kernel only;
- its session, when that is the kernel's;
- on Linux, by its parent: an agent that is a process of its own is a *child subreaper*, so the system gives it every
  program below it whose parent has ended. One that it has not started itself, and that came while no other kernel ran
  that could have started it, is the kernel's, whatever it did to its environment.

What a program hands on to a service of the system (cron, systemd, docker, ssh to elsewhere) is not below the agent.

When the agent itself dies without a chance to do so (SIGKILL), :class:`Watchdog` ends kernels and what they started.
A shell process waits on a pipe from the agent: each line adds or drops a process group. When the pipe closes, because
the agent ended in whatever way, the groups that are left are killed and the agent's socket folder is removed.
ipykernel's own check of its parent would end a busy kernel too, but a second later and without its children.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from notebook_cluster.protocol.cell_mark import CELL_MARK

log = logging.getLogger(__name__)

FOLLOWS_ALL = sys.platform == "linux"
"""Whether programs are found that have changed their environment."""
_PR_SET_CHILD_SUBREAPER = 36
_TRIES_S = 2.0
"""For programs that start others faster than they are ended."""
_PAUSE_S = 0.01
_CLOCK_S = 0.02
"""To which the start of a process is known."""


@dataclass(frozen=True)
class _Kernel:
    pid: int
    mark: str
    since: float


class Programs:
    """Of one agent; may be used from any thread.

    Args:
        reaps: orphans below this process become its children (:func:`become_reaper`).
    """

    def __init__(self, reaps: bool | None = None) -> None:
        self._reaps = _reaper if reaps is None else reaps
        self._own = psutil.Process()
        self._since = self._own.create_time()
        self._kernels: dict[int, _Kernel] = {}
        self._starting = 0
        self._others: set[int] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A kernel is being started: a child that nobody knows yet may be that."""
        with self._lock:
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1

    def add(self, pid: int, mark: str) -> None:
        """``pid`` is a kernel, with ``mark`` in its environment."""
        with contextlib.suppress(psutil.Error), self._lock:
            self._kernels[pid] = _Kernel(pid, mark, psutil.Process(pid).create_time())

    def own(self, pid: int) -> None:
        """``pid`` is a program of the agent's, in a session of its own."""
        self._others.add(pid)

    def end_those_of(self, pid: int, known: list[psutil.Process] | None = None) -> None:
        """Kernel ``pid`` is gone: SIGKILL to all that it has started, and to ``known``; returns when they are gone."""
        with self._lock:
            kernel = self._kernels.pop(pid, None)
        if kernel is not None:
            self._end(kernel, known or [])

    def end_orphans(self) -> None:
        """No kernel is left: nothing that was below one stays."""
        if self._reaps:
            self._end(None, [])

    def sweep(self) -> None:
        """Now and then: take leave of orphans that have ended by themselves, end those that no kernel here has left."""
        if not self._reaps:
            return
        with contextlib.suppress(psutil.Error):
            for child in self._own.children():
                if self._is_orphan(child) and child.status() == psutil.STATUS_ZOMBIE:
                    _wait_for(child)
        if any(self._of(None)):
            self._end(None, [])

    def _end(self, kernel: _Kernel | None, known: list[psutil.Process]) -> None:
        deadline = time.monotonic() + _TRIES_S
        found = known + list(self._of(kernel))
        while found and time.monotonic() < deadline:
            for process in found:
                _kill(process)
            time.sleep(_PAUSE_S)
            for process in found if self._reaps else []:
                _wait_for(process)
            found = [process for process in found if _runs(process)] + list(self._of(kernel))
        if found:
            log.warning("programs that kernels have started could not be ended: %s", [process.pid for process in found])

    def _of(self, kernel: _Kernel | None) -> Iterator[psutil.Process]:
        """Live programs of ``kernel`` (None: of any that is gone), with what is below them."""
        roots = list(self._marked(kernel)) if kernel is not None else []
        if self._reaps:
            with contextlib.suppress(psutil.Error):
                roots += [
                    child for child in self._own.children() if self._is_orphan(child) and self._is_of(child, kernel)
                ]
        seen = set()
        for root in roots:
            with contextlib.suppress(psutil.Error):
                for process in [root, *root.children(recursive=True)]:
                    if process.pid not in seen and _runs(process):
                        seen.add(process.pid)
                        yield process

    def _marked(self, kernel: _Kernel) -> Iterator[psutil.Process]:
        for pid in psutil.pids():
            if pid == os.getpid() or pid in self._others:
                continue
            with contextlib.suppress(psutil.Error, OSError):
                if _mark_of(pid) == kernel.mark or os.getsid(pid) == kernel.pid:
                    yield psutil.Process(pid)

    def _is_orphan(self, child: psutil.Process) -> bool:
        """Whether ``child`` of this process came to it because its parent had ended."""
        with self._lock:
            if child.pid in self._kernels or child.pid in self._others:
                return False
            starting = self._starting > 0
        try:
            if child.create_time() < self._since or os.getsid(child.pid) == os.getsid(0):
                return False  # what the agent starts is in its session, but for kernels and the watchdog
        except (psutil.Error, OSError):
            return False
        return not starting or _mark_of(child.pid) is not None

    def _is_of(self, orphan: psutil.Process, kernel: _Kernel | None) -> bool:
        """Whether no kernel that is still there can have started ``orphan``."""
        mark, began = _mark_of(orphan.pid), orphan.create_time()
        with self._lock:
            others, starting = list(self._kernels.values()), self._starting > 0
        if any(mark == other.mark for other in others):
            return False
        if mark is not None:
            # That of a kernel which is being started is not known yet.
            return mark == kernel.mark if kernel is not None else not starting
        return not any(other.since <= began + _CLOCK_S for other in others)


_reaper = False


def become_reaper() -> None:
    """Programs below this process whose parent ends become its children, where the system can do that (Linux)."""
    global _reaper
    if FOLLOWS_ALL:
        import ctypes

        _reaper = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def below(pid: int) -> list[psutil.Process]:
    """What process ``pid`` and its children have started and not left behind."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def _mark_of(pid: int) -> str | None:
    """The value of :data:`CELL_MARK` in the environment with which ``pid`` was started; None without one."""
    try:
        if FOLLOWS_ALL:
            wanted = f"{CELL_MARK}=".encode()
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(wanted):
                    return os.fsdecode(entry[len(wanted) :])
            return None
        environment: dict[str, str] = psutil.Process(pid).environ()
        return environment.get(CELL_MARK)
    except (psutil.Error, OSError):
        return None


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        process.kill()  # not one that has the number of one that is gone


def _wait_for(process: psutil.Process) -> None:
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(process.pid, os.WNOHANG)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


_SCRIPT = r"""
groups=' '
while read -r action group; do
  case "$action" in
    add) groups="$groups$group " ;;
    drop) case "$groups" in *" $group "*) groups="${groups%% $group *} ${groups#* $group }" ;; esac ;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
# Also what they have started in sessions of its own, as long as it has kept its environment.
for place in /proc/[0-9]*; do
  if grep -qaF "NOTEBOOK_CLUSTER_CELL_MARK=$1/" "$place/environ" 2>/dev/null; then
    kill -s KILL "${place#/proc/}" 2>/dev/null
  fi
done
rm -rf -- "$1"
"""


class Watchdog:
    """One shell process for the life of the agent.

    Args:
        directory: the agent's socket folder, removed at the end.
    """

    def __init__(self, directory: Path) -> None:
        # A session of its own: a Ctrl-C in the agent's terminal is not for the watchdog, nor is a kill of its group.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "notebook-cluster-watchdog", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Of the shell."""
        return self._process.pid

    def add(self, group: int) -> None:
        """Kill process group ``group`` when the agent ends."""
        self._tell(f"add {group}\n")

    def drop(self, group: int) -> None:
        """The group is gone."""
        self._tell(f"drop {group}\n")

    def close(self) -> None:
        """Kill what is left, remove the folder, wait for the shell to end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            # Somebody killed the shell: the kernels' own check of their parent is left.
            pass
