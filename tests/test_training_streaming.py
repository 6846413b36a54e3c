"""Streaming DiLoCo: fragments in turn, training that goes on while one is under way; against numpy, with losses."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.rounds import Applied, Arrived, Commit, Prepared
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models.torch_parameters import TorchParameters
from tests import oracle
from tests.cluster_in_process import POINTS, Cluster, Node
from tests.test_training import assert_equal_models, batch, flat, train
from tests.test_training_replica import apply

NODES = ["a", "b", "c"]
LR, MOMENTUM = 0.5, 0.9


def wide(seed: int = 0) -> nn.Module:
    """2,087 parameters: nine blocks of 256."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 26), nn.Tanh(), nn.Linear(26, 3))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model


# ---- fragments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5, 8])
@pytest.mark.parametrize("size", [256 * 8, 256 * 40 + 17, 3_000_000])
def test_fragments_are_disjoint_cover_the_vector_and_are_of_nearly_one_size(size: int, count: int) -> None:
    whole = Fragments("float32", size, 0, count)
    places = np.arange(size, dtype=np.float32)  # exact below 2**24
    pieces = [whole.take(places, fragment) for fragment in range(count)]
    for piece, expected in zip(pieces, oracle.fragments(size, 256, count), strict=True):
        np.testing.assert_array_equal(piece, expected.astype(np.float32))
    assert [wire.count for wire in whole.wires] == [piece.size for piece in pieces]
    assert max(map(len, pieces)) - min(map(len, pieces)) <= max(256, size // 8)
    back = np.empty_like(places)
    for fragment, piece in enumerate(pieces):
        whole.put(back, fragment, piece)
    np.testing.assert_array_equal(back, places)


def test_buffers_are_in_the_last_fragment_as_they_are() -> None:
    whole = Fragments("int8", 1024, 6, 2)
    vector = np.random.default_rng(1).standard_normal(1030, np.float32)
    last = whole.take(vector, 1)
    np.testing.assert_array_equal(last[-6:], vector[-6:])
    np.testing.assert_array_equal(whole.wires[1].decode(whole.wires[1].encode(last))[-6:], vector[-6:])
    assert whole.wires[0].buffers == 0


def test_the_fragments_that_changed_between_two_rounds() -> None:
    whole = Fragments("float32", 4096, 0, 4)
    assert [whole.of_round(number) for number in (1, 2, 4, 5)] == [0, 1, 3, 0]
    assert whole.changed(2, 3) == [2]
    assert whole.changed(3, 5) == [3, 0]
    assert whole.changed(3, 7) == whole.changed(3, 2) == [0, 1, 2, 3]


# ---- against numpy ---------------------------------------------------------------------------------------------


class Recorder:
    """Runs a loop on every node and keeps the local parameters before and after each ``sync.step``."""

    def __init__(self, steps: int, **arguments: Any) -> None:
        self.steps, self.arguments = steps, arguments
        self.before: dict[tuple[str, int], Any] = {}
        self.after: dict[tuple[str, int], Any] = {}
        self.received: dict[str, list[int]] = {}
        self.norms: list[float] = []

    def cell(self, node: Node) -> nn.Module:
        model = wide(7 if node.name == "a" else 8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = nc.DiLoCo(model, outer_lr=LR, outer_momentum=MOMENTUM, **self.arguments)
        for step in range(1, self.steps + 1):
            loss = train(model, optimizer, batch(100 * step + node.rank()))
            self.before[node.name, step] = flat(model).copy()
            done = sync.step(loss, samples=8 + node.rank())
            self.after[node.name, step] = flat(model).copy()
            if done is not None:
                self.received.setdefault(node.name, []).append(step)
        sync.finish()
        return model

    def run(self, directory: Path) -> Any:
        with Cluster(NODES, directory) as cluster:
            cluster.watch = lambda towards, node, message: (
                self.norms.append(message.norm) if isinstance(message, Arrived) and message.samples else None
            )
            results = cluster.run(self.cell)
        assert_equal_models(results)
        return flat(results["a"])


class Reference:
    """Streaming DiLoCo in numpy on what each node held when it sent."""

    def __init__(self, count: int) -> None:
        self.theta = flat(wide(7)).copy()
        self.momentum = np.zeros_like(self.theta)
        self.places = oracle.fragments(self.theta.size, 256, count)

    def round(self, fragment: int, locals_: list[Any], samples: list[int]) -> None:
        at = self.places[fragment]
        weights = [np.float32(part / sum(samples)) for part in samples]
        mean = oracle.mean([self.theta[at] - local[at] for local in locals_], weights)
        stepped = oracle.diloco(self.theta[at], self.momentum[at], mean, LR, MOMENTUM, True)
        self.theta[at], self.momentum[at] = stepped


@pytest.mark.parametrize("arguments", [{}, {"fragments": 1, "overlap": 0, "mix": 0.0}])
def test_one_fragment_without_overlap_and_mixing_is_diloco_bit_for_bit(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    recorder = Recorder(12, every=4, **arguments)
    end = recorder.run(tmp_path)
    reference = Reference(1)
    for step in (4, 8, 12):
        reference.round(0, [recorder.before[name, step] for name in NODES], [8, 9, 10])
    np.testing.assert_array_equal(end, reference.theta)
    assert recorder.received["a"] == [4, 8, 12]


@pytest.mark.parametrize("mix", [None, 0.0, 0.5])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_fragments_and_overlap_give_the_references_parameters_bit_for_bit(
    tmp_path: Path, overlap: int, mix: float | None
) -> None:
    """Three fragments, one every second step, received ``overlap`` steps later: work done meanwhile stays, or the
    paper's mixing. Leftover steps at the end."""
    recorder = Recorder(15, every=6, fragments=3, overlap=overlap, mix=mix)
    end = recorder.run(tmp_path)
    reference = Reference(3)
    held: dict[int, Any] = {}
    for index, step in enumerate(range(2, 15, 2)):
        fragment = index % 3
        reference.round(fragment, [recorder.before[name, step] for name in NODES], [8, 9, 10])
        held[step + overlap] = fragment, reference.theta[reference.places[fragment]].copy()

    def received(name: str, step: int, local: Any, theta: Any, at: Any) -> Any:
        if mix is None:
            return oracle.carried(local, recorder.before[name, step - overlap][at], theta)
        return oracle.mixed(local, theta, mix)

    for step, (fragment, theta) in held.items():
        at = reference.places[fragment]
        for name in NODES if step <= 15 else ():
            local = recorder.before[name, step][at]
            np.testing.assert_array_equal(recorder.after[name, step][at], received(name, step, local, theta, at))
            rest = np.setdiff1d(np.arange(reference.theta.size), at)
            np.testing.assert_array_equal(recorder.after[name, step][rest], recorder.before[name, step][rest])
    assert recorder.received["b"] == [step for step in held if step <= 15]
    # what is left goes in further rounds, one for each fragment that has steps of its own
    ends = [recorder.after[name, 15].copy() for name in NODES]
    for step, (fragment, theta) in held.items():
        if step > 15:
            at = reference.places[fragment]
            for name, local in zip(NODES, ends, strict=True):
                local[at] = received(name, step, local[at], theta, at)
    for fragment in (1, 2, 0):
        reference.round(fragment, ends, [8, 9, 10])
    np.testing.assert_array_equal(end, reference.theta)
    # What D is taken from is never reset to the local parameters; with mix=0 the work of the overlap itself is lost.
    assert min(recorder.norms) > 0 or (mix == 0 and overlap)


@pytest.mark.parametrize("codec", ["float32", "int8", "topk-8", "randomk-8"])
def test_overlap_without_fragments(tmp_path: Path, codec: str) -> None:
    recorder = Recorder(9, every=3, overlap=2, codec=codec)
    recorder.run(tmp_path)
    assert recorder.received["a"] == [5, 8]
    assert min(recorder.norms) > 0


def test_all_nodes_have_the_same_hash_after_every_round(tmp_path: Path) -> None:
    hashes: dict[int, set[str]] = {}

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            hashes.setdefault(message.round, set()).add(message.state_hash)

    recorder = Recorder(14, every=4, fragments=4, overlap=1, codec="int8")
    with Cluster(NODES, tmp_path) as cluster:
        cluster.watch = watch
        assert_equal_models(cluster.run(recorder.cell))
        seals = [record["seal"] for record in cluster.records if record["kind"] == "seal"]
    assert all(len(found) == 1 for found in hashes.values())
    assert [seal.get("fragment", 0) for seal in seals[:5]] == [0, 1, 2, 3, 0]
    assert len(hashes) >= 14


def test_while_a_fragment_is_under_way_training_goes_on(tmp_path: Path) -> None:
    """The coordinator's word is kept back until both nodes have taken the steps in between."""
    stepped = threading.Barrier(2)
    passed: list[str] = []

    def cell(node: Node) -> nn.Module:
        model = wide(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=4, overlap=3)
        for step in range(1, 13):
            sync.step(train(model, optimizer, batch(step)))
            if step in (6, 10):  # sent two steps ago
                stepped.wait(60)
                passed.append(node.name)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        cluster.lose = lambda sender, receiver, header: len(passed) < 2 and header.kind == "mean"
        assert_equal_models(cluster.run(cell))


# ---- failures --------------------------------------------------------------------------------------------------


def streaming_cell(rounds: int, codec: str = "float32", overlap: int = 1) -> Any:
    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=6, fragments=3, overlap=overlap, codec=codec)
        for step in range(rounds * 2):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())))
        sync.finish()
        return model

    return cell


