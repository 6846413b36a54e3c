"""Files and folders of the notebook to the nodes' working folders, for ``Cluster.send_files`` and ``%cluster send``:
which files a path means, where they belong on a node, and how they get there.

What is at a place already, with the same hash, is not sent. Every place (a folder on a peer, however many nodes work in
it) is served at its own pace, with a few small pieces on their way.
"""

import concurrent.futures
import difflib
import hashlib
import os
import stat
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.requests import RunningCluster
from notebook_cluster.client.stream import Progress, wait
from notebook_cluster.protocol import transfers as t
from notebook_cluster.protocol.names import MOST_PATH_CHARACTERS
from notebook_cluster.protocol.state import NodeView
from notebook_cluster.protocol.transfers import LEFT_OUT, MOST_FILES


@dataclass(frozen=True)
class SourceFile:
    """A file here, and its relative ``path`` with ``/`` on the nodes."""

    file: Path
    path: str
    size: int
    executable: bool


@dataclass
class Sources:
    """What is to be sent.

    Attributes:
        base: the folder here to which the paths are relative, when they are the same on the nodes.
        skipped: what is left out, with the reason, for people.
    """

    base: Path | None
    files: list[SourceFile] = field(default_factory=list)
    empty_folders: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(source.size for source in self.files)

    def are_in(self, folder: str) -> bool:
        """True when ``folder`` of this machine is the one in which they lie at the same paths."""
        try:
            return self.base is not None and os.path.samefile(folder, self.base)
        except OSError:
            return False


def find_sources(
    path: str, directory: Path | None = None, *, leave_out: Callable[[Path], bool] = lambda entry: False
) -> Sources:
    """The file ``path``, or everything in the folder ``path`` but caches, version control and what ``leave_out`` says.

    Inside ``directory`` (default: the current one) the relative path stays what it is, so that a cell finds the file
    under the same name on every node; what is elsewhere goes into the working folder itself.

    Raises:
        ClusterError: it does not exist (names what is near), cannot be read, or is too much.
    """
    base = (directory or Path.cwd()).resolve()
    try:
        typed = Path(path).expanduser()
        found = base / typed
        mode = found.stat().st_mode
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(_not_there(path, base, error)) from None
    name, inside = _target(found, base)
    sources = Sources(base if inside else None)
    if stat.S_ISDIR(mode):
        _walk(found, found.resolve(), name, sources, {found.resolve()}, leave_out)
    elif stat.S_ISREG(mode):
        _add(found, name, sources)
    else:
        raise ClusterError(f"{path} is neither a file nor a folder: only those can be sent")
    if not sources.files and not sources.empty_folders and sources.skipped:
        raise ClusterError(f"there is nothing to send in {path}: {sources.skipped[0]}")
    return sources


def _target(found: Path, base: Path) -> tuple[str, bool]:
    """The path on the nodes, and whether it is the same as here."""
    # Not resolved: a link to a data disk keeps the name that the notebook uses.
    plain = Path(os.path.normpath(found))
    if plain == base:
        return "", True
    if plain.is_relative_to(base):
        return plain.relative_to(base).as_posix(), True
    return found.resolve().name, False


def _walk(
    folder: Path, root: Path, name: str, sources: Sources, seen: set[Path], leave_out: Callable[[Path], bool]
) -> None:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ClusterError(f"folder {folder} cannot be read: {error.strerror}") from None
    if not entries and name:
        sources.empty_folders.append(name)
    for entry in entries:
        path = f"{name}/{entry.name}" if name else entry.name
        if entry.name in LEFT_OUT or leave_out(entry):
            continue
        target = entry.resolve()
        if entry.is_symlink() and not target.is_relative_to(root):
            sources.skipped.append(f"{path} is a link that leads out of the folder")
        elif entry.is_dir():
            if target in seen:
                sources.skipped.append(f"{path} is a link to a folder that is sent already")
                continue
            _walk(entry, root, path, sources, seen | {target}, leave_out)
        elif entry.is_file():
            _add(entry, path, sources)
        else:
            sources.skipped.append(f"{path} is neither a file nor a folder")


