"""What is done beside the main thread: with overlap a contribution is encoded while training goes on, and means and
outer steps of a large model are computed on a thread of their own."""

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.processors import PLACE
from notebook_cluster.protocol.node import NodeLog
from notebook_cluster.protocol.rounds import Applied, Arrived, LeftRounds
from notebook_cluster.rounds.member import machine
from notebook_cluster.rounds.member.state import MemberSettings
from notebook_cluster.training.background import worker
from notebook_cluster.training.background.worker import BackgroundThread
from notebook_cluster.training.loop import costs, replica, sync
from notebook_cluster.training.loop import encoding as loop_encoding
from notebook_cluster.training.loop.encoding import EncodingThread
from tests.cluster_in_process import Cluster, Node
from tests.test_training import assert_equal_models, batch, flat, train
from tests.test_training_streaming import wide

EVERY, OVERLAP = 4, 3
NAMES = ["a", "b"]


class HeldEncoding:
    """Contributions of the nodes' encoding threads are not begun while ``go`` is clear."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        self.begun = 0
        encoded = replica.encoded

        def held(*arguments: Any) -> Any:
            self.begun += 1
            assert self.go.wait(60)
            return encoded(*arguments)

        monkeypatch.setattr(replica, "encoded", held)


@pytest.fixture
def encoding(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldEncoding]:
    held = HeldEncoding(monkeypatch)
    yield held
    held.go.set()


def new_sync(model: nn.Module, codec: str = "int8") -> nc.DiLoCo:
    return nc.DiLoCo(model, every=EVERY, overlap=OVERLAP, codec=codec)


def steps(node: Node, sync: Any, model: nn.Module, numbers: range, samples: float = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in numbers:
        sync.step(train(model, optimizer, batch(number + 100 * node.rank())), samples=samples)


@pytest.mark.parametrize("codec", ["float32", "int8", "topk-8", "randomk-8"])
def test_what_is_encoded_later_is_what_the_model_held_at_the_boundary(
    tmp_path: Path, encoding: HeldEncoding, codec: str
) -> None:
    """Both nodes train on for as many steps as the overlap allows before anything is encoded; the bits are the same."""
    trained = threading.Barrier(len(NAMES), action=encoding.go.set)

    def cell(hold: bool) -> Any:
        def run(node: Node) -> nn.Module:
            model = wide(node.rank())
            sync = new_sync(model, codec)
            if hold:
                encoding.go.clear()
            steps(node, sync, model, range(EVERY + OVERLAP - 1))
            if hold:
                trained.wait(60)
            steps(node, sync, model, range(EVERY + OVERLAP - 1, 14))
            sync.finish()
            return model

        return run

    found = []
    for hold in (False, True):
        with Cluster(NAMES, tmp_path / str(hold)) as cluster:
            results = cluster.run(cell(hold))
            assert_equal_models(results)
            found.append(flat(results["a"]).tobytes())
    assert found[0] == found[1]


def test_a_stopped_node_hands_over_what_it_encodes_before_it_leaves(
    tmp_path: Path, encoding: HeldEncoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: dict[str, list[type]] = {name: [] for name in NAMES}
    wait = EncodingThread.wait

    def release_and_wait(self: EncodingThread) -> None:
        if self._thread is not None and encoding.begun == len(NAMES):
            encoding.go.set()
        wait(self)

    monkeypatch.setattr(EncodingThread, "wait", release_and_wait)
    stopping = threading.Barrier(len(NAMES))

    def stopped(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = new_sync(model)
        encoding.go.clear()
        steps(node, sync, model, range(EVERY + 1))
        assert cluster.wait_for(lambda: encoding.begun == len(NAMES))
        stopping.wait(60)
        raise KeyboardInterrupt

    def whole(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = new_sync(model)
        steps(node, sync, model, range(10))
        return model

    with Cluster(NAMES, tmp_path) as cluster:
        cluster.watch = lambda towards, node, message: (
            said[node].append(type(message))
            if towards == "from" and isinstance(message, Arrived | LeftRounds)
            else None
        )
        results = cluster.run(stopped)
        assert all(isinstance(result, KeyboardInterrupt) for result in results.values()), results
        assert cluster.wait_for(lambda: all(LeftRounds in kinds for kinds in said.values()))
        assert all(kinds[0] is Arrived for kinds in said.values()), said
        encoding.go.set()
        assert_equal_models(cluster.run(whole))


def fail_to_encode(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """So many contributions cannot be encoded; those after them can."""
    encoded, failures = replica.encoded, iter(range(times))

    def failing(*arguments: Any) -> Any:
        if next(failures, None) is not None:
            raise MemoryError("no room for 8 bytes")
        return encoded(*arguments)

    monkeypatch.setattr(replica, "encoded", failing)


def test_what_cannot_be_encoded_is_an_error_of_the_step_that_waits_for_it_and_loses_no_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_encode(monkeypatch, 1)
    counted = dict.fromkeys(NAMES, 0)
    raised: list[tuple[int, str]] = []

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = new_sync(model)
        for number in range(10):
            try:
                steps(node, sync, model, range(number, number + 1))
            except MemoryError as error:
                raised.append((number + 1, str(error)))
        sync.finish()
        return model

    with Cluster(NAMES, tmp_path) as cluster:
        cluster.watch = lambda towards, node, message: (
            counted.update({node: counted[node] + message.steps}) if isinstance(message, Applied) else None
        )
        assert_equal_models(cluster.run(cell))
    assert raised == [(EVERY + OVERLAP, "no room for 8 bytes")]
    assert counted == dict.fromkeys(NAMES, 10)


def test_a_node_that_is_stopped_with_what_cannot_be_encoded_leaves_and_its_work_is_in_the_next_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_encode(monkeypatch, len(NAMES))
    syncs: dict[str, tuple[nn.Module, Any]] = {}
    counted = dict.fromkeys(NAMES, 0)
    left: list[str] = []

    def stopped(node: Node) -> nn.Module:
        model = wide(node.rank())
        syncs[node.name] = model, new_sync(model)
        steps(node, syncs[node.name][1], model, range(EVERY + 1))
        raise KeyboardInterrupt

    def again(node: Node) -> nn.Module:
        model, sync = syncs[node.name]
        steps(node, sync, model, range(EVERY + 1, 10))
        sync.finish()
        return model

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            counted[node] += message.steps
        if towards == "from" and isinstance(message, LeftRounds):
            left.append(node)

    with Cluster(NAMES, tmp_path) as cluster:
        cluster.watch = watch
        results = cluster.run(stopped)
        assert all(isinstance(result, KeyboardInterrupt) for result in results.values()), results
        assert cluster.wait_for(lambda: sorted(left) == NAMES)
        assert_equal_models(cluster.run(again))
    assert counted == dict.fromkeys(NAMES, 10)


def test_a_second_object_is_refused_while_the_first_still_encodes_and_loses_nothing_of_it(
    tmp_path: Path, encoding: HeldEncoding
) -> None:
    arrived: list[float] = []
    refused = threading.Barrier(len(NAMES), action=encoding.go.set)

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        first = new_sync(model)
        encoding.go.clear()
        steps(node, first, model, range(EVERY), samples=7)
        assert cluster.wait_for(lambda: encoding.begun == len(NAMES))
        with pytest.raises(nc.TrainingError, match=r"not finished: call finish\(\) on it .* another name="):
            new_sync(model)
        refused.wait(60)
        first.finish()
        second = new_sync(model)
        steps(node, second, model, range(EVERY, 3 * EVERY))
        second.finish()
        return model

    with Cluster(NAMES, tmp_path) as cluster:
        cluster.watch = lambda towards, node, message: (
            arrived.append(message.samples) if isinstance(message, Arrived) else None
        )
        assert_equal_models(cluster.run(cell))
    assert arrived.count(7 * EVERY) >= len(NAMES)


# ---- the thread of a large model's background ----------------------------------------------------------------


@pytest.mark.parametrize("codec", ["float32", "int8", "topk-8"])
def test_rounds_of_a_large_model_are_computed_on_a_thread_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """With the same bits as on the runtime's, which only hands over what comes."""
    apply, threads = machine.apply, set[str]()

    def seen(state: Any, event: Any) -> Any:
        if state.fragments is not None:  # before it registers a job has no model, and its ticks compute nothing
            threads.add(threading.current_thread().name)
        return apply(state, event)

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = nc.DiLoCo(model, every=EVERY, codec=codec)
        steps(node, sync, model, range(3 * EVERY))
        sync.finish()
        return model

    monkeypatch.setattr(machine, "apply", seen)
    found = []
    for large in (worker.LARGE, 0):
        monkeypatch.setattr(worker, "LARGE", large)
        threads.clear()
        with Cluster(NAMES, tmp_path / str(large)) as cluster:
            results = cluster.run(cell)
            assert_equal_models(results)
            found.append(flat(results["a"]).tobytes())
        expected = {"runtime a", "runtime b"} if large else {"rounds-model"}
        assert threads == expected
    assert found[0] == found[1]