@pytest.mark.parametrize(("direction", "kind"), POINTS)
@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_node_killed_at_any_point_leaves_the_others_equal(
    tmp_path: Path, direction: str, kind: type, victim: str
) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run_and_lose(victim, direction, kind, 5, streaming_cell(9, "int8"))
        assert_equal_models(results)


@pytest.mark.parametrize(("direction", "kind"), POINTS)
def test_a_coordinator_restarted_in_mid_round_goes_on_with_it(tmp_path: Path, direction: str, kind: type) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        restarted = cluster.once_at(direction, "b", kind, 4, cluster.restart_coordinator)
        assert_equal_models(cluster.run(streaming_cell(7)))
    assert restarted


def test_a_late_node_brings_the_work_of_each_fragment_to_its_next_turn_and_counts_it_once(tmp_path: Path) -> None:
    """The rounds go on without it until another fragment's turn: what it had sent is taken back, the work is not."""
    counted: dict[str, list[int]] = {name: [0, 0, 0] for name in NODES}
    without_it: list[int] = []
    go_on = threading.Event()

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=6, fragments=3, quorum=2, grace=0.05, codec="int8")
        for step in range(24):
            if node.name == "c" and step == 0:
                assert go_on.wait(60)
            sync.step(train(model, optimizer, batch(step)))
        return model

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            counted[node][(message.round - 1) % 3] += message.steps
        if isinstance(message, Commit) and node == "a" and "c" not in message.members:
            without_it.append(message.round)
            if len(without_it) == 2:
                go_on.set()

    with Cluster(NODES, tmp_path) as cluster:
        cluster.watch = watch
        assert_equal_models(cluster.run(cell))
    assert len(without_it) >= 2
    assert counted == {name: [24, 24, 24] for name in NODES}


