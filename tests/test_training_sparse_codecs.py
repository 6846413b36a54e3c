"""topk and randomk as codecs of every strategy: the mean over all, late contributions, error feedback, bad bytes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.codecs import DamagedError, WireFormat, get_codec
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Applied, Arrived, Commit, Seal
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import bits_float
from notebook_cluster.rounds.numerics.weighted_mean import (
    gathered,
    gathered_count,
    is_finite,
    joined,
    mean_of,
    mean_of_gathered,
)
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models.torch_parameters import TorchParameters
from tests.cluster_in_process import POINTS, Cluster, Node, stepped  # noqa: F401
from tests.test_training import assert_equal_models, batch, flat, loss_of, train
from tests.test_training_replica import apply
from tests.test_training_sparse import NODES, vectors, wide

stepped_both_ways = pytest.mark.usefixtures("stepped")

CODECS = ["topk", "randomk-256"]
SIZE = 9_855
"""Parameters of :func:`wide`: two chunks of 4096 and a shorter one."""


def by_hand(wire: WireFormat, contributions: list[tuple[Any, float]]) -> Any:
    """``sum_m w_m s_m`` in plain numpy, one product and one addition at a time."""
    total = np.zeros(wire.count, np.float32)
    for data, weight in contributions:
        total = total + wire.decode(data) * np.float32(weight)
    return total


# ---- the mean --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 4), (2, 3), (0, 1)])
def test_topk_is_averaged_over_all_bit_for_bit(start: int, stop: int) -> None:
    wire = WireFormat("topk", SIZE, 7)
    sent = [(wire.encode(v), weight) for v, weight in zip(vectors(3, SIZE + 7), (0.5, 0.3, 0.2), strict=True)]
    low, high = wire.byte_range(start, stop)
    data = joined(wire, [(piece[low:high], weight) for piece, weight in sent], start, stop)
    assert len(data) == 3 * (4 + high - low)
    mean = mean_of_gathered(wire, data, 3, start, stop, over_all=True)
    np.testing.assert_array_equal(mean, by_hand(wire, sent)[slice(*wire.element_range(start, stop))])


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (1, 4), (2, 3), (3, 4)])
def test_contributions_of_one_draw_are_added_up_by_the_owner_and_sent_on_as_one(start: int, stop: int) -> None:
    wire = WireFormat("randomk", SIZE, 7).drawn(5)
    sent = [(wire.encode(v), weight) for v, weight in zip(vectors(3, SIZE + 7), (0.5, 0.3, 0.2), strict=True)]
    low, high = wire.byte_range(start, stop)
    data = joined(wire, [(piece[low:high], weight) for piece, weight in sent], start, stop)
    assert len(data) == 4 + high - low
    mean = mean_of_gathered(wire, data, 3, start, stop, over_all=True)
    expected = by_hand(wire, sent)[slice(*wire.element_range(start, stop))]
    assert ((mean != 0) == (expected != 0)).all()
    np.testing.assert_allclose(mean, expected, rtol=2.0**-8)  # the sum is rounded to bfloat16 once more
    if stop == 4:
        np.testing.assert_array_equal(mean[-7:], expected[-7:])  # buffers are not


def test_a_contribution_of_an_earlier_draw_is_sent_on_beside_the_others() -> None:
    wire = WireFormat("randomk", SIZE)
    parts = vectors(4, SIZE)
    sent = [(wire.drawn(draw).encode(v), 0.25) for draw, v in zip((7, 6, 7, 7), parts, strict=True)]
    data = joined(wire, sent, 0, wire.blocks)
    assert len(data) == 2 * (4 + wire.size)
    assert bytes(data[8 + wire.size :]) == bytes(sent[1][0])
    np.testing.assert_array_equal(np.frombuffer(data[:8], np.float32), [1, 0.25])
    mean = mean_of_gathered(wire, data, 4, 0, wire.blocks, over_all=True)
    np.testing.assert_allclose(mean, by_hand(wire, sent), rtol=2.0**-7, atol=1e-6)


def test_with_every_draw_another_one_nothing_is_joined() -> None:
    wire = WireFormat("randomk", SIZE)
    sent = [(wire.drawn(draw).encode(v), 0.5) for draw, v in enumerate(vectors(2, SIZE))]
    assert joined(wire, sent, 0, wire.blocks) == gathered(sent)


@pytest.mark.parametrize("codec", ["topk", "randomk"])
def test_only_bytes_of_as_many_contributions_as_there_can_be_are_taken(codec: str) -> None:
    wire = WireFormat(codec, SIZE)
    size = wire.size
    found = [gathered_count(wire, 3, size, total) for total in (0, size, size + 4, 2 * (size + 4), 3 * (size + 4))]
    assert found == ([0, 0, 0, 0, 3] if codec == "topk" else [0, 0, 1, 2, 3])
    assert gathered_count(wire, 3, size, 4 * (size + 4)) == gathered_count(wire, 3, size, 3 * (size + 4) - 1) == 0


@pytest.mark.parametrize("codec", ["topk", "randomk"])
@pytest.mark.parametrize("spoil", ["short", "long", "none", "weight", "values"])
def test_bytes_that_nobody_can_have_sent_are_refused(codec: str, spoil: str) -> None:
    wire = WireFormat(codec, 8192)
    sent = [(wire.drawn(draw).encode(v), 0.5) for draw, v in enumerate(vectors(2, 8192))]
    data = bytearray(gathered(sent))
    match spoil:
        case "short":
            data = data[:-1]
        case "long":
            data += data[8:] + bytes(8)
        case "none":
            data = bytearray()
        case "weight":
            data[:4] = np.float32(-1).tobytes()
        case "values":
            data[8:10] = b"\x80\x7f"
    with pytest.raises(DamagedError):
        mean_of_gathered(wire, data, 2, 0, wire.blocks, over_all=True)


@pytest.mark.parametrize("codec", ["topk", "randomk"])
def test_a_contribution_that_no_codec_writes_is_known_by_its_bytes(codec: str) -> None:
    wire = WireFormat(codec, SIZE)
    data = bytearray(wire.encode(vectors(1, SIZE)[0]))
    assert is_finite(wire, data, 0, wire.blocks)
    data[:2] = b"\x80\x7f"
    assert not is_finite(wire, data, 0, wire.blocks)


# ---- one node --------------------------------------------------------------------------------------------------


def test_randomk_draws_anew_for_every_round_and_the_same_on_every_node() -> None:
    fragments = Fragments("randomk", SIZE)
    places = [fragments.made_for(number).places(fragments.made_for(number).encode(v), 0, 3) for number, v in
              ((1, vectors(1, SIZE, 0)[0]), (1, vectors(1, SIZE, 1)[0]), (2, vectors(1, SIZE, 1)[0]))]  # fmt: skip
    assert places[0] == places[1] != places[2]


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_kept_back_is_all_sent_again_and_moves_at_commit_only(codec: str) -> None:
    parameters = TorchParameters(wide())
    replica = Replica(parameters, Fragments(codec, SIZE))
    theta = parameters.read()
    replica.start(0, theta, np.zeros_like(theta), "start")
    change, more = vectors(2, SIZE)
    parameters.load(theta + change)
    replica.count(1)
    first = theta - parameters.read()
    boundary = replica.contribution(finishing=False)
    sent = replica.fragments.wires[0].decode(boundary.encoded)
    assert np.count_nonzero(sent[:4096]) == (64 if codec == "topk" else 256)
    assert boundary.norm == pytest.approx(float(np.linalg.norm(first)))
    replica.rebase(1, theta, theta, "late")  # the round went on without it, and so did what it had drawn
    replica.release()
    again = replica.contribution(finishing=False).encoded
    assert (bytes(again) == bytes(boundary.encoded)) == (codec == "topk")
    sent = replica.fragments.wires[0].decode(again)
    apply(replica, 2, theta, theta, "two")
    parameters.load(theta + more)
    replica.count(1)
    a = (first - sent) + (theta - parameters.read())
    after = replica.contribution(finishing=False)
    assert bytes(after.encoded) == bytes(replica.fragments.made_for(3).encode(a))
    assert after.norm == pytest.approx(float(np.linalg.norm(theta - parameters.read())))  # not of what is fed back


# ---- it learns -------------------------------------------------------------------------------------------------


class Quadratic:
    """``|x - goal|^2 / 2`` of each node, with a goal of its own: what is best for all is the mean of them, and no
    node's gradient vanishes there. Three chunks of 4096."""

    def __init__(self, codec: str, feedback: bool) -> None:
        numbers = np.random.default_rng(5)
        self.goals = numbers.standard_normal((4, 3 * 4096)).astype(np.float32)
        self.best = self.goals.mean(axis=0)
        self.x = np.zeros(3 * 4096, np.float32)
        self._fragments, self._feedback = Fragments(codec, self.x.size), feedback
        self._left = [np.zeros_like(self.x) for _ in self.goals]
        self.counted = np.zeros(self.x.size)
        """All means so far."""
        self.meant = np.zeros(self.x.size)
        """What they would have been without a codec."""

    def loss(self) -> float:
        """How much of the loss that can be taken away is left."""
        return float(np.square(self.x - self.best).sum() / np.square(self.best).sum())

    def step(self, number: int, lr: float) -> None:
        wire, sent = self._fragments.made_for(number), []
        gradients = [self.x - goal for goal in self.goals]
        for gradient, left in zip(gradients, self._left, strict=True):
            if self._feedback:
                left += gradient
            else:
                left[...] = gradient
            sent.append((wire.encode_from(left), 0.25))
        if self._fragments.all_gather:
            mean = mean_of_gathered(wire, joined(wire, sent, 0, wire.blocks), 4, 0, wire.blocks, over_all=True)
        else:
            mean = mean_of(wire, sent, 0, wire.blocks)
        self.x -= np.float32(lr) * mean
        self.counted += mean
        self.meant += np.mean(gradients, axis=0)

    def waiting(self) -> Any:
        return np.mean(self._left, axis=0)


