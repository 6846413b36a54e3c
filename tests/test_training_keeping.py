"""The checkpoint that a node keeps by itself before its kernel ends: the lease is over, nobody can be asked."""

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from notebook_cluster import training as nc
from notebook_cluster.checkpoints import CheckpointError, find_latest, load
from notebook_cluster.node.runtime.jobs import Jobs
from notebook_cluster.protocol.node import KeepCheckpoint, Kept
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.checkpointing import optimizer_bytes, saving
from tests.cluster_in_process import Cluster, Node
from tests.conftest import wait_until
from tests.node_kernels import node_kernels
from tests.test_training import batch, flat, train
from tests.test_training_checkpoints import EVERY, make


def keep(node: Node) -> Callable[[], Path] | None:
    """What the job of ``node`` would write, as asked on its runtime's thread."""
    found: SimpleQueue[Any] = SimpleQueue()
    job: Any = node.job("model")
    node.call_soon(lambda: found.put(job.keep()))
    writer: Callable[[], Path] | None = found.get(timeout=60)
    return writer


class Loop:
    """A cell of ``EVERY`` steps, after which one node is held where it is, until ``go`` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.held = threading.Event()
        self.theta: dict[str, Any] = {}

    def __call__(self, node: Node) -> None:
        model, optimizer, sync = make(node)
        for step in range(EVERY):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
        self.theta[node.name] = flat(model).copy()
        train(model, optimizer, batch(99))
        self.busy(node, sync)

    def busy(self, node: Node, sync: nc.DiLoCo) -> None:
        """The user's own code, which does not call us."""
        self.held.set()
        self.go.wait(60)


class Waiting(Loop):
    """Node a waits in sync.step for node b, which is busy."""

    def busy(self, node: Node, sync: nc.DiLoCo) -> None:
        if node.name == "b":
            super().busy(node, sync)
            return
        for _ in range(EVERY):
            sync.step()


def resume(directory: Path, name: str = "new") -> tuple[int, Any, dict[str, Any]]:
    """(round, theta, optimiser's state) of one node that resumes alone."""

    def cell(node: Node) -> Any:
        model, optimizer, sync = make(node, resume="model-kept")
        return sync.round, flat(model).copy(), optimizer.state_dict()["state"]

    with Cluster([name], directory) as cluster:
        result: tuple[int, Any, dict[str, Any]] = cluster.run(cell)[name]
    assert isinstance(result, tuple), result
    return result


def test_kept_while_the_users_own_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_bytes, "PART_SECONDS", 0.1)
    loop = Loop()
    with Cluster(["a", "b"], tmp_path) as cluster:
        cell = cluster.start(loop)
        cell.go()
        wait_until(lambda: len(loop.theta) == 2)
        writer = keep(cluster.nodes["a"])
        assert writer is not None
        folder = writer()
        loop.go.set()
        cell.wait()
    assert folder == tmp_path / "model-kept" / "round-000001"
    assert [(node.name, node.file) for node in load(folder).manifest.nodes] == [("a", "")]
    number, theta, state = resume(tmp_path)
    assert (number, state) == (1, {})
    np.testing.assert_array_equal(theta, loop.theta["a"])


def test_kept_while_the_main_thread_waits_for_others_with_its_own_part(tmp_path: Path) -> None:
    loop = Waiting()
    with Cluster(["a", "b"], tmp_path) as cluster:
        cell = cluster.start(loop)
        cell.go()
        loop.held.wait(60)
        writer = keep(cluster.nodes["a"])
        assert writer is not None
        assert [node.file for node in load(writer()).manifest.nodes] == ["node-0-a.safetensors"]
        loop.go.set()
        cell.wait()
    number, theta, state = resume(tmp_path, "a")
    np.testing.assert_array_equal(theta, loop.theta["a"])
    assert number == 1
    assert state


def test_kept_between_two_cells(tmp_path: Path) -> None:
    def cell(node: Node) -> Any:
        model, optimizer, sync = make(node)
        for step in range(EVERY):
            sync.step(train(model, optimizer, batch(step)))
        sync.finish()
        return flat(model).copy()

    with Cluster(["a"], tmp_path) as cluster:
        theta = cluster.run(cell)["a"]
        writer = keep(cluster.nodes["a"])
        assert writer is not None
        assert [node.file for node in load(writer()).manifest.nodes] == ["node-0-a.safetensors"]
    np.testing.assert_array_equal(resume(tmp_path)[1], theta)