# ---- where the outer step is computed ---------------------------------------------------------------------------


def is_vector(what: Any) -> bool:
    return what is not None


def place(vector: Any) -> int:
    return int(vector.__array_interface__["data"][0])


@pytest.mark.parametrize("codec", ["float32", "int8", "topk-256"])
def test_a_large_model_is_stepped_where_the_state_is_and_comes_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Also the error feedback is computed where it was. A checkpoint that reads the state makes the next step go to
    other memory, with equal bits."""
    found, places = [], dict[str, list[tuple[int, ...]]]()

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = nc.DiLoCo(model, every=EVERY, codec=codec)
        here = places[node.name] = []
        for number in range(6):
            steps(node, sync, model, range(number * EVERY, (number + 1) * EVERY))
            replica = sync._replica
            here.append(tuple(map(place, [replica.theta, replica.momentum, *filter(is_vector, replica._feedback)])))
            if number == 3:
                sync.checkpoint("kept")
        sync.finish()
        return model

    for in_place_from in (1 << 20, 0):
        monkeypatch.setattr(machine, "MemberSettings", partial(MemberSettings, in_place_from=in_place_from))
        monkeypatch.setattr(loop_encoding, "LATER_FROM", in_place_from)
        with Cluster(NAMES, tmp_path / str(in_place_from)) as cluster:
            results = cluster.run(cell)
            assert_equal_models(results)
            found.append(flat(results["a"]).tobytes())
        moved = [here != before for node in places.values() for before, here in itertools.pairwise(node[1:4])]
        assert any(moved) == (in_place_from > 0)
    assert found[0] == found[1]


def test_who_reads_the_state_keeps_what_it_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A joiner is served from the state's own memory, a checkpoint is written from it: rounds go on beside."""
    monkeypatch.setattr(machine, "MemberSettings", partial(MemberSettings, in_place_from=0))
    monkeypatch.setattr(loop_encoding, "LATER_FROM", 0)
    held: list[tuple[Any, Any]] = []

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = nc.DiLoCo(model, every=EVERY)
        for number in range(8):
            steps(node, sync, model, range(number * EVERY, (number + 1) * EVERY))
            if number % 2 and node.name == "a":
                state = node.handlers["model"].member  # type: ignore[attr-defined]
                view = memoryview(state.theta).cast("B")[8:]
                held.append((view, bytes(view)))
        sync.finish()
        return model

    with Cluster(NAMES, tmp_path) as cluster:
        assert_equal_models(cluster.run(cell))
    assert len(held) == 4
    assert all(bytes(view) == before for view, before in held)
    assert len({before for _, before in held}) == 4