def trained(codec: str, feedback: bool, lr: float, rounds: int) -> Quadratic:
    problem = Quadratic(codec, feedback)
    for number in range(1, rounds + 1):
        problem.step(number, lr)
    return problem


@pytest.mark.proof
@pytest.mark.parametrize(
    ("codec", "lr"), [("topk", 0.005), ("topk-256", 0.01), ("randomk", 0.003), ("randomk-256", 0.01)]
)
def test_with_error_feedback_it_ends_where_dense_ends_and_without_it_does_not(codec: str, lr: float) -> None:
    """Within a hundredth of the loss that can be taken away; without feedback half of that loss or more is left."""
    rounds = int(5 / lr)
    dense = trained("float32", True, lr, rounds).loss()
    assert dense < 1e-4
    assert trained(codec, True, lr, rounds).loss() < dense + 0.01
    assert trained(codec, False, lr, rounds).loss() > 0.5


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_is_lost_or_counted_twice(codec: str) -> None:
    """What all rounds applied and what waits at the nodes is what they meant, each with its weight."""
    problem = trained(codec, True, 0.01, 50)
    scale = np.abs(problem.meant).max()
    np.testing.assert_allclose(problem.counted + problem.waiting(), problem.meant, atol=scale * 2.0**-8)
    assert np.abs(problem.waiting()).max() > 0.05 * scale


