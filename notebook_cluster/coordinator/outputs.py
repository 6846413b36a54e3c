"""Output of cells: kept in order for views that come later, bounded in memory, whole in a file."""

import logging
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.protocol.views import Output

log = logging.getLogger(__name__)

HEAD_BYTES = 256 * 1024
TAIL_BYTES = 1024 * 1024
"""Per cell: what a view that comes later sees of the beginning and of the end."""


class OutputLine(msgspec.Struct):
    """One line of a cell's output file. ``sequence``: the link message of ``peer`` that brought it."""

    output: Output
    peer: str
    sequence: int


def size_of(output: Output) -> int:
    """Roughly the bytes of ``output`` in memory and on the wire."""
    content = output.content
    if output.kind == "stream":
        return len(content.get("text", "")) + 64
    data = content.get("data")
    if isinstance(data, dict):
        return 128 + sum(len(value) if isinstance(value, str) else 1024 for value in data.values())
    return 256 + sum(len(line) for line in content.get("traceback", ()))


def merge(last: Output | None, new: Output) -> Output | None:
    """Consecutive text of one node and stream as one output, or None when they do not belong together."""
    if last is None or last.kind != "stream" or new.kind != "stream" or last.node != new.node:
        return None
    if last.content.get("name") != new.content.get("name") or size_of(last) > 32 * 1024:
        return None
    text = last.content["text"] + new.content["text"]
    return msgspec.structs.replace(last, content={**last.content, "text": text})


class CellOutputs:
    """The outputs of one cell: a head and a tail in memory, everything in ``path`` (JSON lines, 0600)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._head: list[Output] = []
        self._tail: deque[Output] = deque()
        self._head_bytes = 0
        self._tail_bytes = 0
        self._left_out = 0
        self._encoder = msgspec.json.Encoder()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = open(path, "ab", opener=_private_opener)  # noqa: SIM115 - closed in close()
        self.last_sequence: dict[str, int] = {}

    def add(self, output: Output, peer: str, sequence: int) -> None:
        """Keep ``output``; the line is handed to the operating system before this returns."""
        self._file.write(self._encoder.encode(OutputLine(output, peer, sequence)) + b"\n")
        self._file.flush()
        self._keep(output)

    def _keep(self, output: Output) -> None:
        size = size_of(output)
        if not self._tail and self._head_bytes + size <= HEAD_BYTES:
            self._head_bytes += size
            _append(self._head, output)
            return
        self._tail_bytes += size
        _append(self._tail, output)
        while self._tail_bytes > TAIL_BYTES and len(self._tail) > 1:
            gone = size_of(self._tail.popleft())
            self._tail_bytes -= gone
            self._left_out += gone

    def all(self) -> list[Output]:
        """What is kept, in order, with a visible line where the middle was left out."""
        if not self._left_out:
            return [*self._head, *self._tail]
        text = f"\n[... {self._left_out} bytes of output left out here; all of it: {self.path} ...]\n"
        node = self._tail[0]
        marker = Output(node=node.node, rank=node.rank, kind="stream", content={"name": "stderr", "text": text})
        return [*self._head, marker, *self._tail]

    def restore(self) -> None:
        """Read the file again, after a restart of the coordinator."""
        decoder = msgspec.json.Decoder(OutputLine)
        for raw in self.path.read_bytes().splitlines():
            try:
                line = decoder.decode(raw)
            except msgspec.DecodeError:
                log.warning("a line of %s was cut off and left out", self.path)
                continue
            self._keep(line.output)
            self.last_sequence[line.peer] = line.sequence

    def close(self) -> None:
        self._file.close()


def _private_opener(path: str, flags: int) -> int:
    import os

    return os.open(path, flags, 0o600)


def _append(outputs: list[Output] | deque[Output], output: Output) -> None:
    merged = merge(outputs[-1] if outputs else None, output)
    if merged is None:
        outputs.append(output)
    else:
        outputs[-1] = merged


def batches(outputs: list[Output], limit: int = 512 * 1024) -> list[list[Output]]:
    """``outputs`` merged and cut into messages of about ``limit`` bytes for a view."""
    result: list[list[Output]] = []
    current: list[Output] = []
    size = 0
    for output in outputs:
        merged = merge(current[-1] if current else None, output)
        if merged is not None:
            current[-1] = merged
        else:
            current.append(output)
        size += size_of(output)
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
