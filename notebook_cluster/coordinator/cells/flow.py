"""Output on its way to one view: no more than it takes in, however slow it is.

A view says how far it has read (:class:`.Taken`). Beyond a window of unread output the rest waits here, of each node
only its newest text; what is left out is marked, and is in the node's file all the same.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from notebook_cluster.coordinator.cells.outputs import Missing, append, left_out, size_of
from notebook_cluster.protocol.views import Output

WINDOW_BYTES = 4 << 20
"""Of output that a view has not read yet."""
MOST_TEXT_BYTES = 128 * 1024
"""Of one node, that waits for a view; as much as a notebook shows of it."""
MOST_OTHER_BYTES = 16 << 20
"""Images, tables and the like that wait for a view, of all nodes."""


class OutputBacklog:
    """Outputs that wait for a view, in order."""

    def __init__(self, text_path: Callable[[str], Path]) -> None:
        self._text_path = text_path
        self._outputs: list[Output] = []
        self._text_bytes: dict[str, int] = {}
        self._other_bytes = 0
        self._missing: dict[str, Missing] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs or self._missing)

    def add(self, outputs: list[Output]) -> None:
        """``outputs`` follow; the oldest that there is no room for are left out."""
        for output in outputs:
            self._count(output, append(self._outputs, output))
        crowded = {node for node, size in self._text_bytes.items() if size > MOST_TEXT_BYTES}
        if crowded or self._other_bytes > MOST_OTHER_BYTES:
            self._make_room(crowded)

    def take(self) -> list[Output]:
        """Everything that waits; nothing does then."""
        ranks = {output.node: output.rank for output in self._outputs}
        outputs = [
            left_out(node, ranks.get(node), missing, self._text_path(node)) for node, missing in self._missing.items()
        ]
        outputs += self._outputs
        self._outputs, self._text_bytes, self._other_bytes, self._missing = [], {}, 0, {}
        return outputs

    def _count(self, output: Output, size: int) -> None:
        if output.kind == "stream":
            self._text_bytes[output.node] = self._text_bytes.get(output.node, 0) + size
        else:
            self._other_bytes += size

    def _make_room(self, crowded: set[str]) -> None:
        """Leave out the oldest half of what there is too much of."""
        kept: list[Output] = []
        for output in self._outputs:
            if output.kind == "stream":
                excess = self._text_bytes[output.node] - MOST_TEXT_BYTES // 2 if output.node in crowded else 0
            else:
                excess = self._other_bytes - MOST_OTHER_BYTES // 2
            if excess <= 0:
                kept.append(output)
                continue
            self._count(output, -size_of(output))
            rest = _end_of(output, size_of(output) - excess)
            if rest is not None:
                self._count(rest, size_of(rest))
                kept.append(rest)
            self._missing.setdefault(output.node, Missing()).add(output, rest)
        self._outputs = kept


class Flow:
    """The output of one cell to one view, which begins to watch when the output is ``position`` bytes long."""

    def __init__(self, text_path: Callable[[str], Path], position: int) -> None:
        self.backlog = OutputBacklog(text_path)
        self._sent = self._taken = self._newest = position

    def offer(self, outputs: list[Output], position: int) -> bool:
        """True when ``outputs``, with which the cell's output is ``position`` bytes long, may be sent now; else they
        wait here."""
        self._newest = position
        if self.backlog or self._sent - self._taken > WINDOW_BYTES:
            self.backlog.add(outputs)
            return False
        self._sent = position
        return True

    def taken(self, position: int) -> None:
        """The view has read everything up to ``position``."""
        self._taken = max(self._taken, min(position, self._sent))

    @property
    def ready(self) -> bool:
        """Something waits, and there is room for it."""
        return bool(self.backlog) and self._sent - self._taken <= WINDOW_BYTES

    def release(self) -> tuple[list[Output], int]:
        """What waits, to be sent now, and the position after it."""
        self._sent = self._newest
        return self.backlog.take(), self._newest


def _end_of(output: Output, size: int) -> Output | None:
    """The last lines of a stream, about ``size`` bytes of it; None when there is too little."""
    text = str(output.content.get("text", ""))
    if output.kind != "stream" or size < 1024:
        return None
    return msgspec.structs.replace(output, content={**output.content, "text": text[-size:].partition("\n")[2]})
