"""The whole output of one cell on disk: a text file of each node for people, and an index for this process.

``cells/000007/<node>.txt`` is what the node printed, as it came; ``cells/000007.jsonl`` has a line for each output,
with the place of printed text instead of the text itself. A node that printed next to nothing has no text file: most
cells need one file only. All are readable by their owner only.
"""

import logging
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.views import Output

log = logging.getLogger(__name__)

MOST_TEXT_BYTES = 2 << 30
"""Of one node in one cell: a loop that prints all night must not fill the disk."""

INLINE_BYTES = 400
"""A node's text up to here is in the index: no view folds so little."""
MOST_WAITING_BYTES = 4 << 20
"""Of one cell's output, for a full disk."""
_LONGEST_LINE = 256 << 20


class Origin(NamedTuple):
    """Where an output comes from."""

    peer: str
    """The peer's key."""
    received: int
    """The last link message of that peer which need not come again to the next coordinator."""
    message: int = 0
    """The one that brought the output; 0: it is not known. A full disk holds acknowledgements, and this comes again."""
    incarnation: int = 0
    """Of the node's process: as long as it lives so does its agent, which numbers the messages."""


class IndexLine(msgspec.Struct):
    """One output. ``sequence``, ``message``, ``incarnation``: see :class:`Origin`. ``start`` and ``end``: bytes of the
    node's text file that are the text of a stream, which is left out of ``output``; both 0: it is in ``output``."""

    output: Output
    peer: str
    sequence: int
    start: int = 0
    end: int = 0
    message: int = 0
    incarnation: int = 0