def test_nodes_of_one_peer_put_their_parts_into_one_checkpoint(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        model, optimizer, sync = make(node)
        for step in range(EVERY):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
        sync.finish()

    with Cluster(["a", "b", "c"], tmp_path) as cluster:
        cluster.run(cell)
        writers = [writer for node in cluster.nodes.values() if (writer := keep(node)) is not None]
        threads = [threading.Thread(target=writer) for writer in writers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    found = find_latest(tmp_path, "model-kept")
    assert found is not None
    rows = sorted((node.name, node.file) for node in load(found.path).manifest.nodes)
    assert rows == [(name, f"node-{rank}-{name}.safetensors") for rank, name in enumerate("abc")]


def test_a_disk_that_refuses_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cell(node: Node) -> None:
        model, optimizer, sync = make(node)
        for step in range(EVERY):
            sync.step(train(model, optimizer, batch(step)))

    with Cluster(["a"], tmp_path) as cluster:
        cluster.run(cell)
        writer = keep(cluster.nodes["a"])
        assert writer is not None
        first = writer()

        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as broken:
            broken.setattr(Path, "rename", full)
            with pytest.raises(CheckpointError, match=r"No space left on device.*still the newest"):
                writer()
        answers: list[Kept] = []
        jobs = Jobs(lambda text: None)
        jobs.register("model", Broken())  # type: ignore[arg-type]
        jobs.register("other", cluster.nodes["a"].job("model"))  # type: ignore[arg-type]
        jobs.keep(answers.append)
        wait_until(lambda: answers)
        assert first.is_dir()
        jobs.keep(answers.append, ["other"])
        wait_until(lambda: len(answers) == 2)
    assert answers[0].error == "it is broken"
    assert len(answers[0].folders) == 1
    assert (answers[1].error, len(answers[1].folders)) == ("", 1), "nobody asked for the broken one"
    found = find_latest(tmp_path, "model-kept")
    assert found is not None
    assert not found.warnings


class Broken:
    """A job that cannot be saved."""

    def keep(self) -> Callable[[], Path]:
        def write() -> Path:
            raise CheckpointError("it is broken")

        return write


def test_the_name_is_one_that_resume_takes() -> None:
    assert saving.kept_name("model") == "model-kept"
    assert len(saving.kept_name("m" * 63)) == 63


def test_a_model_that_is_not_on_yet_is_not_kept(tmp_path: Path) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        node = cluster.nodes["a"]
        node.attach_job("model", Job(node, "model"))
        assert keep(node) is None


# ---- in a kernel ---------------------------------------------------------------------------------------------


def test_a_kernel_without_training_keeps_nothing_and_says_so() -> None:
    with node_kernels("mini") as kernels:
        kernels.tell("mini", KeepCheckpoint(reason="the lease is over"))
        wait_until(lambda: kernels.nodes["mini"].said(Kept) == [Kept(folders=[])])


LOOP = """
import threading, time
import numpy as np
from notebook_cluster.codecs import WireFormat
from notebook_cluster.protocol.runs import Register, Registered
from notebook_cluster.training import current_runtime
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.checkpointing.saving import Description
from notebook_cluster.rounds.numerics.outer import state_hash
from notebook_cluster.rounds.numerics.vectors import TensorLayout

theta, momentum = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
layout = TensorLayout.of([("weight", [8], "float32")], [])
register = Register(
    job="model", cell=1, strategy="DiLoCo", codec="float32", schema_hash="s", schema=layout.schema, parameters=8,
    every="1 steps", state_hash=state_hash(theta, momentum),
)
job = Job(current_runtime(), "model")
current_runtime().attach_job("model", job)
job.register(register, WireFormat("float32", 8), theta, momentum, Description(layout, {}))
registered = Registered(job="model", round=0, state_hash=state_hash(theta, momentum), source=None)
current_runtime().call_soon(lambda: job.on_control(registered))
current_runtime().call_soon(ready_file.touch)
while not stop_file.exists():
    time.sleep(0.01)
"""


def test_a_kernel_in_a_loop_of_the_user_keeps_its_training() -> None:
    with node_kernels("mini") as kernels:
        ready, stop = kernels.directory / "ready", kernels.directory / "stop"
        kernel = kernels.nodes["mini"]
        code = f"from pathlib import Path\nready_file, stop_file = Path({str(ready)!r}), Path({str(stop)!r})\n" + LOOP
        cell = kernel.start(code, kernels.metadata())
        try:
            wait_until(ready.exists, 60)
            kernels.tell("mini", KeepCheckpoint(reason="the lease is over"))
            (first,) = wait_until(lambda: kernel.said(Kept))
            assert first.error == ""
            folder = Path(first.folders[0])
            assert folder.parent == kernels.directory / "checkpoints" / "model-kept"
            np.testing.assert_array_equal(load(folder).parameters["weight"], np.arange(8, dtype=np.float32))
        finally:
            stop.touch()
        assert kernel.finish(cell)["status"] == "ok"