# ---- several nodes ---------------------------------------------------------------------------------------------


def averaged(rounds: int, make: Callable[..., Any] = nc.DiLoCo, **arguments: Any) -> Any:
    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        sync = make(model, **({"every": 3} | arguments))
        for step in range(3 * rounds):
            sync.step(train(model, optimizer, batch(step + 100 * node.rank())), samples=8 + node.rank())
        sync.finish()
        return model

    return cell


def parallel(steps: int, **arguments: Any) -> Any:
    def cell(node: Node) -> nn.Module:
        model = wide(node.rank())
        sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.003), **arguments)
        for step in range(steps):
            loss = loss_of(model, batch(10 * step + node.rank()))
            loss.backward()
            sync.step(loss, samples=8)
        return model

    return cell


class Recording(Cluster):
    """Keeps the contributions and means that were on the mesh."""

    def __init__(self, names: list[str], directory: Path) -> None:
        self.sent: dict[tuple[int, int], dict[str, dict[int, bytes]]] = {}
        self.means: dict[tuple[int, int], dict[int, bytes]] = {}
        super().__init__(names, directory)

    def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
        if header.kind == "mean":
            self.means.setdefault((header.round, header.slice), {})[header.offset] = payload
        elif header.kind == "contribution":
            of_slice = self.sent.setdefault((header.round, header.slice), {})
            of_slice.setdefault(sender.name, {})[header.offset] = payload
        super().carry(sender, receiver, header, payload)

    def rounds(self) -> list[Any]:
        """(number, slices, weights of members in rank order) of each committed round."""
        seals = {(record["seal"]["round"], record["seal"]["attempt"]): record["seal"]
                 for record in self.records if record["kind"] == "seal"}  # fmt: skip
        commits = [record for record in self.records if record["kind"] == "commit" and record["slices"]]
        found = []
        for record in commits:
            number, attempt = record["commit"]["round"], record["commit"]["attempt"]
            members = seals[number, attempt]["members"]
            found.append((number, record["slices"], {m["name"]: bits_float(m["weight_bits"]) for m in members}))
        return found