class CellFiles:
    """Appends outputs, and reads them again after a restart of the coordinator."""

    def __init__(self, index: Path) -> None:
        self.index = index
        self.folder = index.with_suffix("")
        self.trouble = ""
        """Why what was added is not all on disk."""
        self._waiting: deque[tuple[Output, Origin]] = deque()
        self._room = MOST_WAITING_BYTES
        self._end = index.stat().st_size if index.exists() else 0
        """Bytes of the index that are whole lines."""
        self._encoder = msgspec.json.Encoder()
        self._open: dict[Path, IO[bytes]] = {}
        self._full: set[str] = set()
        self._inline: dict[str, bytes] = {}
        """Text of nodes that have no text file."""
        self._ends: dict[str, int] = {}
        """Bytes of the text files that lines of the index name."""

    def text_path(self, node: str) -> Path:
        """The text file of ``node``."""
        return self.folder / f"{node if is_name(node) else 'node'}.txt"

    def add(self, output: Output, origin: Origin) -> None:
        """Write ``output``; it is handed to the operating system before this returns. What the disk does not take
        waits for room, with what comes after it; over MOST_WAITING_BYTES nothing is kept any more."""
        if self._room < 0:
            return
        self._waiting.append((output, origin))
        self.write()
        if self.trouble:
            self._room -= len(self._encoder.encode(output))
            if self._room < 0:
                self._waiting.clear()

    def write(self) -> None:
        """Write what waits; :attr:`trouble` says whether that is done."""
        try:
            while self._waiting:
                self._add(*self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self.trouble:
                log.warning("output is not kept in %s: %s", self.folder, error)
            self.trouble = f"{error.strerror or error}"
        else:
            if self.trouble and self._room >= 0:
                self.trouble, self._room = "", MOST_WAITING_BYTES

    def _add(self, output: Output, origin: Origin) -> None:
        node, text = output.node, text_of(output)
        before = self._inline.get(node, b""), self._ends.get(node, 0)
        try:
            start, end = self._write_text(node, text) if text else (0, 0)
            if output.kind == "stream" and (end or node in self._full):
                output = msgspec.structs.replace(output, content={**output.content, "text": ""})
            line = IndexLine(output, origin.peer, origin.received, start, end, origin.message, origin.incarnation)
            self._end += self._append(self.index, self._encoder.encode(line) + b"\n", self._end)
        except OSError:
            self._inline[node], self._ends[node] = before
            raise

    def _write_text(self, node: str, text: str) -> tuple[int, int]:
        if node in self._full:
            return 0, 0
        path = self.text_path(node)
        data = text.encode(errors="replace")
        start = self._ends.get(node, 0)
        if not start:
            before = self._inline.get(node, b"")
            start = len(before)
            if start + len(data) <= INLINE_BYTES:
                self._inline[node] = before + data
                return 0, 0
            self._append(path, before, 0)
        if start + len(data) > MOST_TEXT_BYTES:
            self._full.add(node)
            data = f"\n[... over {MOST_TEXT_BYTES >> 30} GiB: the rest is not kept ...]\n".encode()
            self._append(path, data, start)
            return 0, 0
        self._append(path, data, start)
        self._ends[node] = start + len(data)
        return start, self._ends[node]

    def _append(self, path: Path, data: bytes, end: int) -> int:
        """Write ``data`` behind byte ``end``, after which there is at most what a full disk has cut off."""
        file = self._file(path)
        if self.trouble:
            file.truncate(end)
        file.write(data)
        file.flush()
        return len(data)

    def _file(self, path: Path) -> IO[bytes]:
        file = self._open.get(path)
        if file is None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = self._open[path] = open(path, "ab", opener=_private_opener)  # noqa: SIM115 - closed in close()
            file.seek(0, os.SEEK_END)
        return file

    def load(self) -> Iterator[IndexLine]:
        """:meth:`read`; what a crash cut off is removed, and :meth:`add` goes on behind the rest."""
        self.close()
        self._inline.clear()
        self._ends.clear()
        self._mend()
        self._end = self.index.stat().st_size if self.index.exists() else 0
        for line in self.read():
            node, text = line.output.node, text_of(line.output)
            if line.end:
                self._ends[node] = line.end
            elif text and node not in self._ends:
                self._inline[node] = self._inline.get(node, b"") + text.encode(errors="replace")
            yield line
        for path in self.folder.glob("*.txt"):
            # Text that came without its line in the index comes again.
            end = self._ends.get(path.stem, 0)
            if path.stat().st_size > end:
                os.truncate(path, end)

    def read(self) -> Iterator[IndexLine]:
        """Every output in order, with its text; a line that is not readable is left out."""
        if not self.index.exists():
            return
        decoder = msgspec.json.Decoder(IndexLine)
        texts: dict[str, IO[bytes]] = {}
        try:
            with open(self.index, "rb") as index:
                for raw in index:
                    try:
                        line = decoder.decode(raw)
                    except msgspec.DecodeError:
                        log.warning("a line of %s is not readable and left out", self.index)
                        continue
                    yield self._with_text(line, texts)
        finally:
            for file in texts.values():
                file.close()

    def _with_text(self, line: IndexLine, texts: dict[str, IO[bytes]]) -> IndexLine:
        if line.output.kind != "stream" or line.end <= line.start:
            return line
        node = line.output.node
        if node not in texts:
            texts[node] = open(self.text_path(node), "rb")  # noqa: SIM115 - closed in read()
        texts[node].seek(line.start)
        text = texts[node].read(line.end - line.start).decode(errors="replace")
        output = msgspec.structs.replace(line.output, content={**line.output.content, "text": text})
        return msgspec.structs.replace(line, output=output)

    def _mend(self) -> None:
        """Cut off the end of a last line that a crash left, so that the next one begins on its own."""
        if not self.index.exists():
            return
        size = self.index.stat().st_size
        with open(self.index, "r+b") as file:
            start = max(0, size - _LONGEST_LINE)
            file.seek(start)
            whole = file.read().rfind(b"\n") + 1
            if whole and start + whole < size:
                log.warning("the last line of %s was cut off by a crash", self.index)
                file.truncate(start + whole)

    def close(self) -> None:
        """Close the files; :meth:`add` opens them again."""
        self.write()
        for file in self._open.values():
            try:
                file.close()
            except OSError as error:
                log.warning("%s: %s", self.folder, error)
        self._open.clear()


def text_of(output: Output) -> str:
    """What stands in the node's text file for ``output``."""
    content: dict[str, Any] = output.content
    if output.kind == "stream":
        return str(content.get("text", ""))
    if output.kind == "error":
        return "\n".join(map(str, content.get("traceback", ()))) + "\n"
    text = (content.get("data") or {}).get("text/plain")
    return f"{text}\n" if isinstance(text, str) and text else ""


def _private_opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
