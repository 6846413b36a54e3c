"""What a node's shell and kernel do otherwise than a notebook's. ipykernel's private names stay here.

People see what is on the node: completion is fast, ``name?`` is output of the cell, ``%pip`` is for this kernel's
environment, one node of a machine after the other, and its failure is one.

Messages of widgets between this node and the browser pass also while a cell runs. The coordinator addresses a message
to this kernel's subshell then, and to its main shell otherwise. ipykernel 7.4 and later would ask the widget's comm
instead, which answers with the shell in which it was opened: the busy one.
"""

import contextlib
import fcntl
import hashlib
import importlib
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any

from notebook_cluster.node.namespace.variables import describe_namespace
from notebook_cluster.protocol.interaction import FetchVariables, Variables
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import runtime_directory

_MOST_SECONDS = 5.0
_UP_SECONDS = 0.05


def prepare_shell(ip: Any) -> None:
    """Fast completion, ``name?`` as output of the cell, no ``exit()``, none of the notebook's magics, and nothing kept
    of what was printed.

    Jedi takes seconds while the node computes and holds up every later question meanwhile (measured: 3 ms without it,
    0.45 s and more with it); what is in the namespace is found without it. A notebook shows ``name?`` in a pager of its
    own, which an answer from a node never reaches. IPython 9 keeps every printed string for ``%notebook``, which nobody
    asks of a node: 175 MB after 100 MB of prints, until the kernel ends. ipykernel makes a record of each debug line
    that no handler shows: 3 % of the time of a short cell.
    """
    completer = getattr(ip, "Completer", None)
    if completer is not None and hasattr(completer, "use_jedi"):
        completer.use_jedi = False
    ip.set_hook("show_in_pager", _print_page, 0)
    ip.ask_exit = _stay
    lazy = ip.magics_manager.lazy_magics
    for name in [name for name, extension in lazy.items() if extension == "notebook_cluster"]:
        del lazy[name]
    warnings.filterwarnings("ignore", "To exit: use", UserWarning)
    log = ip.kernel.log
    if log.handlers:
        log.setLevel(max(log.level, min(handler.level for handler in log.handlers)))
    if hasattr(ip.history_manager, "outputs"):
        ip.history_manager.outputs = _KeepsNothing()


def _stay() -> None:
    """``exit()`` and ``quit()`` would end the kernel a moment later, in the middle of whatever runs on it by then."""
    print(
        "[notebook-cluster: exit() does nothing on a node: %cluster restart NODE gives it a new kernel, %cluster "
        "remove NODE takes it out of the cluster]"
    )


class _KeepsNothing(dict[int, list[Any]]):
    """Stands in for IPython's outputs of each execution."""

    def __missing__(self, execution: int) -> list[Any]:
        return []


def _print_page(ip: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
    text = data.get("text/plain", "") if isinstance(data, dict) else data
    print(str(text).rstrip("\n"))


def answer_when_idle(ip: Any, send: Callable[[Message], None], request: FetchVariables) -> None:
    """Send the node's variables as soon as its main thread is between cells. For any thread."""
    loop = getattr(getattr(ip, "kernel", None), "io_loop", None)
    if loop is None:
        # The runtime says hello a moment before the kernel is up.
        later = threading.Timer(_UP_SECONDS, answer_when_idle, (ip, send, request))
        later.daemon = True
        later.start()
        return

    def answer() -> None:
        rows, left_out = describe_namespace(
            ip, request.pattern, everything=request.everything, seconds=min(request.seconds, _MOST_SECONDS)
        )
        send(Variables(ticket=request.ticket, variables=rows, left_out=left_out))

    loop.add_callback(answer)


MOST_QUEUED = 100_000
"""Messages that wait for the agent; a widget that changes in a loop makes thousands in a moment."""


def lose_nothing(kernel: Any) -> None:
    """A kernel's output socket drops what is over 1,000 waiting messages, also the last value of a progress bar."""
    thread = getattr(kernel, "iopub_thread", None)
    if thread is None:
        return

    def widen() -> None:
        thread.socket.sndhwm = MOST_QUEUED  # also for connections that are there already

    thread.schedule(widen)


def follow_headers() -> None:
    """Let each message for a widget go where its header says."""
    from ipykernel.comm.comm import BaseComm

    if hasattr(BaseComm, "_reply_subshell_for"):
        BaseComm._reply_subshell_for = _by_header


def _by_header(comm: Any, data: Any, default: Any) -> Any:
    return default


_ERROR = re.compile(r"error:\s*(.+)", re.IGNORECASE)
_CANNOT_WRITE = re.compile(r"Permission denied|Read-only file system|externally-managed-environment", re.IGNORECASE)
_SHELL = re.compile(r"\|\|?$|&&?$|;$|\d?>>?($|[&/])")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CHANGES = ("install", "uninstall")
_END_SECONDS = 5.0
_WAIT_UNSAID = 5.0
"""Seconds of waiting for another node that are not worth a word, which would be the only difference between nodes."""


class PipFailed(Exception):
    """pip ended with an error; its own words are in the output above. Shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def register_pip(ip: Any) -> None:
    """Let ``%pip`` of the shell ``ip`` be :func:`run_pip`."""
    ip.register_magic_function(run_pip, magic_kind="line", magic_name="pip")


def run_pip(line: str) -> None:
    """Run ``pip LINE`` with this kernel's Python and print what it says. A pipe or a redirection is the shell's.

    Raises:
        PipFailed: it ended with an error; names what went wrong and the way out.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise PipFailed(f"%pip {line} cannot be read: {str(error).lower()}") from None
    if words[:1] == ["uninstall"] and not {"-y", "--yes"} & set(words):
        words.insert(1, "--yes")  # nobody is there to be asked
    with _alone() if words[:1] and words[0] in _CHANGES else contextlib.nullcontext():
        pip = [sys.executable, "-m", "pip"]
        by_shell = any(_SHELL.match(word) for word in words)
        code, trouble, read_only = _run(f"{shlex.join(pip)} {line}" if by_shell else [*pip, *words])
    importlib.invalidate_caches()
    if code:
        hint = ": its environment cannot be written to, %pip install --user NAME may work" if read_only else ""
        raise PipFailed(f"%pip {line.strip()} failed on this node: {trouble or f'exit code {code}'}{hint}")
    if words[:1] and words[0] in _CHANGES:
        print("a package that was imported before is the old one until %cluster restart NODE")


def _run(command: list[str] | str) -> tuple[int, str, bool]:
    """(exit code, pip's first error, whether the environment cannot be written to)."""
    environment = os.environ | {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, shell=isinstance(command, str), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    trouble, read_only = "", False
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            found = _ERROR.match(_COLOUR.sub("", line))
            trouble = trouble or (found[1].strip() if found else "")
            read_only = read_only or _CANNOT_WRITE.search(line) is not None
        return process.wait(), trouble[:300], read_only
    except BaseException:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other node of this user changes this environment meanwhile."""
    name = hashlib.blake2b(sys.prefix.encode(), digest_size=8).hexdigest()
    with (runtime_directory() / f"pip-{name}.lock").open("wb") as lock:
        began, told = time.monotonic(), False
        while not _locked(lock):
            if not told and time.monotonic() - began > _WAIT_UNSAID:
                told = True
                print("waiting for %pip of another node on this machine ...", flush=True)
            time.sleep(0.05)
        yield


def _locked(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
