"""Tracebacks that are equal on all nodes where the error is, and that lead to the user's line."""

from types import TracebackType
from typing import Any

from notebook_cluster.collectives import Deadlock, PeerLost

_PACKAGE = __name__.partition(".")[0] + "."


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
    without the lines around each line: these cost 8 to 50 ms of every node, and a cell that is stopped should end at
    once."""
    ip.set_custom_exc((Deadlock, PeerLost, KeyboardInterrupt), _show)


def without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """``traceback`` without the innermost frames, as far as they are this package's."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    while len(entries) > 1 and entries[-1].tb_frame.f_globals.get("__name__", "").startswith(_PACKAGE):
        entries.pop()
    short = None
    for entry in reversed(entries):
        short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short


def _show(ip: Any, kind: type, value: BaseException, traceback: TracebackType, tb_offset: int | None = None) -> None:
    formatter = ip.InteractiveTB
    mode = formatter.mode
    if isinstance(value, KeyboardInterrupt):
        formatter.set_mode("Plain")
    try:
        ip.showtraceback((kind, value, without_our_frames(traceback)), tb_offset=tb_offset)
    finally:
        formatter.set_mode(mode)
