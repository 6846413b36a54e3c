"""Tracebacks that are equal on all nodes where the error is, and that lead to the user's line."""

import sysconfig
from types import TracebackType
from typing import Any

from notebook_cluster.collectives import Deadlock, PeerLost

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
    """In shell ``ip`` show :class:`PeerLost` and :class:`Deadlock` without the frames below the user's call, and a Stop
    with the user's lines only, without the lines around each: these cost 8 to 50 ms of every node, and a cell that is
    stopped should end at once."""
    ip.set_custom_exc((Deadlock, PeerLost, KeyboardInterrupt), _show)


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` without the innermost frames, as far as they are this package's."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    while len(entries) > 1 and entries[-1].tb_frame.f_globals.get("__name__", "").startswith(_PACKAGE):
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
    if isinstance(value, KeyboardInterrupt):
        formatter.set_mode("Plain")
        # What was caught while it came is told with frames of its own.
        value.__suppress_context__ = True
        shorten = users_lines
    try:
        ip.showtraceback((kind, value, shorten(traceback)), tb_offset=tb_offset)
    finally:
        formatter.set_mode(mode)