def _add(file: Path, path: str, sources: Sources) -> None:
    if len(sources.files) >= MOST_FILES:
        raise ClusterError(f"more than {MOST_FILES:,} files: pack them into one (shutil.make_archive) and send that")
    if not path.isprintable() or "\\" in path or len(path) > MOST_PATH_CHARACTERS:
        raise ClusterError(f"{path!r} has a name that not every machine can write: rename it")
    try:
        facts = file.stat()
        with file.open("rb"):
            pass
    except OSError as error:
        raise ClusterError(f"{file} cannot be read: {error.strerror}") from None
    sources.files.append(SourceFile(file, path, facts.st_size, bool(facts.st_mode & stat.S_IXUSR)))


def _not_there(path: str, base: Path, error: Exception) -> str:
    if not isinstance(error, FileNotFoundError):
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return f"{path!r} cannot be read: {reason}"
    parent = (base / path).parent
    try:
        names = [entry.name for entry in parent.iterdir()]
    except OSError:
        return f"there is no file or folder {path!r}: {parent} does not exist"
    near = difflib.get_close_matches(Path(path).name, names, n=1, cutoff=0.6)
    hint = f" (did you mean {str(Path(path).with_name(near[0]))!r}?)" if near else ""
    return f"there is no file or folder {path!r} in {base}{hint}"


_END_SECONDS = 2.0


@dataclass
class Destination:
    """A folder in which nodes of one peer work, and what happened there.

    Attributes:
        own: it is where the files come from, at the same paths.
        is_here: it is the notebook's own folder; nothing is replaced there.
        sent, present: numbers of files that were sent, and that were there already.
        replaced: paths of other files in whose place they were put.
        error: why it was given up; empty when everything is there.
    """

    peer: str
    folder: str
    nodes: list[str]
    own: bool = False
    is_here: bool = False
    sent: int = 0
    present: int = 0
    sent_bytes: int = 0
    replaced: list[str] = field(default_factory=list)
    error: str = ""


def send_files(
    cluster: RunningCluster, sources: Sources, nodes: Sequence[NodeView], on_progress: Progress
) -> list[Destination]:
    """Put ``sources`` into the working folder of each of ``nodes``. What fails at one place does not stop the others.

    Raises:
        ClusterError: the cluster has ended.
        KeyboardInterrupt: Stop; what is incomplete is removed everywhere.
    """
    offers = [
        t.FileOffer(path=source.path, size=source.size, digest=_digest(source), executable=source.executable)
        for source in sources.files
    ] + [t.FileOffer(path=path, folder=True) for path in sources.empty_folders]
    places = find_places(cluster, nodes)
    for place in places:
        place.own = place.peer == "local" and not place.error and sources.are_in(place.folder)
    senders = [_Sender(cluster, place, sources.files) for place in places if not place.own and not place.error]
    for place in places:
        if place.own:
            place.present = len(sources.files)
    try:
        for sender in senders:
            sender.offer(offers)
        while heads := [sender.waiting[0][0] for sender in senders if sender.waiting]:
            concurrent.futures.wait(heads, timeout=0.2, return_when=concurrent.futures.FIRST_COMPLETED)
            for sender in senders:
                sender.go_on()
            on_progress(sum(sender.done for sender in senders), sum(sender.total for sender in senders))
    finally:
        _end_all(senders)
    return places


def find_places(cluster: RunningCluster, nodes: Sequence[NodeView]) -> list[Destination]:
    """The folders in which ``nodes`` work, each once, in the order of the nodes."""
    asked = [cluster.connection.request(t.FindFolder(node=node.name), t.FilesAnswer) for node in nodes]
    places: dict[tuple[str, str], Destination] = {}
    for node, future in zip(nodes, asked, strict=True):
        folder, error = "", ""
        try:
            folder = wait(future).folder
        except ClusterError as trouble:
            error = str(trouble)
            folder = f"? {node.name}"
        place = places.setdefault((node.peer, folder), Destination(node.peer, folder, [], error=error))
        place.nodes.append(node.name)
        if not error and node.peer == "local":
            place.is_here = os.path.realpath(folder) == os.path.realpath(os.getcwd())
    return list(places.values())


