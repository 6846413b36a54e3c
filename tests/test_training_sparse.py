"""SparseLoCo: what is sent, the mean over the senders of each coordinate, error feedback, losses, bad bytes."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.codecs import DamagedError, WireFormat, get_codec
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Applied, Arrived, Commit
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.weighted_mean import gathered, mean_of_gathered
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models.torch_parameters import TorchParameters
from tests.cluster_in_process import POINTS, Cluster, Node
from tests.test_training import assert_equal_models, batch, flat, train
from tests.test_training_replica import apply

NODES = ["a", "b", "c"]


def wide(seed: int = 0) -> nn.Module:
    """9,855 parameters: two chunks of 4096 and a shorter one."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 88), nn.Tanh(), nn.Linear(88, 3))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


def vectors(count: int, size: int, seed: int = 0) -> list[Any]:
    return list(np.random.default_rng(seed).standard_normal((count, size), np.float32))


# ---- the mean --------------------------------------------------------------------------------------------------


def mean_over_senders(contributions: list[Any], weights: list[Any]) -> Any:
    """arXiv 2508.15706 in plain numpy: each coordinate over those who sent it."""
    total, by = np.zeros_like(contributions[0]), np.zeros_like(contributions[0])
    for values, weight in zip(contributions, weights, strict=True):
        total = total + values * weight
        by = by + np.where(values != 0, weight, np.float32(0))
    return np.divide(total, by, out=np.zeros_like(total), where=by > 0)


@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 3), (2, 3), (0, 1)])
def test_each_coordinate_is_averaged_over_those_who_sent_it_bit_for_bit(start: int, stop: int) -> None:
    wire = WireFormat("sparse", 10_103)
    weights = [np.float32(part) for part in (0.5, 0.3, 0.2)]
    encoded = [wire.encode(vector) for vector in vectors(3, 10_103)]
    decoded = [wire.decode(data) for data in encoded]
    low, high = wire.byte_range(start, stop)
    first, last = wire.element_range(start, stop)
    data = gathered([(part[low:high], float(w)) for part, w in zip(encoded, weights, strict=True)])
    assert len(data) == 3 * (4 + high - low)
    mean = mean_of_gathered(wire, data, 3, start, stop)
    np.testing.assert_array_equal(mean, mean_over_senders([vector[first:last] for vector in decoded], weights))
    alone = (decoded[0] != 0) & (decoded[1] == 0) & (decoded[2] == 0)
    np.testing.assert_allclose(mean[alone[first:last]], decoded[0][first:last][alone[first:last]], rtol=1e-6)


def test_buffers_are_averaged_over_all() -> None:
    wire = WireFormat("sparse", 4096, 4)
    sent = vectors(2, 4100)
    sent[0][-2:] = 0
    data = gathered([(wire.encode(vector), 0.5) for vector in sent])
    mean = mean_of_gathered(wire, data, 2, 0, wire.blocks)
    np.testing.assert_allclose(mean[-4:], (sent[0][-4:] + sent[1][-4:]) / 2, rtol=1e-6)


def test_with_every_element_sent_exactly_it_is_the_weighted_mean() -> None:
    wire = WireFormat("float32", 5000)
    sent = vectors(4, 5000)
    mean = mean_of_gathered(wire, gathered([(wire.encode(vector), 0.25) for vector in sent]), 4, 0, wire.blocks)
    np.testing.assert_allclose(mean, np.mean(sent, axis=0), atol=1e-6)


@pytest.mark.parametrize("spoil", ["short", "long", "weight", "record"])
def test_bytes_that_nobody_can_have_sent_are_refused(spoil: str) -> None:
    wire = WireFormat("sparse", 8192)
    data = bytearray(gathered([(wire.encode(vector), 0.5) for vector in vectors(2, 8192)]))
    match spoil:
        case "short":
            data = data[:-1]
        case "long":
            data += b"x"
        case "weight":
            data[:4] = np.float32(np.nan).tobytes()
        case "record":
            data[8:90] = bytes(82)
    with pytest.raises(DamagedError):
        mean_of_gathered(wire, data, 2, 0, wire.blocks)


