"""What a node's shell and kernel do otherwise than a notebook's. ipykernel's private names stay here.

People see what is on the node: completion is fast, ``name?`` is output of the cell, ``%pip`` is for this kernel's
environment, one node of a machine after the other, and its failure is one. Tracebacks are equal on all nodes where the
error is, and lead to the user's line.

Messages of widgets between this node and the browser pass also while a cell runs. The coordinator addresses a message
to this kernel's subshell then, and to its main shell otherwise. ipykernel 7.4 and later would ask the widget's comm
instead, which answers with the shell in which it was opened: the busy one.
"""

import contextlib
import fcntl
import hashlib
import importlib
import inspect
import linecache
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any

from notebook_cluster.node.namespace.variables import describe_namespace
from notebook_cluster.protocol.interaction import FetchVariables, Variables
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import runtime_directory

_MOST_SECONDS = 5.0
_UP_SECONDS = 0.05


def prepare_shell(ip: Any) -> None:
    """Fast completion, ``name?`` as output of the cell, no ``exit()``, and nothing kept of what was printed.

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


_PACKAGE = __name__.partition(".")[0] + "."
_WAITING = ("threading", "IPython.", "ipykernel.")
"""Where a Stop reaches a cell that waits: nobody looks for the cause there."""
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


class CellNumbers:
    """``In[7]`` in a traceback is cell 7 of the cluster, also on a node that joined late or ran fewer cells."""

    def __init__(self, ip: Any) -> None:
        self._compiler = ip.compile
        self._cells: dict[str, int] = {}
        self.cell = 0

    def of_file(self, filename: str) -> int | None:
        """The cell that code with this file name is of."""
        return self._cells.get(filename)

    def install(self) -> None:
        original = self._compiler.cache

        def cache(transformed_code: str, number: int = 0, raw_code: str | None = None) -> Any:
            name = original(transformed_code, self.cell or number, raw_code)
            self._cells[name] = self.cell or number
            return name

        # On the instance: IPython's class stays as it is.
        self._compiler.cache = cache

    def uninstall(self) -> None:
        del self._compiler.cache


def shorten_tracebacks(ip: Any) -> None:
    """In shell ``ip`` show what this package raises without the frames below the user's call, and a Stop with the
    user's lines only, without the lines around each: these cost 8 to 50 ms of every node, and a cell that is stopped
    should end at once. A call of ours with arguments that it does not take says which it takes."""
    ip.set_custom_exc(
        (KeyboardInterrupt, AttributeError, MemoryError, OSError, RuntimeError, TypeError, ValueError), _show
    )


_CALLED = re.compile(r"(\w+)(\.__init__)?\(\) (got|missing|takes)\b")


_OTHER_NAMES = {
    **dict.fromkeys(
        ("checkpoint", "checkpoints", "checkpoint_dir", "ckpt", "save", "save_every"),
        "sync.checkpoint(NAME) saves a checkpoint, resume=NAME goes on from it",
    ),
    **dict.fromkeys(("lr", "learning_rate"), "it is your optimizer's; outer_lr= is for the rounds"),
    **dict.fromkeys(
        ("steps", "inner_steps", "local_steps", "sync_every", "interval", "period", "H"),
        "every= says how many steps are made between two rounds",
    ),
    **dict.fromkeys(("compression", "compress", "quantize", "bits"), "codec='int8' and others make it small"),
    **dict.fromkeys(("epochs", "num_epochs"), "nc.shard(data, batch_size, epochs=N) goes through the data N times"),
    **dict.fromkeys(("rank", "world_size", "nodes", "backend", "device"), "the nodes that run the cell take part"),
    "momentum": "it is your optimizer's; nc.DiLoCo has outer_momentum= for the rounds",
    "every": "with every step a round it has none; nc.DiLoCo(model, every=100) makes 100 steps between two",
}
"""What people call an argument of a strategy that it has not, and what there is for it."""
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")


def explain_call(error: BaseException, traceback: TracebackType | None) -> None:
    """Python's own message says ``got multiple values for argument 'every'``: where it is a call of ours the arguments
    are added, those that need no name first."""
    nc, said = sys.modules[_PACKAGE.rstrip(".")], _CALLED.match(str(error))
    if not isinstance(error, TypeError) or said is None or said[1] not in nc.__all__ or traceback is None:
        return
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    line = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno)
    if f"nc.{said[1]}(" not in line and (frame.f_globals | frame.f_locals).get(said[1]) is not getattr(nc, said[1]):
        return  # somebody's own function, of the same name
    parameters = inspect.signature(getattr(nc, said[1])).parameters.values()
    placed = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
    named = [f"{one.name}=" for one in parameters if one.kind is one.KEYWORD_ONLY]
    more = f"; by name {', '.join(named)}" if named else ""
    unknown = _UNEXPECTED.search(str(error))
    meant = _OTHER_NAMES.get(unknown[1], "") if unknown is not None and isinstance(getattr(nc, said[1]), type) else ""
    hint = f" ({meant})" if meant else ""
    error.args = (f"{error}{hint}: it is nc.{said[1]}({', '.join(placed)}){more}",)


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` without the innermost frames, as far as they are this package's."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    while len(entries) > 1 and f"{entries[-1].tb_frame.f_globals.get('__name__', '')}.".startswith(_PACKAGE):
        entries.pop()
    return _linked(entries)


def users_lines(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` of a Stop: the first frame, which is the shell's and is not shown, and those of the user's code.

    Left out are the frames of this package, of what it calls, and of waiting; a library that the user calls stays.
    """
    entries: list[TracebackType] = []
    inside = False
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        inside = module.startswith(_PACKAGE) or (inside and _is_library(traceback))
        if not entries or not (inside or module.startswith(_WAITING)):
            entries.append(traceback)
        traceback = traceback.tb_next
    return _linked(entries)


def _is_library(entry: TracebackType) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith((*_LIBRARIES, "<frozen "))


def _linked(entries: list[TracebackType]) -> TracebackType | None:
    short = None
    for entry in reversed(entries):
        short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short


def _show(ip: Any, kind: type, value: BaseException, traceback: TracebackType, tb_offset: int | None = None) -> None:
    formatter = ip.InteractiveTB
    mode = formatter.mode
    shorten = without_our_frames
    explain_call(value, traceback)
    if isinstance(value, KeyboardInterrupt):
        formatter.set_mode("Plain")
        # What was caught while it came is told with frames of its own.
        value.__suppress_context__ = True
        shorten = users_lines
    try:
        ip.showtraceback((kind, value, shorten(traceback)), tb_offset=tb_offset)
    finally:
        formatter.set_mode(mode)
