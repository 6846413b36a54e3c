"""Files from the nodes' working folders to this machine, for ``Cluster.collect_files`` and ``%cluster class collect``.

Each folder (on a peer, however many nodes work in it) is read at its own pace. Nothing that is here is replaced: what
differs stays, under a name with the time.
"""

import concurrent.futures
import filecmp
import os
import shutil
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.files import Destination, find_places
from notebook_cluster.client.requests import RunningCluster
from notebook_cluster.client.stream import Progress
from notebook_cluster.protocol import transfers as t
from notebook_cluster.protocol.names import names_in
from notebook_cluster.protocol.state import NodeView

SPARE_BYTES = 64 << 20
"""Of the disk here, which stay free."""
_TRIES = 3
"""For a file that is written while it is read."""
Step = Generator["concurrent.futures.Future[t.FilesAnswer]", t.FilesAnswer, None]


@dataclass
class HandedIn:
    """What came from one place.

    Attributes:
        peer, nodes: where it is, and who works in it.
        files: those that are here now, also where they were here already.
        size: their bytes.
        kept: names that files of before have now, which were others.
        error: why it was given up; empty when everything came.
    """

    peer: str
    nodes: list[str]
    files: list[Path] = field(default_factory=list)
    size: int = 0
    kept: list[Path] = field(default_factory=list)
    error: str = ""


def collect_files(
    cluster: RunningCluster, pattern: str, into: Path, nodes: Sequence[NodeView], on_progress: Progress
) -> list[HandedIn]:
    """Write what ``pattern`` means on each of ``nodes`` below ``into/NODE/``. What fails at one place does not stop the
    others; nodes that work in the folder of the notebook are left out.

    Raises:
        ClusterError: ``pattern`` is no relative path, or the cluster has ended.
        KeyboardInterrupt: Stop; files that have come are there.
    """
    try:
        names_in(pattern)
    except ValueError as error:
        raise ClusterError(str(error)) from None
    away = {node.name: node.condition for node in nodes if node.condition in ("lost", "asleep")}
    places = find_places(cluster, [node for node in nodes if node.name not in away])
    found = [_Collecting(cluster, place, pattern, into) for place in places if not place.is_here]
    peers = {node.name: node.peer for node in nodes}
    gone = [HandedIn(peers[name], [name], error=f"{name} is {condition}") for name, condition in away.items()]
    while waiting := [one.future for one in found if one.future is not None]:
        concurrent.futures.wait(waiting, timeout=0.2, return_when=concurrent.futures.FIRST_COMPLETED)
        for one in found:
            one.go_on()
        on_progress(sum(one.got.size for one in found), sum(one.announced for one in found))
    return [one.got for one in found] + gone


class _Collecting:
    """From one place: a question at a time."""

    def __init__(self, cluster: RunningCluster, place: Destination, pattern: str, into: Path) -> None:
        self.got = HandedIn(place.peer, place.nodes, error=place.error)
        self.future: concurrent.futures.Future[t.FilesAnswer] | None = None
        self.announced = 0
        self._cluster = cluster
        self._node = place.nodes[0]
        self._folder = into / self._node
        self._steps = self._all_of(pattern)
        if not place.error:
            self._advance(None)

    def go_on(self) -> None:
        """Take the answer, when it is there."""
        if self.future is not None and self.future.done():
            try:
                answer = self.future.result()
            except ClusterError as error:
                self._fail(str(error))
                return
            self._advance(answer)

    def _advance(self, answer: t.FilesAnswer | None) -> None:
        try:
            self.future = next(self._steps) if answer is None else self._steps.send(answer)
        except StopIteration:
            self.future = None
        except (ClusterError, ValueError) as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f"{error.filename or self._folder} cannot be written: {error.strerror or error}")

    def _fail(self, error: str) -> None:
        self.future, self.got.error = None, error
        self._steps.close()

    def _all_of(self, pattern: str) -> Step:
        found = (yield self._ask(t.FindFiles(self._node, pattern))).files
        if not found:
            raise ClusterError(f"there is no {pattern} on {self._node}")
        self.announced = sum(max(file.size, 0) for file in found)
        for file in found:
            target = self._folder.joinpath(*names_in(file.path))
            target.parent.mkdir(parents=True, exist_ok=True)
            yield from self._one(file.path, target)

    def _one(self, path: str, target: Path) -> Step:
        """Its pieces, again from the beginning when it was changed meanwhile."""
        for _ in range(_TRIES):
            incoming = target.with_name(f".{target.name[:80]}.coming")
            try:
                with incoming.open("wb") as file:
                    whole = yield from self._pieces(path, file)
                if whole:
                    self._put(incoming, target)
                    return
            finally:
                incoming.unlink(missing_ok=True)
        raise ClusterError(f"{path} changes on {self._node} all the time: collect it when it is written")

    def _pieces(
        self, path: str, file: BinaryIO
    ) -> Generator["concurrent.futures.Future[t.FilesAnswer]", t.FilesAnswer, bool]:
        first = answer = yield self._ask(t.ReadFile(self._node, path))
        if shutil.disk_usage(self._folder).free - SPARE_BYTES < first.size:
            raise ClusterError(f"{path} of {self._node} ({first.size:,} bytes) does not fit on the disk here")
        while True:
            if (answer.size, answer.changed) != (first.size, first.changed):
                return False
            file.write(answer.data)
            if file.tell() >= first.size:
                return file.tell() == first.size
            if not answer.data:
                return False
            answer = yield self._ask(t.ReadFile(self._node, path, file.tell()))

    def _put(self, incoming: Path, target: Path) -> None:
        if target.exists() and not filecmp.cmp(incoming, target, shallow=False):
            before = _name_of_before(target)
            target.rename(before)
            self.got.kept.append(before)
        self.got.size += incoming.stat().st_size
        os.replace(incoming, target)
        self.got.files.append(target)

    def _ask(self, body: Any) -> "concurrent.futures.Future[t.FilesAnswer]":
        asked: concurrent.futures.Future[t.FilesAnswer] = self._cluster.connection.request(body, t.FilesAnswer)
        return asked


def _name_of_before(target: Path) -> Path:
    """A free name for what was there: with the time at which it was written."""
    written = time.strftime("%Y-%m-%d %H.%M.%S", time.localtime(target.stat().st_mtime))
    name = target.with_name(f"{target.stem} ({written}){target.suffix}")
    number = 2
    while name.exists():
        name = target.with_name(f"{target.stem} ({written}, {number}){target.suffix}")
        number += 1
    return name