# ---- one node --------------------------------------------------------------------------------------------------


def test_what_is_kept_back_is_sent_again_with_beta_and_moves_at_commit_only() -> None:
    parameters = TorchParameters(wide())
    replica = Replica(parameters, Fragments("sparse", parameters.layout.size, over_senders=True), beta=0.95)
    theta = parameters.read()
    replica.start(0, theta, np.zeros_like(theta), "start")
    wire = replica.fragments.wires[0]
    change, more = vectors(2, theta.size)
    parameters.load(theta + change)
    replica.count(1)
    first = theta - parameters.read()
    boundary = replica.contribution(finishing=False)
    sent = wire.decode(boundary.encoded)
    assert np.count_nonzero(sent[:4096]) == 64
    replica.rebase(1, theta, theta, "late")  # the round went on without it: nothing was sent
    replica.release()
    assert bytes(replica.contribution(finishing=False).encoded) == bytes(boundary.encoded)
    apply(replica, 2, theta, theta, "two")
    parameters.load(theta + more)
    replica.count(1)
    a = np.float32(0.95) * (first - sent) + (theta - parameters.read())
    np.testing.assert_array_equal(
        wire.decode(replica.contribution(finishing=False).encoded), wire.decode(wire.encode(a))
    )


# ---- several nodes ---------------------------------------------------------------------------------------------


def sparse_cell(rounds: int, **arguments: Any) -> Any:
    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        sync = nc.SparseLoCo(model, **({"every": 3} | arguments))
        for step in range(3 * rounds):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())), samples=8 + node.rank())
        sync.finish()
        return model

    return cell


def test_a_round_is_the_papers_step_bit_for_bit(tmp_path: Path) -> None:
    """Recomputed in numpy from the bytes that were on the mesh."""
    chunks: dict[tuple[int, int], dict[str, dict[int, bytes]]] = {}
    means: dict[tuple[int, int], dict[int, bytes]] = {}

    class Recording(Cluster):
        def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
            if header.kind == "mean":
                means.setdefault((header.round, header.slice), {})[header.offset] = payload
            elif header.kind == "contribution":
                chunks.setdefault((header.round, header.slice), {}).setdefault(sender.name, {})[header.offset] = payload
            super().carry(sender, receiver, header, payload)

    with Recording(NODES, tmp_path) as cluster:
        results = cluster.run(sparse_cell(4, outer_lr=0.5))
    assert_equal_models(results)
    theta, wire = flat(wide(0)).copy(), WireFormat("sparse", flat(wide(0)).size)
    commits = [record for record in cluster.records if record["kind"] == "commit" and record["slices"]]
    assert len(commits) == 4
    for record in commits:
        number = record["commit"]["round"]
        for index, piece in enumerate(record["slices"]):
            low, high = wire.byte_range(piece["start"], piece["stop"])
            first, last = wire.element_range(piece["start"], piece["stop"])
            data = b"".join(part for _, part in sorted(means[number, index].items()))
            weights = np.frombuffer(data[:12], np.float32)
            rows = np.frombuffer(data[12:], np.uint8).reshape(3, high - low)
            sent = {name: b"".join(p for _, p in sorted(c.items())) for name, c in chunks[number, index].items()}
            for rank, name in enumerate(NODES):
                assert name not in sent or sent[name] == rows[rank].tobytes()
            values = [wire.decode(row.data, piece["start"], piece["stop"]) for row in rows]
            theta[first:last] -= np.float32(0.5) * mean_over_senders(values, list(weights))
    np.testing.assert_array_equal(flat(results["a"]), theta)


def test_it_learns_sends_little_and_all_nodes_end_equal(tmp_path: Path) -> None:
    sent: list[int] = []
    hashes: dict[int, set[str]] = {}

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            sent.append(message.bytes_sent)
            hashes.setdefault(message.round, set()).add(message.state_hash)

    def loss_of(model: nn.Module) -> float:
        x, y = batch(9_999, 64)
        return float((model(x) - y).square().mean().detach())

    with Cluster(NODES, tmp_path) as cluster:
        cluster.watch = watch
        results = cluster.run(sparse_cell(30))
    assert_equal_models(results)
    assert loss_of(results["a"]) < 0.25 * loss_of(wide(0))
    assert all(len(found) == 1 for found in hashes.values())
    dense = 4 * flat(wide(0)).size
    size = WireFormat("sparse", flat(wide(0)).size).size
    assert max(sent) < 3 * 3 * size + 100  # of three nodes one may own everything
    assert max(sent) < dense


