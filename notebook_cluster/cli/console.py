"""The terminal: lines that a person types while the agent runs in the same process, and tables."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Sequence

_PAUSE_S = 1.0
_MAX_LINE = 1000


def is_terminal() -> bool:
    """True when a person can be asked: input and output are terminals."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


class Keyboard:
    """Calls ``on_line`` on the running loop for each line typed at the terminal, from ``start()`` to ``close()``."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._file = sys.stdin.fileno()
        self._typed = b""
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._file, self._read)

    def close(self) -> None:
        self._loop.remove_reader(self._file)
        if self._pause is not None:
            self._pause.cancel()

    def _read(self) -> None:
        try:
            # In the background (Ctrl-Z, bg) what is typed belongs to the shell, and reading it would stop this process.
            mine = os.tcgetpgrp(self._file) == os.getpgrp()
            data = os.read(self._file, _MAX_LINE) if mine else b""
        except OSError:
            data = b""
        if not data:
            # Not ours, Ctrl-D, or the terminal is gone: it stays readable, so look again after a while.
            self._loop.remove_reader(self._file)
            self._pause = self._loop.call_later(_PAUSE_S, self.start)
            return
        *lines, rest = (self._typed + data).split(b"\n")
        self._typed = rest[-_MAX_LINE:]
        for line in lines:
            self._on_line(line.decode("utf-8", "replace").strip())


def one_line(text: str) -> str:
    """``text`` on one line; what others said in it cannot steer the terminal."""
    return "".join(character for character in text if character.isprintable())


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print ``rows`` under ``headings``; what others call themselves is shown as it is and steers nothing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*headings)
    for row in rows:
        # Text, not str: a peer's words must not be read as rich's markup.
        table.add_row(*(Text(cell) for cell in row))
    # A table that goes to a file or another program is not wrapped at 80 columns.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