def test_a_checkpoint_of_a_cluster_that_ends_is_not_taken_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "MemberSettings", partial(MemberSettings, in_place_from=0))
    monkeypatch.setattr(loop_encoding, "LATER_FROM", 0)
    writers: list[Any] = []

    def cell(node: Node) -> None:
        model = wide(node.rank())
        sync = nc.DiLoCo(model, every=EVERY)
        steps(node, sync, model, range(EVERY))
        job: Any = node.handlers["model"]
        with job.resting.lock:  # as while the background writes
            keeper = threading.Thread(target=lambda: writers.append(job.keep()))
            keeper.start()
            keeper.join(0.1)
            assert keeper.is_alive()
        keeper.join(60)
        sync.finish()

    with Cluster(["a"], tmp_path) as cluster:
        results = cluster.run(cell)
        assert results == {"a": None}
    assert len(writers) == 1
    assert writers[0] is not None


def test_a_signal_that_raises_does_not_let_the_main_thread_go_while_its_vectors_are_written() -> None:
    resting, written = worker.Resting(), threading.Event()

    class Interrupted(Exception):
        pass

    class Lock:
        """Of which the first two attempts to take it are interrupted."""

        attempts = 0

        def __enter__(self) -> None:
            self.attempts += 1
            if self.attempts <= 2:
                raise Interrupted
            written.set()

        def __exit__(self, *error: object) -> None:
            pass

    resting.lock = Lock()  # type: ignore[assignment]
    with pytest.raises(Interrupted), resting.of(None):  # type: ignore[arg-type]
        resting._replica = object()  # type: ignore[assignment]
    assert written.is_set()
    assert resting._replica is None


