"""The files of a script on the nodes that run it, also on those that come later: all get what was there in the
beginning. Nodes of this machine need none: they run the script where it lies."""

import fnmatch
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from notebook_cluster.client import Cluster, ClusterError, Destination, find_sources, send_files
from notebook_cluster.client.files import SourceFile, Sources
from notebook_cluster.magics.errors import shortened
from notebook_cluster.memory import amount
from notebook_cluster.protocol.state import NodeView
from notebook_cluster.protocol.transfers import SentScript
from notebook_cluster.widgets.formatting import plural

MOST_BYTES = 500_000_000
COPIED_BYTES = 1_000_000
"""Of a file that is copied aside: code. A larger one must stay as it is while the script runs."""
_MARK = ".notebook-cluster-run"
_KEYS = ("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "credentials*.json")
"""Names of files that let somebody in somewhere."""
_AGAIN_S = 1.0
_SAY_S = 5.0
_THERE = ("ok", "suspect", "replaying", "rejoining")
_MOST_NAMED = 3
_TOGETHER = re.compile(
    r"\b(DiLoCo|LocalSGD|SparseLoCo|DeMo|DataParallel|SyncCallback|sync_every|torch_distributed|jax_distributed|"
    r"all_gather|all_reduce|barrier|broadcast|mean_metrics|recv|reduce_scatter|send|should_stop)\b"
)
"""Of :mod:`notebook_cluster`, what nodes meet in."""
_ALONE = "--script-only sends the script alone"


class ScriptFiles:
    """A script, and the folder in which it runs: the current one where the script lies in it, else the script's own.
    :meth:`look` first.

    Raises:
        ClusterError: there is no such script.
    """

    def __init__(self, script: Path, *, alone: bool) -> None:
        path = Path(os.path.abspath(script.expanduser()))
        if not path.exists() and script.name in ("python", "python3", "torchrun"):
            raise ClusterError(f"leave {script} out: the script runs with the Python of each node")
        if not path.is_file():
            find_sources(str(script))  # says what is near
            raise ClusterError(f"{script} is a folder: name the script in it, as {script / 'train.py'}")
        here = Path.cwd()
        self.base = here if path.is_relative_to(here) else path.parent
        self.script = path.relative_to(self.base).as_posix()
        self._alone = alone
        self._run = uuid.uuid4().hex
        self._sources: Sources | None = None
        self._trouble: ClusterError | None = None
        self._facts: dict[str, tuple[int, int]] = {}
        """Path -> size and time of change of what was not copied."""

    def source(self, line: str, arguments: Sequence[str]) -> str:
        """The cell that runs it; ``line``: what was typed."""
        first = "".join(letter if letter.isprintable() else " " for letter in line)
        return (
            f"# {first}\n"
            "from notebook_cluster.node.namespace.script import run_script\n"
            f"run_script({self.script!r}, {list(arguments)!r}, base={str(self.base)!r}, mark={(_MARK, self._run)!r})\n"
        )

    def work_alone(self, nodes: int) -> str:
        """Why so many ``nodes`` do not train one model, as the script reads, and the modules beside it that another one
        names; empty where they work together, or nobody can tell."""
        files = {source.path: source.file for source in (self._sources.files if self._sources else ())}
        files[self.script] = self.base / self.script
        texts = {path: file.read_text(errors="replace") for path, file in files.items() if path.endswith(".py")}
        named = {path for path in texts if any(_module(path) in texts[other] for other in texts if other != path)}
        used = [texts[path] for path in {self.script, *named} if path in texts]
        if self.script in texts and not any("notebook_cluster" in text for text in used):
            return f"{self.script} does not use notebook_cluster: each of {nodes} nodes does all of it alone"
        if used and not any(map(_TOGETHER.search, used)):
            return f"no sync object is seen in {self.script}: each of {nodes} nodes trains a model of its own"
        return ""

    @contextmanager
    def look(self, *, needed: bool) -> Iterator[None]:
        """What is in the folder now is what every node gets, until the end of the context.

        Raises:
            ClusterError: it is more than anybody would want to be sent; says the way out. Where it is not ``needed``
                only :meth:`sources` raises it, for the machine that comes all the same.
        """
        with tempfile.TemporaryDirectory(prefix="notebook-cluster-run-") as folder:
            try:
                self._sources = self._copied(self._find(), Path(folder))
            except ClusterError as error:
                self._trouble = error
                if needed:
                    raise
            yield

    def sources(self) -> Sources:
        """What is sent. ClusterError where it cannot be, or is not what it was."""
        if self._sources is None:
            raise self._trouble or ClusterError("the folder of the script was not looked at")
        for source in self._sources.files:
            if self._facts.get(source.path, _facts(source.file)) != _facts(source.file):
                raise ClusterError(
                    f"{source.path} has changed since the script began, and nodes have what it was before"
                )
        return self._sources

    @property
    def skipped(self) -> str:
        """What stays here; the first few, links first: they often mean data."""
        found = sorted(self._sources.skipped if self._sources else [], key=lambda line: "link" not in line)
        return shortened(found, _MOST_NAMED)

    def _find(self) -> Sources:
        if self._alone:
            return find_sources(self.script, self.base)
        base, home = self.base.resolve(), Path.home().resolve()
        if home.is_relative_to(base):
            raise ClusterError(f"all of {self.base} would go with the script: give it a folder of its own; {_ALONE}")
        left_out: list[str] = []
        written = {_identity(1), _identity(2)}
        """Where this program's own output goes: it changes while it is sent."""

        def leave_out(entry: Path) -> bool:
            reason = _why_not(entry)
            if reason:
                left_out.append(f"{entry.name} {reason}")
            return bool(reason) or (entry.is_file() and _identity(entry) in written)

        try:
            sources = find_sources(".", self.base, leave_out=leave_out)
        except ClusterError as error:
            raise ClusterError(f"{error}; {_ALONE}") from None
        sources.skipped += left_out
        if sources.size > MOST_BYTES:
            largest = max(sources.files, key=lambda source: source.size)
            raise ClusterError(
                f"{self.base} has {amount(sources.size)} (most in {largest.path}: {amount(largest.size)}), and at most "
                f"{amount(MOST_BYTES)} go with a script: keep data in another folder; {_ALONE}"
            )
        return sources

    def _copied(self, sources: Sources, folder: Path) -> Sources:
        files = []
        for number, source in enumerate(sources.files):
            if source.size > COPIED_BYTES:
                self._facts[source.path] = _facts(source.file)
                files.append(source)
                continue
            copy = folder / str(number)
            try:
                shutil.copyfile(source.file, copy)
            except OSError as error:
                raise ClusterError(f"{source.path} cannot be copied: {error.strerror or error}; {_ALONE}") from None
            files.append(replace(source, file=copy, size=copy.stat().st_size))
        mark = folder / "mark"
        mark.write_bytes(msgspec.json.encode(SentScript(run=self._run, paths=[source.path for source in files])))
        return replace(sources, files=[*files, SourceFile(mark, _MARK, mark.stat().st_size, False)])


class FileSender(threading.Thread):
    """Gives the nodes of other machines the files, each once: :meth:`send_to_all`, then as a thread to those that come.

    ``is_stopped()``: somebody has pressed Ctrl-C.
    """

    def __init__(
        self, cluster: Cluster, files: ScriptFiles, say: Callable[[str], None], is_stopped: Callable[[], bool]
    ) -> None:  # fmt: skip
        super().__init__(name="notebook-cluster-run-files", daemon=True)
        self._cluster = cluster
        self._files = files
        self._say = say
        self._is_stopped = is_stopped
        self._served: set[tuple[str, str]] = set()
        """(Peer, node)."""
        self._troubles: set[str] = set()
        """That were said."""
        self._news = threading.Event()
        self._over = False
        self._unsubscribe = cluster.subscribe(lambda event: self._news.set())

    def send_to_all(self) -> None:
        """To those that are there.

        Raises:
            ClusterError: one of them cannot take them.
            KeyboardInterrupt: ``is_stopped()``.
        """
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
            except KeyboardInterrupt:
                return
            except ClusterError as error:
                new = [node.name for node in self._missing(state.nodes)]
                troubles = [f"{', '.join(new)}: {error}"]
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
        return [
            node
            for node in nodes
            if node.condition in _THERE and node.peer != "local" and (node.peer, node.name) not in self._served
        ]

    def _send(self, nodes: Sequence[NodeView]) -> list[Destination]:
        new = self._missing(nodes)
        if not new:
            return []
        sources = self._files.sources()
        what = f"{plural(len(sources.files) - 1, 'file')} of {self._files.base}"
        if not self._served:
            self._say(f"sending {what} to {', '.join(node.name for node in new)}")
            if self._files.skipped:
                self._say(f"not sent: {self._files.skipped}")
        due = time.monotonic() + _SAY_S

        def on_progress(done: int, total: int) -> None:
            nonlocal due
            if self._over or self._is_stopped():
                raise KeyboardInterrupt
            if time.monotonic() > due and total:
                due = time.monotonic() + _SAY_S
                self._say(f"{amount(done)} of {amount(total)} are there")

        places = send_files(self._cluster, sources, new, on_progress)
        for place in places:
            if not place.error:
                self._served |= {(node.peer, node.name) for node in new if node.name in place.nodes}
                sent = f"sent {amount(place.sent_bytes)}" if place.sent > 1 else "all were there"
                self._say(f"{', '.join(place.nodes)}: {what} in {place.folder} ({sent})")
        return places


def _why_not(entry: Path) -> str:
    """Why ``entry`` is not sent; empty where it is."""
    if entry.name.startswith("."):
        return "is hidden"
    if entry.name == "node_modules" or (entry / "pyvenv.cfg").is_file():
        return "is an environment"
    if any(fnmatch.fnmatch(entry.name, pattern) for pattern in _KEYS):
        return "looks like a key"
    if not entry.name.isprintable() or "\\" in entry.name:
        return "has a name that not every machine can write"
    return ""


def _module(path: str) -> str:
    """What an import calls it, without the packages that it is in."""
    file = Path(path)
    return file.parent.name if file.stem == "__init__" else file.stem


def _facts(file: Path) -> tuple[int, int]:
    try:
        facts = file.stat()
    except OSError:
        return -1, -1
    return facts.st_size, facts.st_mtime_ns


def _identity(file: Path | int) -> tuple[int, int]:
    try:
        facts = os.stat(file)
    except OSError:
        return -1, -1
    return facts.st_dev, facts.st_ino