def _digest(source: SourceFile) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with source.file.open("rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
    except OSError as error:
        raise ClusterError(f"{source.file} cannot be read: {error.strerror}") from None
    return digest.digest()


def _end_all(senders: "list[_Sender]") -> None:
    """Let go of what is incomplete, also when the cluster answers no more."""
    open_ones = [sender.end() for sender in senders if sender.is_open]
    concurrent.futures.wait(open_ones, timeout=_END_SECONDS)


class _Sender:
    """Sends to one place."""

    def __init__(self, cluster: RunningCluster, place: Destination, files: Sequence[SourceFile]) -> None:
        self.place = place
        self.total = 0
        self.done = 0
        self.waiting: deque[tuple[concurrent.futures.Future[Any], int]] = deque()
        """(answer, bytes) of what is on its way: the offer, then pieces."""
        self.is_open = False
        self._offered = False
        self._cluster = cluster
        self._files = files
        self._ticket = uuid.uuid4().hex
        self._pieces: Iterator[t.WriteFile] = iter(())

    def offer(self, offers: list[t.FileOffer]) -> None:
        """Begin: what of it is there?"""
        self.is_open = True
        self.waiting.append((self._ask(t.OfferFiles(node=self.place.nodes[0], ticket=self._ticket, files=offers)), 0))

    def go_on(self) -> None:
        """Take the answers that are there, and send as much again."""
        while self.waiting and self.waiting[0][0].done():
            future, size = self.waiting.popleft()
            try:
                answer: t.FilesAnswer = future.result()
                if not self._offered:
                    self._offered = True
                    self._begin(answer)
            except ClusterError as error:
                self._fail(str(error))
                return
            self.done += size
        self._fill()
        if not self.waiting and not self.place.error:
            self.is_open = False

    def _begin(self, answer: t.FilesAnswer) -> None:
        """With what is wanted there."""
        place, files = self.place, self._files
        wanted = [number for number in answer.wanted if 0 <= number < len(files)]
        place.replaced = [files[number].path for number in answer.replaced if number in wanted]
        if place.is_here and place.replaced:
            raise ClusterError(f"{place.replaced[0]} in the notebook's own folder is another file: rename one of them")
        place.present = len(files) - len(wanted)
        place.sent = len(wanted)
        self.total = place.sent_bytes = sum(files[number].size for number in wanted)
        self._pieces = self._read(wanted)

    def end(self) -> "concurrent.futures.Future[t.FilesAnswer]":
        return self._ask(t.EndFiles(node=self.place.nodes[0], ticket=self._ticket))

    def _fill(self) -> None:
        try:
            while len(self.waiting) < t.CHUNKS_AT_ONCE and (piece := next(self._pieces, None)) is not None:
                self.waiting.append((self._ask(piece), len(piece.data)))
        except ClusterError as error:
            self._fail(str(error))

    def _read(self, wanted: Sequence[int]) -> Iterator[t.WriteFile]:
        for number in wanted:
            source = self._files[number]
            for offset, data in _pieces_of(source):
                yield t.WriteFile(
                    node=self.place.nodes[0], ticket=self._ticket, number=number, offset=offset, data=data
                )

    def _fail(self, error: str) -> None:
        self.place.error = error
        self.waiting.clear()
        self._pieces = iter(())
        self.done = self.total

    def _ask(self, body: Any) -> "concurrent.futures.Future[Any]":
        try:
            answer: concurrent.futures.Future[Any] = self._cluster.connection.request(body, t.FilesAnswer)
            return answer
        except ClusterError as error:
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed


def _pieces_of(source: SourceFile) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of a file, one empty piece when it is empty. ClusterError when it is not what it was."""
    changed = ClusterError(f"{source.path} changed while it was sent: send it again")
    try:
        with source.file.open("rb") as file:
            for offset in range(0, source.size, t.CHUNK_BYTES) or [0]:
                data = file.read(min(t.CHUNK_BYTES, source.size - offset))
                if len(data) != min(t.CHUNK_BYTES, source.size - offset):
                    raise changed
                yield offset, data
            if os.fstat(file.fileno()).st_size != source.size:
                raise changed
    except OSError as error:
        raise ClusterError(f"{source.file} cannot be read: {error.strerror}") from None
