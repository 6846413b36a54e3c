"""Output of cells: kept in order for views that come later, bounded in memory, whole in a file."""

from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.coordinator.cells.cell_files import CellFiles
from notebook_cluster.protocol.views import LINES_LEFT_OUT, Output

HEAD_BYTES = 256 * 1024
TAIL_BYTES = 1024 * 1024
"""Per cell: what a view that comes later sees of the beginning and of the end."""
PIECE_CHARACTERS = 64 * 1024


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
        self._loaded = True
        self._begin()

    def _begin(self) -> None:
        self._head: list[Output] = []
        self._tail: deque[Output] = deque()
        self._head_bytes = 0
        self._tail_bytes = 0
        self._left_out: dict[str, Missing] = {}

    def add(self, output: Output, peer: str, sequence: int) -> None:
        """Keep ``output``; it is handed to the operating system before this returns."""
        if not self._loaded:
            self.load()
        self.files.add(output, peer, sequence)
        for piece in pieces_of(output):
            self._keep(piece)

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
            left_out(node, self._rank(node), missing, self.files.text_path(node))
            for node, missing in self._left_out.items()
        ]
        return [*self._head, *markers, *self._tail]

    def _rank(self, node: str) -> int | None:
        return next((output.rank for output in [*self._tail, *self._head] if output.node == node), None)

    def load(self) -> None:
        """Read the files again: after a restart of the coordinator, or because :meth:`unload` was called."""
        self._begin()
        self.size = 0
        for line in self.files.load():
            for piece in pieces_of(line.output):
                self._keep(piece)
            self.last_sequence[line.peer] = line.sequence
        self._loaded = True

    def unload(self) -> None:
        """Take no memory and no open file until somebody asks."""
        self.files.close()
        self._begin()
        self._loaded = False

    def close(self) -> None:
        """Close the files; output that comes all the same opens them again."""
        self.files.close()


def left_out(node: str, rank: int | None, missing: Missing, path: Path) -> Output:
    """A visible line where output of ``node`` is missing; a view that folds it away counts the missing lines too."""
    lines = f"{missing.lines:,} lines, " if missing.lines else ""
    text = f"\n[... {lines}{missing.bytes:,} bytes of output left out here; all of it: {path} ...]\n"
    content = {"name": "stderr", "text": text, LINES_LEFT_OUT: missing.lines}
    return Output(node=node, rank=rank, kind="stream", content=content)


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