def test_stop_while_a_fragment_is_under_way_then_the_cell_again(tmp_path: Path) -> None:
    with Cluster(["a", "b"], tmp_path) as cluster:
        fired = cluster.once_at("from", "a", Prepared, 3, lambda: os.kill(os.getpid(), signal.SIGINT))

        def forever(node: Node) -> nn.Module:
            model = wide(node.rank())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            sync = nc.DiLoCo(model, every=6, fragments=3, overlap=2)
            for step in range(10_000):
                sync.step(train(model, optimizer, batch(step)))
                if node.name == "b" and fired:
                    raise KeyboardInterrupt
            return model

        results = cluster.run(forever, main="a")
        assert all(isinstance(result, KeyboardInterrupt) for result in results.values()), results
        assert_equal_models(cluster.run(streaming_cell(4, overlap=2)))


def test_a_joiner_takes_the_state_and_is_in_a_later_round(tmp_path: Path) -> None:
    here = threading.Event()
    last: list[int] = []

    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DiLoCo(model, every=6, fragments=3, overlap=1)
        step = 0
        while not last or sync.round < last[0]:
            sync.step(train(model, optimizer, batch(step)))
            step += 1
            if sync.round >= 4:
                here.set()
            if "late" in sync.members and not last:
                last.append(sync.round + 4)
        return model

    with Cluster(["a", "b"], tmp_path) as cluster:
        assert_equal_models(cluster.run_with_newcomer(cell, here))
    assert last


def test_another_number_of_fragments_in_a_later_cell_goes_on_from_the_same_state(tmp_path: Path) -> None:
    def cell(fragments: int) -> Any:
        def run(node: Node) -> tuple[int, str, str]:
            model = wide(node.rank())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            sync = nc.DiLoCo(model, every=6, fragments=fragments)
            begins = sync.round, sync._replica.state_hash
            for step in range(7):
                sync.step(train(model, optimizer, batch(step)))
            sync.finish()
            return *begins, sync._replica.state_hash

        return run

    with Cluster(["a", "b"], tmp_path) as cluster:
        first = cluster.run(cell(3))
        second = cluster.run(cell(2))
    assert first["a"][2] == first["b"][2] == second["a"][1] == second["b"][1]
    assert second["a"][0] > 0
    assert second["a"][2] == second["b"][2] != first["a"][2]


