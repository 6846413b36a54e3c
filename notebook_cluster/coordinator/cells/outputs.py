"""Output of cells: kept in order for views that come later, bounded in memory, whole in a file; and on its way to one
view, no more than that takes in, however slow it is.

A view says how far it has read (:class:`.Taken`). Beyond a window of unread output the rest waits in its :class:`Flow`,
of each node only its newest text; what is left out is marked, and is in the node's file all the same.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.coordinator.cells.cell_files import CellFiles, Origin
from notebook_cluster.protocol.views import LINES_LEFT_OUT, Output

_MOST_NODES = 4
"""That a hint names."""
HEAD_BYTES = 256 * 1024
TAIL_BYTES = 1024 * 1024
"""Per cell: what a view that comes later sees of the beginning and of the end."""
PIECE_CHARACTERS = 64 * 1024
WINDOW_BYTES = 4 << 20
"""Of output that a view has not read yet."""
MOST_WAITING_TEXT = 128 * 1024
"""Of one node, that waits for a view; as much as a notebook shows of it."""
MOST_WAITING_OTHER = 16 << 20
"""Images, tables and the like that wait for a view, of all nodes."""


def size_of(output: Output) -> int:
    """Roughly the bytes of ``output`` in memory and on the wire."""
    content = output.content
    if output.kind == "stream":
        return len(content.get("text", "")) + 64
    data = content.get("data")
    if isinstance(data, dict):
        return 128 + sum(len(value) if isinstance(value, str) else 1024 for value in data.values())
    return 256 + sum(len(line) for line in content.get("traceback", ()))


def pieces_of(output: Output) -> list[Output]:
    """``output``, long text cut at about PIECE_CHARACTERS, so that a part of it can be kept or sent."""
    text = str(output.content.get("text", "")) if output.kind == "stream" else ""
    if len(text) <= PIECE_CHARACTERS:
        return [output]
    return [
        msgspec.structs.replace(output, content={**output.content, "text": text[start : start + PIECE_CHARACTERS]})
        for start in range(0, len(text), PIECE_CHARACTERS)
    ]


def merge(last: Output | None, new: Output) -> Output | None:
    """Consecutive text of one node and stream as one output, or None when they do not belong together."""
    if last is None or last.kind != "stream" or new.kind != "stream" or last.node != new.node:
        return None
    if last.content.get("name") != new.content.get("name") or size_of(last) > 32 * 1024:
        return None
    if LINES_LEFT_OUT in last.content or LINES_LEFT_OUT in new.content:
        return None
    text = last.content["text"] + new.content["text"]
    return msgspec.structs.replace(last, content={**last.content, "text": text})


class Missing:
    """How much of a node's output is left out at one place."""

    def __init__(self) -> None:
        self.bytes = 0
        self.lines = 0

    def add(self, output: Output, rest: Output | None = None) -> None:
        """``output`` is left out, except for its end ``rest``."""
        for part, sign in ((output, 1), (rest, -1)):
            if part is not None:
                self.bytes += sign * size_of(part)
                self.lines += sign * str(part.content.get("text", "")).count("\n")


class CellOutputs:
    """The outputs of one cell: a head and a tail in memory, everything on disk; see :mod:`.cell_files`."""

    def __init__(self, index: Path) -> None:
        self.files = CellFiles(index)
        self.size = 0
        """Bytes of all output so far, roughly; it only grows."""
        self.last_sequence: dict[str, int] = {}
        self._had: dict[tuple[str, int], int] = {}
        """(Node, incarnation) -> the last link message whose output a coordinator before this one has kept."""
        self._kept_messages: dict[tuple[str, int], int] = {}
        self._loaded = True
        self._begin()

    def _begin(self) -> None:
        self._head: list[Output] = []
        self._tail: deque[Output] = deque()
        self._head_bytes = 0
        self._tail_bytes = 0
        self._left_out: dict[str, Missing] = {}

    def add(self, output: Output, origin: Origin) -> bool:
        """Keep ``output``; it is handed to the operating system before this returns. False: it was kept already, by a
        coordinator that ended before it could acknowledge the message."""
        if not self._loaded:
            self.load()
        if 0 < origin.message <= self._had.get((output.node, origin.incarnation), 0):
            return False
        self.files.add(output, origin)
        for piece in pieces_of(output):
            self._keep(piece)
        return True

    def _keep(self, output: Output) -> None:
        size = size_of(output)
        self.size += size
        if not self._tail and self._head_bytes + size <= HEAD_BYTES:
            self._head_bytes += append(self._head, output)
            return
        self._tail_bytes += append(self._tail, output)
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            gone = self._tail.popleft()
            self._tail_bytes -= size_of(gone)
            self._left_out.setdefault(gone.node, Missing()).add(gone)

    def all(self) -> list[Output]:
        """What is kept, in order, with a visible line for each node where its middle was left out."""
        if not self._loaded:
            self.load()
        markers = [
            left_out(node, self._any_of(node), missing, self.files.text_path(node))
            for node, missing in self._left_out.items()
        ]
        return [*self._head, *markers, *self._tail]

    def _any_of(self, node: str) -> Output | None:
        return next((output for output in [*self._tail, *self._head] if output.node == node), None)

    def recover(self) -> None:
        """Read what a coordinator before this one has kept."""
        self.load()
        self._had = self._kept_messages

    def load(self) -> None:
        """Read the files again: after a restart of the coordinator, or because :meth:`unload` was called."""
        self._begin()
        self.size = 0
        self._kept_messages = {}
        for line in self.files.load():
            for piece in pieces_of(line.output):
                self._keep(piece)
            self.last_sequence[line.peer] = line.sequence
            node = line.output.node, line.incarnation
            self._kept_messages[node] = max(line.message, self._kept_messages.get(node, 0))
        self._loaded = True

    def unload(self) -> None:
        """Take no memory and no open file until somebody asks."""
        self.files.close()
        self._begin()
        self._loaded = False

    def close(self) -> None:
        """Close the files; output that comes all the same opens them again."""
        self.files.close()


