"""What a script finds around it that a cell does not: its own arguments, working folder and ``exit()``, no event loop
that runs, and a standard output with a ``buffer``. Afterwards all is as it was, for the cells and scripts to come.
"""

import asyncio
import atexit
import builtins
import codecs
import gc
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@contextmanager
def as_program(path: Path, arguments: Sequence[str], folder: Path) -> Iterator[Hook]:
    """Make script ``path`` the program, in ``folder``. Yields what shows an exception that ends it: Python's way, or
    the script's ``sys.excepthook``. Before the end threads of the script are waited for, and its ``atexit`` functions
    run.
    """
    with ExitStack() as stack:
        for change in (_interpreter(path, arguments, folder), _no_loop(), _own_exit(), _buffers()):
            stack.enter_context(change)
        threads, shell_hook = set(threading.enumerate()), sys.excepthook

        def show(kind: type[BaseException], error: BaseException, entry: TracebackType | None) -> None:
            hook: Hook = sys.excepthook if sys.excepthook is not shell_hook else traceback.print_exception
            hook(kind, error, entry)

        with _at_exit(folder) as run_at_exit:
            try:
                yield show
            finally:
                _wait_for(set(threading.enumerate()) - threads)
                run_at_exit()


def _wait_for(threads: set[threading.Thread]) -> None:
    """Until they have ended, but for those of a pool with nothing to do: these end with the process."""
    pools: list[ThreadPoolExecutor] | None = None
    while alive := [thread for thread in threads if thread.is_alive() and not thread.daemon]:
        if pools is None:
            pools = [one for one in gc.get_objects() if isinstance(one, ThreadPoolExecutor)]
        busy = [thread for thread in alive if not any(_is_idle(pool) for pool in pools if thread in pool._threads)]
        if not busy:
            return
        busy[0].join(0.1)  # so that a Stop gets through


def _is_idle(pool: ThreadPoolExecutor) -> bool:
    return pool._work_queue.empty() and pool._idle_semaphore._value >= len(pool._threads)


@contextmanager
def _interpreter(path: Path, arguments: Sequence[str], folder: Path) -> Iterator[None]:
    argv, paths, modules, hook = sys.argv, list(sys.path), set(sys.modules), sys.excepthook
    streams, environment, before = (sys.stdin, sys.stdout, sys.stderr), dict(os.environ), os.getcwd()
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    os.chdir(folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.excepthook = argv, paths, hook
        sys.stdin, sys.stdout, sys.stderr = streams
        os.chdir(before)
        for name in set(os.environ) | set(environment):
            if name not in environment:
                os.environ.pop(name, None)
            elif os.environ.get(name) != environment[name]:
                os.environ[name] = environment[name]
        for name in set(sys.modules) - modules:
            # A script that is run again after a change finds the change.
            if _is_under(getattr(sys.modules[name], "__file__", None), folder):
                del sys.modules[name]


def _is_under(file: Any, folder: Path) -> bool:
    """Of the script's folder, but for libraries of an environment that lies there."""
    own = isinstance(file, str) and Path(file).is_relative_to(folder)
    return own and not {"site-packages", "dist-packages"} & {*Path(file).parts}


@contextmanager
def _no_loop() -> Iterator[None]:
    """A cell runs inside the kernel's event loop, in which ``asyncio.run`` refuses to."""
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        if loop is not None:
            asyncio.set_event_loop(loop)


@contextmanager
def _own_exit() -> Iterator[None]:
    """``exit()`` and ``quit()``, which IPython takes away while a cell runs."""

    def leave(code: Any = None) -> None:
        raise SystemExit(code)

    missing = object()
    before = {name: getattr(builtins, name, missing) for name in ("exit", "quit")}
    for name in before:
        setattr(builtins, name, leave)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(builtins, name)
            else:
                setattr(builtins, name, value)


class _Buffer(io.RawIOBase):
    """The bytes below a stream of text: what is written here is written there."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        data = bytes(data)
        self._stream.write(self._decoder.decode(data))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def _buffers() -> Iterator[None]:
    given = []
    for stream in (sys.stdout, sys.stderr):
        if not hasattr(stream, "buffer"):
            stream.buffer = _Buffer(stream)  # type: ignore[misc]
            given.append((stream, "buffer"))
        if not hasattr(stream, "reconfigure"):
            stream.reconfigure = lambda **settings: None  # type: ignore[union-attr]
            given.append((stream, "reconfigure"))
    try:
        yield
    finally:
        for stream, name in given:
            delattr(stream, name)


@contextmanager
def _at_exit(folder: Path) -> Iterator[Callable[[], None]]:
    """``atexit.register`` by code of the script: what it registers runs with the script. That of libraries, which go on
    to be used, runs when the node ends."""
    waiting: list[Callable[[], Any]] = []
    register = atexit.register

    def own_register(function: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__file__")
        if not _is_under(caller, folder):
            return register(function, *args, **kwargs)
        waiting.append(lambda: function(*args, **kwargs))
        return function

    def run() -> None:
        while waiting:
            try:
                waiting.pop()()
            except Exception:
                traceback.print_exc()

    atexit.register = own_register  # type: ignore[assignment]
    try:
        yield run
    finally:
        atexit.register = register
