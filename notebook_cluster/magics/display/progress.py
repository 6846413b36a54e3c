"""How far something large is, in one line below the cell that changes while it goes on."""

import time
import uuid
from types import TracebackType
from typing import Any

from notebook_cluster.magics.display.publishing import ShellPublisher

_FIRST_AFTER = 0.5
"""Seconds: what is done before needs no bar."""
_EVERY = 0.25
_WIDTH = 24


class Progress:
    """Call it with (bytes done, bytes in all). As a context manager it takes its line away at the end, so that what is
    saved in the notebook is only what was said about the result."""

    def __init__(self, shell: Any, label: str) -> None:
        self._publisher = ShellPublisher(shell)
        self._label = label
        self._display_id = f"nbc-{uuid.uuid4().hex[:12]}"
        self._began = self._last = time.monotonic()
        self._shown = False
        self.note = ""
        """Stands behind the bar: what is being waited for."""

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._publisher.live or now - self._began < _FIRST_AFTER or now - self._last < _EVERY:
            return
        self._last = now
        self._show(bar(self._label, done, total, now - self._began) + (f" · {self.note}" if self.note else ""))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            self._show("")

    def _show(self, text: str) -> None:
        self._publisher.begin()
        self._publisher.publish({"text/plain": text}, {}, self._display_id, self._shown)
        self._shown = True


def bar(label: str, done: int, total: int, seconds: float) -> str:
    """``sending data.csv  ████████░░░░  40 %  4.0 of 10.0 MB, 2.0 MB/s, 3 s left``."""
    share = min(done / total, 1.0) if total else 1.0
    full = round(share * _WIDTH)
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {(total - done) / rate:.0f} s left" if rate > 0 and done < total else ""
    amounts = f"{done / 1e6:,.1f} of {amount(total)}, {amount(rate)}/s{left}"
    return f"{label}  {'█' * full}{'░' * (_WIDTH - full)} {share:4.0%}  {amounts}"


def amount(size: float) -> str:
    """``12.3 MB``, ``4 kB``, ``17 bytes``: decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}" if size < 1000 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} byte{'' if round(size) == 1 else 's'}"