def left_out(node: str, other: Output | None, missing: Missing, path: Path) -> Output:
    """A visible line where output of ``node`` is missing; a view that folds it away counts the missing lines too.
    ``other``: an output of that node."""
    lines = f"{missing.lines:,} lines, " if missing.lines else ""
    text = f"\n[... {lines}{missing.bytes:,} bytes of output left out here; all of it: {path} ...]\n"
    content = {"name": "stderr", "text": text, LINES_LEFT_OUT: missing.lines}
    rank, place = (None, None) if other is None else (other.rank, other.place)
    return Output(node=node, rank=rank, kind="stream", content=content, place=place)


def append(outputs: list[Output] | deque[Output], output: Output) -> int:
    """``output`` follows, merged with the last one where possible; returns by how many bytes (:func:`size_of`) all of
    them grow."""
    last = outputs[-1] if outputs else None
    merged = merge(last, output)
    if last is None or merged is None:
        outputs.append(output)
        return size_of(output)
    outputs[-1] = merged
    return size_of(merged) - size_of(last)


def batches(outputs: list[Output], limit: int = 512 * 1024) -> list[list[Output]]:
    """``outputs`` merged and cut into messages of about ``limit`` bytes for a view."""
    result: list[list[Output]] = []
    current: list[Output] = []
    size = 0
    for output in outputs:
        size += append(current, output)
        if size >= limit:
            result.append(current)
            current, size = [], 0
    if current:
        result.append(current)
    return result


def hint_missing_name(output: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """The name in a NameError that the notebook has and the node has not."""
    if output.get("ename") != "NameError":
        return None
    text = str(output.get("evalue", ""))
    return next((name for name in names if f"'{name}'" in text), None)


def hint_other_nodes(
    output: dict[str, Any], node: str, cells: Iterable[tuple[int, str, Collection[str]]]
) -> str | None:
    """Where the name in a NameError of ``node`` was defined without this node; ``cells``: number, source and nodes of
    those before, newest first."""
    found = re.fullmatch(r"name '(\w{1,200})' is not defined.*", str(output.get("evalue", "")))
    if output.get("ename") != "NameError" or found is None:
        return None
    name = found[1]
    defines = re.compile(
        rf"^(?:(?:async )?def {name}\b|class {name}\b|(?:from \S+ )?import .*\b{name}\b"
        rf"|(?:\w+, *)*{name}\b[\w, ]*(?::[^=\n]*)?=(?!=))",
        re.MULTILINE,
    )
    number, _, nodes = next((cell for cell in cells if name in cell[1] and defines.search(cell[1])), (0, "", [node]))
    if node in nodes or not nodes:
        return None
    where = ", ".join(sorted(nodes)[:_MOST_NODES]) + (", ..." if len(nodes) > _MOST_NODES else "")
    return f"cell {number} defined '{name}' on {where} only: %%on_all defines it on every node"


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
        crowded = {node for node, size in self._text_bytes.items() if size > MOST_WAITING_TEXT}
        if crowded or self._other_bytes > MOST_WAITING_OTHER:
            self._make_room(crowded)

    def take(self) -> list[Output]:
        """Everything that waits; nothing does then."""
        others = {output.node: output for output in self._outputs}
        outputs = [
            left_out(node, others.get(node), missing, self._text_path(node)) for node, missing in self._missing.items()
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
                excess = self._text_bytes[output.node] - MOST_WAITING_TEXT // 2 if output.node in crowded else 0
            else:
                excess = self._other_bytes - MOST_WAITING_OTHER // 2
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
