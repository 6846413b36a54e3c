"""The files of a script on the nodes that run it, also on those that come later."""

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from notebook_cluster.client import Cluster, ClusterError, Destination, find_sources, send_files
from notebook_cluster.client.files import SourceFile, Sources
from notebook_cluster.protocol.state import NodeView

MOST_BYTES = 500_000_000
_MARK = ".notebook-cluster-run"
"""A file that says, as the last one that comes, of which run the files are."""
_AGAIN_S = 1.0
_THERE = ("ok", "suspect", "replaying", "rejoining")
_MOST_NAMED = 3
_TRIES = 5
_ALONE = "--script-only sends the script alone"


class ScriptFiles:
    """A script, and the folder in which it runs: the current one where the script lies in it, else the script's own.

    Raises:
        ClusterError: there is no such script.
    """

    def __init__(self, script: Path, *, alone: bool) -> None:
        path = Path(os.path.abspath(script.expanduser()))
        if not path.is_file():
            find_sources(str(script))  # says what is near
            raise ClusterError(f"{script} is a folder: name the script in it, as {script / 'train.py'}")
        here = Path.cwd()
        self.base = here if path.is_relative_to(here) else path.parent
        self.script = path.relative_to(self.base).as_posix()
        self._alone = alone
        self._run = uuid.uuid4().hex
        self._sources: Sources | None = None

    def source(self, line: str, arguments: Sequence[str]) -> str:
        """The cell that runs it; ``line``: what was typed."""
        first = "".join(letter if letter.isprintable() else " " for letter in line)
        return (
            f"# {first}\n"
            "from notebook_cluster.node.namespace.script import run_script\n"
            f"run_script({self.script!r}, {list(arguments)!r}, base={str(self.base)!r}, mark={(_MARK, self._run)!r})\n"
        )

    def find(self) -> Sources:
        """What is sent: the files of the folder, without hidden ones, caches and environments.

        Raises:
            ClusterError: it is more than anybody would want to be sent; names the way out.
        """
        if self._sources is None:
            self._sources = find_sources(self.script, self.base) if self._alone else self._find()
        return self._sources

    def forget(self) -> None:
        """Look at the folder anew."""
        self._sources = None

    def _find(self) -> Sources:
        if self.base in (Path.home(), Path(self.base.anchor)):
            raise ClusterError(f"all of {self.base} would go with the script: give it a folder of its own; {_ALONE}")
        hidden: list[str] = []
        written = {_identity(1), _identity(2)}
        """Where this program's own output goes: it changes while it is sent."""

        def leave_out(entry: Path) -> bool:
            if entry.is_file() and _identity(entry) in written:
                return True
            if entry.name.startswith("."):
                hidden.append(entry.name)
            return entry.name.startswith(".") or entry.name == "node_modules" or (entry / "pyvenv.cfg").is_file()

        sources = find_sources(".", self.base, leave_out=leave_out)
        sources.skipped += [f"{name} is hidden" for name in hidden]
        if sources.size > MOST_BYTES:
            largest = max(sources.files, key=lambda source: source.size)
            raise ClusterError(
                f"{self.base} has {_amount(sources.size)} (most in {largest.path}: {_amount(largest.size)}), "
                f"and at most {_amount(MOST_BYTES)} go with a script: keep data in another folder; {_ALONE}"
            )
        return sources

    @contextmanager
    def on_their_way(self, cluster: Cluster, say: Callable[[str], None]) -> Iterator[None]:
        """Send them to all nodes, then, until the end, to those that come.

        Raises:
            ClusterError: a node that is there cannot take them.
        """
        with tempfile.TemporaryDirectory(prefix="notebook-cluster-run-") as folder:
            mark = Path(folder) / "mark"
            mark.write_text(self._run)
            sender = _Sender(cluster, self, SourceFile(mark, _MARK, len(self._run), False), say)
            try:
                sender.send_to_all()
                sender.start()
                yield
            finally:
                sender.close()


class _Sender(threading.Thread):
    """Gives every node the files, once."""

    def __init__(self, cluster: Cluster, files: ScriptFiles, mark: SourceFile, say: Callable[[str], None]) -> None:
        super().__init__(name="notebook-cluster-run-files", daemon=True)
        self._cluster = cluster
        self._files = files
        self._mark = mark
        self._say = say
        self._served: set[tuple[str, str]] = set()
        """(Peer, node)."""
        self._troubles: set[str] = set()
        """That were said."""
        self._news = threading.Event()
        self._over = False
        self._unsubscribe = cluster.subscribe(lambda event: self._news.set())

    def send_to_all(self) -> None:
        """To those that are there. ClusterError where one of them cannot take them."""
        skipped = self._files.find().skipped if self._missing(self._cluster.state().nodes) else []
        if skipped:
            more = f" and {len(skipped) - _MOST_NAMED} more" if len(skipped) > _MOST_NAMED else ""
            self._say(f"not sent: {', '.join(skipped[:_MOST_NAMED])}{more}")
        for place in self._send(self._cluster.state().nodes):
            if place.error:
                raise ClusterError(f"the script is not on {', '.join(place.nodes)}: {place.error}")

    def run(self) -> None:
        failed = False
        while not self._over:
            self._news.wait(_AGAIN_S if failed else None)
            self._news.clear()
            state = self._cluster.latest
            if self._over or state is None:
                continue
            try:
                troubles = [f"{', '.join(one.nodes)}: {one.error}" for one in self._send(state.nodes) if one.error]
            except ClusterError as error:
                troubles = [str(error)]
            failed = bool(troubles)
            for trouble in troubles:
                if trouble not in self._troubles:
                    self._troubles.add(trouble)
                    self._say(f"the script has not come to {trouble}")

    def close(self) -> None:
        """Send no more."""
        self._over = True
        self._unsubscribe()
        self._news.set()
        if self.is_alive():
            self.join(10)

    def _missing(self, nodes: Sequence[NodeView]) -> list[NodeView]:
        """Those that need files, and have not got them. Local nodes of a cluster that began with this run work where
        the files are."""
        return [
            node
            for node in nodes
            if node.condition in _THERE
            and (node.peer, node.name) not in self._served
            and (node.peer != "local" or self._cluster.attached)
        ]

    def _send(self, nodes: Sequence[NodeView]) -> list[Destination]:
        new = self._missing(nodes)
        if not new:
            return []
        for _ in range(_TRIES):
            found = self._files.find()
            sources = replace(found, files=[*found.files, self._mark])
            places = send_files(self._cluster, sources, new, lambda done, total: None)
            if not any("changed while" in place.error for place in places):
                break
            # Somebody works in the folder, or writes a log there.
            self._files.forget()
            time.sleep(_AGAIN_S)
        for place in places:
            if not place.error:
                self._served |= {(node.peer, node.name) for node in new if node.name in place.nodes}
            if not place.error and not place.own:
                what = "1 file" if len(found.files) == 1 else f"{len(found.files)} files"
                sent = f"sent {_amount(place.sent_bytes)}" if place.sent > 1 else "nothing new to send"
                self._say(f"{', '.join(place.nodes)}: {what} in {place.folder} ({sent})")
        return places


def _identity(file: Path | int) -> tuple[int, int]:
    try:
        facts = os.stat(file)
    except OSError:
        return 0, 0
    return facts.st_dev, facts.st_ino


def _amount(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