def whole(pieces: dict[int, bytes]) -> bytes:
    return b"".join(piece for _, piece in sorted(pieces.items()))


@stepped_both_ways
@pytest.mark.parametrize("codec", ["topk", "topk-256", "randomk", "randomk-1024"])
def test_a_round_of_local_sgd_is_the_mean_over_all_bit_for_bit(tmp_path: Path, codec: str) -> None:
    """Recomputed in numpy from the bytes that were on the mesh."""
    with Recording(NODES, tmp_path) as cluster:
        results = cluster.run(averaged(4, nc.LocalSGD, codec=codec))
    assert_equal_models(results)
    theta, wire = flat(wide(0)).copy(), WireFormat(codec, SIZE)
    committed = cluster.rounds()
    assert len(committed) == 4
    for number, slices, weights in committed:
        mean = np.zeros(SIZE, np.float32)
        for index, piece in enumerate(slices):
            start, stop = piece["start"], piece["stop"]
            low, high = wire.byte_range(start, stop)
            first, last = wire.element_range(start, stop)
            data = whole(cluster.means[number, index])
            count = 3 if codec.startswith("topk") else 1
            assert len(data) == count * (4 + high - low)
            shares = np.frombuffer(data[: 4 * count], np.float32)
            rows = np.frombuffer(data[4 * count :], np.uint8).reshape(count, high - low)
            sent = {name: whole(pieces) for name, pieces in cluster.sent[number, index].items()}
            if count == 3:
                assert shares.tolist() == list(weights.values())
                for rank, name in enumerate(NODES):
                    assert name not in sent or sent[name] == rows[rank].tobytes()
            else:
                assert {wire.places(part, start, stop) for part in (*sent.values(), rows[0])} == {
                    wire.drawn(number).places(
                        wire.drawn(number).encode(np.zeros(last - first, np.float32), start, stop), start, stop
                    )
                }
            for row, share in zip(rows, shares, strict=True):
                mean[first:last] += wire.decode(row.data, start, stop) * share
        theta = theta - mean
    np.testing.assert_array_equal(flat(results["a"]), theta)


@stepped_both_ways
@pytest.mark.parametrize("codec", ["topk-8", "randomk-8", "topk-256", "randomk-256"])
@pytest.mark.parametrize(
    "arguments",
    [{"outer_lr": 0.3}, {"every": 6, "fragments": 2, "overlap": 2}, {"overlap": 2}, {"overlap": 1, "mix": 0.5}],
    ids=["plain", "fragments", "overlap", "mix"],
)
def test_after_every_round_all_nodes_hold_the_same_bits(tmp_path: Path, codec: str, arguments: dict[str, Any]) -> None:
    hashes: dict[int, set[str]] = {}

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            hashes.setdefault(message.round, set()).add(message.state_hash)

    with Cluster(NODES, tmp_path) as cluster:
        cluster.watch = watch
        assert_equal_models(cluster.run(averaged(6, codec=codec, **arguments)))
    assert len(hashes) >= 6
    assert all(len(found) == 1 for found in hashes.values())