# ---- one node's part -------------------------------------------------------------------------------------------


def replica_of(model: nn.Module, codec: str = "float32", **arguments: Any) -> Replica:
    parameters = TorchParameters(model)
    replica = Replica(parameters, Fragments(codec, parameters.layout.size, 0, 2), **arguments)
    theta = parameters.read()
    replica.start(0, theta, np.zeros_like(theta), "start")
    return replica


def work(replica: Replica, seed: int, samples: float = 1.0) -> None:
    change = np.random.default_rng(seed).standard_normal(replica.theta.size).astype(np.float32) * np.float32(0.01)
    replica.parameters.load(replica.parameters.read() + change)
    replica.count(samples)


def test_each_fragment_counts_its_own_steps_and_samples() -> None:
    replica = replica_of(wide())
    for seed in range(3):
        work(replica, seed, samples=4)
    first = replica.contribution(finishing=False)
    assert (first.fragment, first.steps, first.samples, first.more) == (0, 3, 12, True)
    apply(replica, 1, replica.theta, replica.momentum, "one")
    work(replica, 9, samples=5)
    second = replica.contribution(finishing=True)
    assert (second.fragment, second.steps, second.samples, second.more) == (1, 4, 17, True)
    apply(replica, 2, replica.theta, replica.momentum, "two")
    third = replica.contribution(finishing=True)
    assert (third.fragment, third.steps, third.samples, third.more) == (0, 1, 5, False)


def test_a_contribution_that_was_released_leaves_work_and_error_feedback_for_the_next_turn() -> None:
    replica = replica_of(wide(), "int8")
    work(replica, 1)
    replica.contribution(finishing=False)
    apply(replica, 1, replica.theta, replica.momentum, "one")
    feedback = replica._feedback[0]
    assert feedback is not None
    assert feedback.any()
    replica.round = 2  # the turn of fragment 0 again
    work(replica, 2)
    before = replica.contribution(finishing=False)
    replica.release()
    assert not replica.outstanding
    again = replica.contribution(finishing=False)
    assert bytes(again.encoded) == bytes(before.encoded)
    np.testing.assert_array_equal(replica._feedback[0], feedback)


@pytest.mark.parametrize("mix", [None, 0.0, 0.5])
def test_in_low_precision_what_the_model_cannot_hold_is_not_taken_for_work(mix: float | None) -> None:
    replica = replica_of(wide().to(torch.bfloat16), mix=mix)
    work(replica, 1)
    sent = replica.parameters.read()
    replica.contribution(finishing=False)
    theta = replica.theta + np.float32(1e-4)
    if mix is None:
        work(replica, 1)
        kept = sent - replica.parameters.read()
    else:
        kept = (theta - sent) * np.float32(mix)
    apply(replica, 1, theta, theta, "one")
    local = replica.parameters.read()
    assert np.abs(theta - kept - local).max() > 1e-4  # rounded
    left = replica._reference.without(0, replica.fragments.take(local, 0))
    np.testing.assert_allclose(left, replica.fragments.take(kept, 0), atol=1e-7)


# ---- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fragments": 0}, "fragments=0: use a whole number from 1"),
        ({"fragments": 2.0}, "fragments=2.0: use a whole number from 1"),
        ({"overlap": -1}, "overlap=-1: use a whole number of steps from 0"),
        ({"mix": 1}, "mix=1: use a number from 0 to below 1"),
        ({"every": 2, "fragments": 3}, "fragments=3: one is sent at a time, so every=2 steps bear 2 at most"),
        ({"every": 8, "fragments": 4, "overlap": 3}, "fragments=4 one is sent every 2 steps"),
        ({"fragments": 10}, "this model has 2087 parameters, which codec 'float32' sends in 9 blocks of 256"),
    ],
)
def test_impossible_fragments_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.DiLoCo(wide(), **arguments))["a"]
    assert isinstance(result, ValueError)
    with pytest.raises(ValueError, match=message):
        raise result


def test_nodes_with_other_fragments_are_refused(tmp_path: Path) -> None:
    def cell(node: Node) -> None:
        nc.DiLoCo(wide(), fragments=2 + node.rank())

    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(cell)
    assert results["a"] is None
    assert "'b' has fragments=3, 'a' (rank 0) has fragments=2" in str(results["b"])
