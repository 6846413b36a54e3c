"""Shared by the end-to-end tests: a real cluster from real processes, and short ways to use it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from notebook_cluster.client import Cluster, ClusterError, list_clusters
from notebook_cluster.journal.events import Event
from notebook_cluster.journal.reading import reading
from notebook_cluster.protocol.state import ClusterView, NodeView
from notebook_cluster.protocol.views import CellChanged, CellEnded, CellOutput, Output
from notebook_cluster.widgets import render_text
from tests.conftest import shared_folders, wait_until


@contextmanager
def running_cluster(name: str = "test", **options: Any) -> Iterator[Cluster]:
    """A cluster that is stopped at the end, whatever happens."""
    cluster = Cluster.start(name, **options)
    try:
        yield cluster
    finally:
        if cluster.connection.closed is None:
            end(cluster)
        cluster.close()


def told(cluster: Cluster, text: str, timeout: float = 60) -> str:
    """The first line among what happened that has ``text``, as soon as it is there."""
    try:
        return cluster.wait_until(
            lambda state: next((event.text for event in state.events if text in event.text), ""), timeout
        )
    except TimeoutError:
        pytest.fail(f"nobody said {text!r}: {render_text(cluster.state())}")


def end(cluster: Cluster) -> None:
    """Stop it after its nodes were removed, which kills their kernels: one that has torch takes most of a second to end
    by itself. A test of what a stop does, or leaves, stops the cluster before."""
    with suppress(ClusterError):
        for row in cluster.state().nodes:
            cluster.remove(row.name)
    cluster.stop()


@contextmanager
def shared_cluster(**options: Any) -> Iterator[Cluster]:
    """One cluster for all tests of a file, which run in its folder: starting kernels takes most of a test's time.

    A test that leaves other nodes behind, or restarts one (which replays the cells of the tests before), starts a
    cluster of its own.
    """
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        work = root / "work"
        work.mkdir()
        patch.chdir(work)
        with running_cluster(**options) as cluster:
            yield cluster


def mend(cluster: Cluster) -> None:
    """Make a shared cluster ready for the next test, whatever the last one did: no cell runs, and nodes that have died
    are there again, with new kernels that know nothing of the cells before."""
    if any(row.busy for row in cluster.state().nodes):
        cluster.interrupt(force=True)
        wait_until(lambda: not any(row.busy for row in cluster.state().nodes), what="the end of the test's cell")
    for row in cluster.state().nodes:
        if row.condition == "dead":
            cluster.restart(row.name, replay=False)
    # who was refused is there, and stays refused until its job takes it
    wait_until(
        lambda: all(row.condition in ("ok", "refused") for row in cluster.state().nodes),
        what=lambda: f"all nodes: {cluster.state().nodes}",
    )


def stop_all() -> None:
    """End all clusters of these Jupyter folders; not with a magic, as a kernel may be busy with what a failed test has
    left."""
    for file in list_clusters():
        with suppress(ClusterError), Cluster.attach(file.cluster) as cluster:
            end(cluster)


def text_of(outputs: list[Output], node: str | None = None) -> str:
    """The text that ``node`` (or all) printed, results and tracebacks included."""
    parts: list[str] = []
    for output in outputs:
        if node is not None and output.node != node:
            continue
        if output.kind == "stream":
            parts.append(output.content["text"])
        elif output.kind == "error":
            parts.append("\n".join(output.content["traceback"]))
        else:
            parts.append(str(output.content.get("data", {}).get("text/plain", "")))
    return "".join(parts)


def run(cluster: Cluster, source: str, targets: tuple[str, ...] = (), **options: Any) -> dict[str, str]:
    """Run a cell that must work; node -> what it printed."""
    ended, outputs = cluster.run(source, targets, **options)
    assert ended.status == "ok", (ended, text_of(outputs))
    return {name: text_of(outputs, name) for name in ended.results}


class Watcher:
    """Collects what a cell puts out while it runs."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.outputs: list[Output] = []
        self.notes: list[str] = []
        self.ended: CellEnded | None = None

    def look(self) -> None:
        """Take what has come so far."""
        while self.ended is None:
            event = self.stream.get(0.02)
            if event is None:
                return
            if isinstance(event, CellOutput):
                self.outputs += event.outputs
            elif isinstance(event, CellChanged):
                self.notes += [event.note] if event.note else []
            elif isinstance(event, CellEnded):
                self.ended = event

    def text(self, node: str | None = None) -> str:
        self.look()
        return text_of(self.outputs, node)

    def wait_for(self, text: str, node: str | None = None, timeout: float = 60) -> None:
        wait_until(
            lambda: text in self.text(node), timeout, lambda: f"{text!r} from {node}; so far: {self.text()[-3000:]}"
        )

    def wait_end(self, timeout: float = 60) -> CellEnded:
        def over() -> CellEnded | None:
            self.look()
            return self.ended

        return wait_until(over, timeout, lambda: f"the end of the cell; so far: {self.text()[-3000:]}")


def node(state: ClusterView, name: str) -> NodeView:
    return next(row for row in state.nodes if row.name == name)


def kernel_pid(cluster: Cluster, name: str) -> int:
    """Process id of a node's kernel."""
    return int(run(cluster, "import os; print(os.getpid())", (name,), replay=False)[name])


def kill(pid: int) -> None:
    """SIGKILL, and wait until the process is gone, which takes a moment on a busy machine."""
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), what=f"process {pid} to be gone")


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still (SIGSTOP) as long as the block runs."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, 60, f"process {pid} to stand still")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # also one that ends between the two looks of psutil
        return False


def read_events(path: Path) -> list[Event]:
    """Every event that is still in the journal, oldest first; raises as its :func:`reading`."""
    with reading(path) as connection:
        rows = connection.execute("SELECT body FROM events ORDER BY id").fetchall()
    return [msgspec.json.decode(body, type=Event) for (body,) in rows]