@pytest.mark.parametrize("arguments", [{"every": 6, "fragments": 2, "overlap": 2}, {"overlap": 2}, {"k": 128}])
def test_with_fragments_overlap_and_another_k_all_nodes_end_equal(tmp_path: Path, arguments: dict[str, Any]) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        assert_equal_models(cluster.run(sparse_cell(6, **arguments)))


@pytest.mark.parametrize(("direction", "kind"), POINTS)
@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_node_killed_at_any_point_leaves_the_others_equal(
    tmp_path: Path, direction: str, kind: type, victim: str
) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run_and_lose(victim, direction, kind, 3, sparse_cell(6))
        assert_equal_models(results)


@pytest.mark.parametrize("codec", ["SparseLoCo", "topk", "randomk"])
def test_a_late_node_catches_up_from_the_rounds_it_missed(tmp_path: Path, codec: str) -> None:
    strategy = nc.SparseLoCo if codec == "SparseLoCo" else partial(nc.DiLoCo, codec=codec)
    without_it: list[int] = []
    transferred: list[str] = []
    go_on, back = threading.Event(), threading.Event()

    def cell(node: Node) -> nn.Module:
        model = wide(0)  # equal everywhere: no transfer at the start
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = strategy(model, every=3, quorum=2, grace=0.05)
        for step in range(18):
            if node.name == "c" and step == 0:
                assert go_on.wait(60)
            if node.name != "c" and step == 6:  # after two rounds: members keep the means of a few only
                assert back.wait(60)
            sync.step(train(model, optimizer, batch(step)))
        return model

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Commit) and node == "a" and "c" not in message.members:
            without_it.append(message.round)
            if len(without_it) == 2:
                go_on.set()
        if isinstance(message, Arrived) and node == "c" and message.base_hash:
            back.set()

    with Cluster(NODES, tmp_path) as cluster:
        cluster.watch = watch
        cluster.lose = lambda sender, receiver, header: bool(
            transferred.append(receiver) if header.kind == "state" else False
        )
        assert_equal_models(cluster.run(cell))
    assert without_it[:2] == [1, 2]
    assert not transferred


def test_a_contribution_of_bytes_that_no_codec_writes_is_refused_and_its_node_named(tmp_path: Path) -> None:
    spoiled: list[int] = []

    class Spoiling(Cluster):
        def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
            if header.kind == "contribution" and sender.name == "c" and header.round == 2:
                spoiled.append(header.attempt)
                payload = bytes(len(payload))
            super().carry(sender, receiver, header, payload)

    with Spoiling(NODES, tmp_path) as cluster:
        assert_equal_models(cluster.run(sparse_cell(4)))
        assert [text for level, text in cluster.told if level == "warning"] == [
            "the work of 'c' for round 2 holds NaN or infinity, or is damaged: it is not used"
        ]
    assert spoiled


# ---- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 60}, "k=60: use a multiple of 8 from 8 to 1024, the elements sent of each 4096"),
        ({"k": 64.0}, "k=64.0: use a multiple of 8"),
        ({"beta": 1.5}, "beta=1.5: use a number from 0 to 1"),
        ({"outer_lr": None}, "outer_lr=None: SparseLoCo needs a number, 1.0 in the paper"),
        ({"outer_lr": -1.0}, "outer_lr=-1.0: use a number above 0"),
    ],
)
def test_impossible_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.SparseLoCo(wide(), **arguments))["a"]
    assert isinstance(result, ValueError)
    assert message in str(result)


def test_the_sparse_codec_is_no_codec_for_diloco(tmp_path: Path) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.DiLoCo(wide(), codec="sparse"))["a"]
    assert "codec='sparse': use one of" in str(result)
    assert get_codec("sparse-128").name == "sparse-128"