@stepped_both_ways
@pytest.mark.parametrize("codec", ["topk-256", "randomk-256"])
@pytest.mark.parametrize(
    "arguments",
    [{"resend": None}, {"resend": 7}, {"mode": "server"}, {"accumulate": 2}],
    ids=["plain", "resend", "server", "accumulate"],
)
def test_data_parallel_learns_and_all_nodes_end_equal(tmp_path: Path, codec: str, arguments: dict[str, Any]) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(parallel(60 * arguments.get("accumulate", 1), codec=codec, **arguments))
    assert_equal_models(results)
    data = batch(9_999, 64)
    assert loss_of(results["a"], data).item() < 0.3 * loss_of(wide(0), data).item()


@stepped_both_ways
@pytest.mark.parametrize("mode", ["allreduce", "server"])
@pytest.mark.parametrize("codec", CODECS)
def test_a_node_sends_what_the_codec_says_and_the_server_sends_parameters(
    tmp_path: Path, codec: str, mode: str
) -> None:
    sizes: dict[str, set[int]] = {"contribution": set(), "mean": set()}

    def measure(sender: str, receiver: str, header: JobFrame) -> bool:
        if header.kind in sizes:
            sizes[header.kind].add(header.total)
        return False

    with Cluster(NODES, tmp_path) as cluster:
        cluster.lose = measure
        assert_equal_models(cluster.run(parallel(3, codec=codec, mode=mode, resend=None)))
    size = WireFormat(codec, SIZE).size
    assert sizes["contribution"] == {size}
    sent_back = {"server": 4 * SIZE, "allreduce": (3 if codec == "topk" else 1) * (4 + size)}[mode]
    assert sizes["mean"] == {sent_back}


@stepped_both_ways
def test_running_statistics_are_averaged_over_all_in_every_round(tmp_path: Path) -> None:
    def cell(node: Node) -> Any:
        with threading.Lock():
            torch.manual_seed(0)
            model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 40), nn.Linear(40, 3))
        sync = nc.DiLoCo(model, every=1, codec="randomk-8", outer_lr=0.1)
        model(torch.full((4, 6), 1.0 + node.rank()) + torch.arange(4.0)[:, None])
        sync.step()
        return model[0].running_mean.numpy().copy()  # type: ignore[union-attr]

    with Cluster(NODES, tmp_path) as cluster:
        results = cluster.run(cell)
    np.testing.assert_allclose(results["a"], np.full(6, 0.1 * (1.5 + 2)), rtol=1e-6)
    for name in NODES:
        np.testing.assert_array_equal(results[name], results["a"])