class Said:
    """What a background needs of a runtime whose thread is the test's."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def call_soon(self, callback: Any) -> None:
        callback()

    def send_control(self, message: Any) -> None:
        self.messages.append(message)


def held_thread(runtime: Any) -> tuple[BackgroundThread, threading.Event]:
    """A background that waits for the event before it does anything else."""
    thread, go = BackgroundThread(runtime, "model"), threading.Event()
    thread.prepare(worker.LARGE)
    begun = threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(60)

    thread.do(hold)
    assert begun.wait(60)
    return thread, go


def test_what_fails_in_the_background_is_told_and_the_next_call_is_done() -> None:
    runtime, done = Said(), threading.Event()
    thread, go = held_thread(runtime)
    order: list[int] = []
    thread.do(lambda: order.append(1))
    thread.do(lambda: order.append(1 // 0))
    thread.soon(lambda: order.append(2))
    thread.do(done.set)
    assert order == []
    go.set()
    assert done.wait(60)
    assert order == [1, 2]
    [message] = runtime.messages
    assert isinstance(message, NodeLog)
    assert message.level == "error"
    assert "job 'model' failed in the background: ZeroDivisionError" in message.text


def test_no_more_than_two_models_wait_for_a_background_that_computes() -> None:
    """What comes on top is dropped, as a lost frame is; what keeps no payload is never dropped."""
    thread, go = held_thread(Said())
    done, taken = threading.Event(), list[int]()
    model = 4 * worker.LARGE
    for number in range(80):
        thread.do(lambda number=number: taken.append(number), model)  # type: ignore[misc]
    thread.do(done.set)
    go.set()
    assert done.wait(60)
    assert taken == list(range(len(taken)))
    assert 2 <= len(taken) < 80
    assert thread.dropped == 80 - len(taken)
    finished = threading.Event()
    thread.do(finished.set, model)
    assert finished.wait(60)


@pytest.mark.parametrize(("nodes", "part"), [(0, 4), (1, 4), (2, 4), (4, 8), (30, 60)])
def test_what_rounds_keep_leaves_half_of_the_free_memory_to_training_on_all_nodes_of_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, part: int
) -> None:
    free, asked = 1 << 20, list[int]()
    monkeypatch.setenv(PLACE, str(tmp_path / "place"))
    monkeypatch.setattr(costs, "count_nodes", lambda place: nodes)
    monkeypatch.setattr(sync, "free_memory", lambda: free)
    monkeypatch.setattr(sync.vectors, "keep_up_to", asked.append)

    def cell(node: Node) -> None:
        nc.DiLoCo(nn.Linear(1000, 1000), every=EVERY).finish()

    with Cluster(["a"], tmp_path / "checkpoints") as cluster:
        cluster.run(cell)
    assert asked
    assert set(asked) == {free // part}