@stepped_both_ways
@pytest.mark.parametrize(("direction", "kind"), POINTS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("cell", [averaged, parallel], ids=["DiLoCo", "DataParallel"])
def test_a_node_killed_at_any_point_leaves_the_others_equal(
    tmp_path: Path, direction: str, kind: type, codec: str, cell: Any
) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        assert_equal_models(cluster.run_and_lose("a", direction, kind, 3, cell(6, codec=codec)))


@stepped_both_ways
@pytest.mark.parametrize("codec", CODECS)
def test_a_coordinator_restarted_in_mid_round_goes_on_with_it(tmp_path: Path, codec: str) -> None:
    with Cluster(NODES, tmp_path) as cluster:
        restarted = cluster.once_at("from", "b", Arrived, 4, cluster.restart_coordinator)
        assert_equal_models(cluster.run(averaged(7, codec=codec)))
    assert restarted


@stepped_both_ways
@pytest.mark.parametrize("codec", ["topk", "randomk"])
def test_work_that_comes_late_keeps_its_bytes_and_is_counted_once_in_a_later_round(tmp_path: Path, codec: str) -> None:
    """Node c arrives with its first contribution while rounds go on without it. In the round that counts it the
    others have drawn other elements."""
    counted: dict[str, int] = dict.fromkeys(NODES, 0)
    members: dict[int, list[str]] = {}
    hashes: dict[int, set[str]] = {}
    arrived, go_on = threading.Event(), threading.Event()

    def cell(node: Node) -> nn.Module:
        model = wide(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.LocalSGD(model, every=3, quorum=2, grace=0.05, codec=codec)
        for step in range(24):
            if node.name != "c" and step == 9:
                assert go_on.wait(60)
            sync.step(train(model, optimizer, batch(step)))
        return model

    class Late(Recording):
        def from_node(self, node: Node, message: Any) -> None:
            # what c says of its first boundary is on its way for two rounds
            if isinstance(message, Arrived) and node.name == "c" and message.round == 1 and not arrived.is_set():
                arrived.set()
                threading.Thread(target=self._later, args=(node, message), daemon=True).start()
                return
            super().from_node(node, message)

        def _later(self, node: Node, message: Any) -> None:
            assert self.wait_for(lambda: len(members) >= 2)
            super().from_node(node, message)
            go_on.set()

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            counted[node] += message.steps
            hashes.setdefault(message.round, set()).add(message.state_hash)
        if isinstance(message, Commit):
            # of any node: on a busy machine "a" may be the one that is left out of a round
            members.setdefault(message.round, message.members)

    with Late(NODES, tmp_path) as cluster:
        cluster.watch = watch
        assert_equal_models(cluster.run(cell))
    assert sorted(members)[:2] == [1, 2]
    assert counted == dict.fromkeys(NODES, 24)
    assert all(len(found) == 1 for found in hashes.values())
    first, wire = min(round for round, those in members.items() if "c" in those), WireFormat(codec, SIZE)
    assert first > 2
    sent = {name: whole(pieces) for name, pieces in cluster.sent[first, 0].items()}
    mean = whole(cluster.means[first, 0])
    rows = {"topk": len(members[first]), "randomk": 2}[codec]
    assert len(mean) == rows * (4 + wire.size)
    if codec == "randomk":
        drawn = [wire.drawn(number) for number in (1, first)]
        places = [made.places(made.encode(np.zeros(SIZE, np.float32)), 0, wire.blocks) for made in drawn]
        told = {wire.places(row, 0, wire.blocks) for row in (mean[8 : 8 + wire.size], mean[8 + wire.size :])}
        assert told == set(places)
        for name, data in sent.items():
            assert wire.places(data, 0, wire.blocks) == places[name != "c"]


@stepped_both_ways
@pytest.mark.parametrize("mode", ["allreduce", "server", "DiLoCo"])
@pytest.mark.parametrize("codec", ["topk", "randomk"])
def test_a_contribution_of_bytes_that_no_codec_writes_is_refused_and_its_node_named(
    tmp_path: Path, codec: str, mode: str
) -> None:
    spoiled: list[int] = []

    class Spoiling(Cluster):
        def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
            if header.kind == "contribution" and sender.name == "c" and header.round == 2:
                spoiled.append(header.attempt)
                payload = b"\x80\x7f" * (len(payload) // 2)
            super().carry(sender, receiver, header, payload)

    cell = averaged(4, codec=codec) if mode == "DiLoCo" else parallel(4, codec=codec, mode=mode)
    with Spoiling(NODES, tmp_path) as cluster:
        assert_equal_models(cluster.run(cell))
        warned = [text for level, text in cluster.told if level == "warning"]
        assert "the work of 'c' for round 2 holds NaN or infinity, or is damaged: it is not used" in warned
    assert spoiled


@stepped_both_ways
def test_a_mean_of_another_size_that_its_owner_did_not_send_does_not_hold_the_round_up(tmp_path: Path) -> None:
    """Of randomk one to three contributions may be sent on, so a wrong size can fit."""
    wrong: list[str] = []

    class Lying(Cluster):
        def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
            if header.kind == "mean" and header.round == 2 and receiver == "b" and sender.name == "a":
                lie = structs.replace(header, total=3 * header.total, offset=0)
                self.nodes["b"].deliver_frame("c", lie, b"nonsense")
                super().carry(sender, receiver, header, payload)
                self.nodes["b"].deliver_frame("c", structs.replace(lie, total=5 * header.total), b"nonsense")
                wrong.append(receiver)
            else:
                super().carry(sender, receiver, header, payload)

    seals: list[tuple[int, int]] = []

    def watch(towards: str, node: str, message: Any) -> None:
        if isinstance(message, Seal) and node == "a":
            seals.append((message.round, message.attempt))

    with Lying(NODES, tmp_path) as cluster:
        cluster.watch = watch
        assert_equal_models(cluster.run(averaged(4, codec="randomk")))
    assert wrong
    assert seals == [(1, 1), (2, 1), (3, 1), (4, 1)]


# ---- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ("topk-60", "codec='topk-60': say how many of each 4096 numbers are sent, a multiple of 8 from 8 to 1024, "
                    "for example 'topk-64'"),
        ("topk:0.01", "for example 'topk-40'"),
        ("randomk-0.1", "for example 'randomk-408'"),
        ("randomk-4096", "for example 'randomk-1024'"),
        ("topk-", "for example 'topk-256'"),
        ("topk-nan", "for example 'topk-256'"),
        ("topk--8", "for example 'topk-8'"),
        ("topk64", "codec='topk64': use one of 'float32', 'fp16', 'bf16', 'int8', 'int4', 'e3m0', 'topk', 'randomk'; "
                   "'topk-256' sends 256 of each 4096 numbers, not 64"),
        ("sparse-128", "codec='sparse-128': use one of"),
        ("int8-64", "codec='int8-64': use one of"),
        (64, "codec=64: use one of"),
        (None, "codec=None: use one of"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("make", ["DiLoCo", "DataParallel"])
def test_a_codec_that_cannot_be_is_named_with_one_that_can(tmp_path: Path, make: str, codec: Any, message: str) -> None:
    def cell(node: Node) -> Any:
        model = wide()
        if make == "DiLoCo":
            return nc.DiLoCo(model, codec=codec)
        return nc.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), codec=codec)

    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(cell)["a"]
    assert isinstance(result, ValueError)
    assert message in str(result)


def test_more_fragments_than_chunks_are_named(tmp_path: Path) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        result = cluster.run(lambda node: nc.DiLoCo(wide(), codec="topk", fragments=4))["a"]
    assert "'topk' sends in 3 blocks of 4096: use fragments=3 or fewer" in str(result)


@pytest.mark.parametrize(
    ("codec", "momentum", "warns"),
    [("topk", 0.9, True), ("randomk-256", 0.5, True), ("topk", 0.0, False), ("int4", 0.9, False)],
)
def test_momentum_on_top_of_what_is_kept_back_is_warned_of(
    tmp_path: Path, codec: str, momentum: float, warns: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with Cluster(["a"], tmp_path) as cluster:
        cluster.run(lambda node: nc.DiLoCo(wide(), codec=codec, outer_momentum=momentum) and None)
    said = capfd.readouterr().err
    line = f"[model] codec={codec!r} keeps most of a round's work back, and outer_momentum={momentum:g} multiplies it"
    assert (line in said) == warns


def test_one_codec_has_one_name(tmp_path: Path) -> None:
    assert get_codec("topk-64").name == "topk"

    def cell(node: Node) -> Any:
        sync = nc.DiLoCo(wide(), codec=["topk", "topk-64", "topk-064"][node.rank()])
        return sync._strategy.codec

    with Cluster(NODES, tmp_path) as cluster:
        assert cluster.run(cell) == dict.fromkeys(NODES, "topk")


def test_nodes_that_keep_another_number_do_not_train_together(tmp_path: Path) -> None:
    with Cluster(["a", "b"], tmp_path) as cluster:
        results = cluster.run(lambda node: nc.DiLoCo(wide(), codec=["topk", "topk-256"][node.rank()]) and None)
    refused = "'b' has codec=topk-256, 'a' (rank 0) has codec=topk: use the same on every node"
    assert str(results["b"]) == refused
