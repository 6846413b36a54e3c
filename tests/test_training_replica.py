"""What a node adds to a round and what a round does to its model, without a cluster."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster.codecs import Vector, WireFormat
from notebook_cluster.rounds.member.events_effects import Apply, Boundary
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.loop import encoding
from notebook_cluster.training.loop.encoding import encoded, left_by
from notebook_cluster.training.loop.reference import Reference
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models.torch_parameters import TorchParameters


def replica_of(model: nn.Module, codec: str = "float32", mix: float | None = None) -> Replica:
    parameters = TorchParameters(model)
    layout = parameters.layout
    replica = Replica(parameters, Fragments(codec, layout.size - layout.buffers, layout.buffers), mix=mix)
    theta = parameters.read()
    replica.start(0, theta, np.zeros_like(theta), "start")
    return replica


def apply(replica: Replica, round: int, theta: Vector, momentum: Vector, state_hash: str) -> None:
    """COMMIT of a round that counted this node's work."""
    replica.apply(Apply(round, theta, momentum, state_hash, ("a",), True, False, 1, 0))


def work(replica: Replica, change: Vector, samples: float = 1.0) -> None:
    """One inner step that adds ``change`` to the parameters."""
    replica.keep_local()
    replica.parameters.load(replica.parameters.read() + change)
    replica.count(samples)


def model(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(20, 30)


def noise(size: int, seed: int, scale: float = 0.01) -> Vector:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def test_the_contribution_is_old_minus_new() -> None:
    replica = replica_of(model())
    theta = replica.theta
    work(replica, noise(630, 1), samples=4)
    work(replica, noise(630, 2), samples=3)
    boundary = replica.contribution(finishing=False)
    expected = theta - replica.parameters.read()
    np.testing.assert_array_equal(np.frombuffer(boundary.encoded, np.float32), expected)
    assert (boundary.samples, boundary.steps, boundary.finite) == (7, 2, True)
    assert boundary.norm == pytest.approx(float(np.linalg.norm(expected)))


def test_a_commit_loads_theta_and_clears_the_counters() -> None:
    replica = replica_of(model())
    work(replica, noise(630, 1))
    replica.contribution(finishing=False)
    theta = noise(630, 5)
    apply(replica, 1, theta, theta, "one")
    np.testing.assert_array_equal(replica.parameters.read(), theta)
    assert (replica.steps, replica.samples, replica.round, replica.outstanding) == (0, 0, 1, False)


@pytest.mark.parametrize("codec", ["int8", "fp16"])
def test_error_feedback_is_what_the_codec_lost_and_moves_at_commit_only(codec: str) -> None:
    replica = replica_of(model(), codec)
    wire = replica.fragments.wires[0]
    first = noise(630, 1)
    work(replica, first)
    sent = replica.theta - replica.parameters.read()
    lost = sent - wire.decode(wire.encode(sent))
    replica.contribution(finishing=False)
    theta = noise(630, 5)
    apply(replica, 1, theta, theta, "one")
    work(replica, noise(630, 2))
    boundary = replica.contribution(finishing=False)
    expected = (theta - replica.parameters.read()) + lost
    assert bytes(boundary.encoded) == bytes(wire.encode(expected))


def test_error_feedback_stays_when_the_round_did_not_count_it() -> None:
    replica = replica_of(model(), "int8")
    work(replica, noise(630, 1))
    before = bytes(replica.contribution(finishing=False).encoded)
    theta = replica.theta + noise(630, 9)
    replica.rebase(1, theta, theta, "one")
    assert replica.outstanding
    np.testing.assert_allclose(theta - replica.parameters.read(), -noise(630, 1), atol=1e-6)
    replica.start(1, theta, theta, "one")
    assert not replica.outstanding
    again = replica.fragments.wires[0].decode(replica.contribution(finishing=False).encoded)
    np.testing.assert_allclose(again, replica.fragments.wires[0].decode(before), atol=2e-4)


def test_a_late_node_keeps_its_work() -> None:
    replica = replica_of(model())
    work(replica, noise(630, 1))
    theta = replica.theta + noise(630, 9)
    replica.rebase(1, theta, theta, "one")
    np.testing.assert_allclose(replica.parameters.read() - theta, noise(630, 1), atol=1e-6)
    assert replica.steps == 1


def test_steps_after_an_interrupted_wait_are_not_lost_and_not_counted_twice() -> None:
    replica = replica_of(model())
    work(replica, noise(630, 1), samples=4)
    replica.contribution(finishing=False)
    work(replica, noise(630, 2), samples=3)
    theta = noise(630, 7)
    apply(replica, 1, theta, theta, "one")
    assert (replica.steps, replica.samples) == (1, 3)
    np.testing.assert_allclose(replica.parameters.read() - theta, noise(630, 2), atol=1e-6)
    boundary = replica.contribution(finishing=True)
    np.testing.assert_allclose(np.frombuffer(boundary.encoded, np.float32), -noise(630, 2), atol=1e-6)


def test_rebase_then_commit_after_more_steps_keeps_only_those() -> None:
    replica = replica_of(model())
    work(replica, noise(630, 1))
    replica.contribution(finishing=False)
    work(replica, noise(630, 2))
    moved = replica.theta + noise(630, 8)
    replica.rebase(1, moved, moved, "one")
    theta = noise(630, 7)
    apply(replica, 2, theta, theta, "two")
    np.testing.assert_allclose(replica.parameters.read() - theta, noise(630, 2), atol=1e-6)


def test_refused_work_is_dropped() -> None:
    replica = replica_of(model(), "int8")
    work(replica, noise(630, 1))
    replica.contribution(finishing=False)
    replica.discard()
    np.testing.assert_array_equal(replica.parameters.read(), replica.theta)
    assert (replica.steps, replica.samples, replica.outstanding) == (0, 0, False)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", ["float32", "fp16", "int8", "topk", "randomk"])
def test_a_contribution_that_is_not_finite_is_told_and_not_sent(value: float, codec: str) -> None:
    replica = replica_of(model(), codec)
    change = noise(630, 1)
    change[17] = value
    work(replica, change)
    boundary = replica.contribution(finishing=False)
    assert not boundary.finite
    assert len(boundary.encoded) == 0


def test_no_samples_means_receiving_only() -> None:
    replica = replica_of(model())
    boundary = replica.contribution(finishing=True)
    assert (boundary.samples, boundary.steps, boundary.finishing) == (0, 0, True)
    assert not replica.outstanding


def test_in_low_precision_the_difference_is_taken_from_the_value_that_was_loaded() -> None:
    replica = replica_of(model().to(torch.bfloat16))
    theta = noise(630, 3)
    replica.start(1, theta, theta, "one")
    replica.count(1)
    boundary = replica.contribution(finishing=False)
    assert not np.frombuffer(boundary.encoded, np.float32).any()


def test_low_precision_work_survives_a_rebase() -> None:
    replica = replica_of(model().to(torch.bfloat16))
    start = replica.parameters.read()
    work(replica, np.full(630, 0.25, np.float32))
    done = start - replica.parameters.read()
    theta = replica.theta + noise(630, 8, scale=1e-4)
    replica.rebase(1, theta, theta, "one")
    boundary = replica.contribution(finishing=False)
    np.testing.assert_allclose(np.frombuffer(boundary.encoded, np.float32), done, atol=1e-6)


def test_what_no_step_was_told_of_is_noticed_and_running_statistics_are_none_of_it() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
    replica = replica_of(net)
    net(torch.randn(8, 4, dtype=torch.bfloat16))
    assert not replica.was_changed()
    with torch.no_grad():
        net[0].weight[0, 0] += 1
    assert replica.was_changed()
    replica.count(1.0)
    assert not replica.was_changed()  # a round will have it
    replica.contribution(finishing=False)
    apply(replica, 1, replica.theta, replica.momentum, "next")
    assert not replica.was_changed()
    with torch.no_grad():
        net[1].bias[0] = torch.nan
    assert replica.was_changed()


def test_running_statistics_are_never_quantised() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    replica = replica_of(network, "int8")
    network(torch.randn(16, 4))
    replica.count(16)
    expected = (replica.theta - replica.parameters.read())[-6:]
    decoded = replica.fragments.wires[0].decode(replica.contribution(finishing=False).encoded)
    np.testing.assert_array_equal(decoded[-6:], expected)


def test_registering_again_on_the_same_state_keeps_work_on_another_state_after_an_open_round_drops_it() -> None:
    replica = replica_of(model())
    work(replica, noise(630, 1))
    replica.contribution(finishing=False)
    local = replica.parameters.read()
    replica.start(0, replica.theta, replica.momentum, "start")
    np.testing.assert_array_equal(replica.parameters.read(), local)
    assert replica.steps == 1
    replica.contribution(finishing=False)
    theta = noise(630, 4)
    replica.start(1, theta, theta, "one")
    np.testing.assert_array_equal(replica.parameters.read(), theta)
    assert replica.steps == 0


# ---- error feedback that is computed when the round is applied -------------------------------------------------


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4", "e3m0", "topk", "topk-256", "randomk", "sparse"])
@pytest.mark.parametrize("fed_back", [False, True])
def test_what_is_left_is_the_same_bits_whenever_it_is_computed(codec: str, fed_back: bool) -> None:
    wire = WireFormat(codec, 300_000, 777).drawn(5)
    reference, local, before = (noise(wire.count, seed, 1.0) for seed in range(3))
    feedback, beta = before if fed_back else None, np.float32(0.95)
    data, left, norm = encoded(wire, reference.__getitem__, local.__getitem__, feedback, beta)
    assert left is not None
    later, none, same = encoded(wire, reference.__getitem__, local.__getitem__, feedback, beta, keep_left=False)
    assert (bytes(later), none, same) == (bytes(data), None, norm)
    out = before if fed_back else np.empty_like(before)
    left_by(wire, later, reference.__getitem__, local.__getitem__, feedback, beta, out)
    np.testing.assert_array_equal(out.view(np.uint32), left.view(np.uint32))


@pytest.mark.parametrize("how", ["applied", "kept", "rebased", "given way"])
def test_feedback_is_that_of_the_boundary_whatever_happens_to_the_round(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to a replica that keeps the model as it was at the boundary, and so computes it at once."""
    monkeypatch.setattr(encoding, "LATER_FROM", 0)
    pair = [replica_of(model(), "int8") for _ in range(2)]
    contributions = []
    for number in range(4):
        for replica, stays in zip(pair, (True, False), strict=True):
            work(replica, noise(replica.theta.size, number))
            boundary = replica._contribution(finishing=False, stays=stays)()
            if stays:
                assert replica._sent.feedback is None
            contributions.append(bytes(boundary.encoded))
            theta = replica.theta + noise(replica.theta.size, 10 + number)
            if how == "kept":
                work(replica, noise(replica.theta.size, 20 + number))
            elif how == "rebased":
                replica.rebase(replica.round + 1, theta, replica.momentum, f"between {number}")
                theta = theta + noise(theta.size, 30 + number)
            elif how == "given way" and stays:
                replica.give_way()
                replica.theta[:] = theta
                theta = replica.theta
            apply(replica, replica.round + 1, theta, replica.momentum, f"after {number}")
        assert contributions[-1] == contributions[-2]
        np.testing.assert_array_equal(pair[0]._feedback[0], pair[1]._feedback[0])
        np.testing.assert_array_equal(pair[0].parameters.read(), pair[1].parameters.read())


@pytest.mark.parametrize("needs", ["steps", "mix", "not counted", "nothing"])
def test_what_a_replica_still_needs_is_not_written_to(needs: str) -> None:
    replica = replica_of(model(), mix=0.5 if needs == "mix" else None)
    work(replica, noise(replica.theta.size, 1))
    replica.contribution(finishing=False)
    if needs == "steps":
        work(replica, noise(replica.theta.size, 2))
    found = replica.references(replica, "theta", needs != "not counted")
    assert found == (2 if needs == "nothing" else None)


def test_parts_are_what_is_read_whatever_the_tensors() -> None:
    module = nn.ModuleDict({"a": nn.Linear(7, 3), "b": nn.BatchNorm1d(5), "c": nn.Linear(3, 70_000).bfloat16()})
    module["a"].weight.data = torch.randn(7, 3).t()  # not contiguous
    module.register_parameter("empty", nn.Parameter(torch.empty(0)))
    parameters = TorchParameters(module)
    whole, parts = parameters.read(), parameters.parts()
    for start, stop in [(0, whole.size), (5, 30), (0, 1), (whole.size - 3, whole.size), (20, 70_100)]:
        np.testing.assert_array_equal(parts(slice(start, stop)), whole[start:stop])


class KeptReference(Reference):
    """Reads all that was loaded from the model."""

    def loaded(self, theta: Vector, work: dict[int, Vector | None]) -> None:
        super().loaded(theta, work)
        for fragment, left in work.items():
            held = self.in_model(fragment)
            self.with_work[fragment] = held if left is None else held + left


def half_model() -> nn.ParameterList:
    return nn.ParameterList([
        torch.linspace(-1, 1, size).to(dtype)
        for size, dtype in ((700, torch.bfloat16), (90_000, torch.float16), (300, torch.float32))
    ])  # fmt: skip


@pytest.mark.parametrize("mix", [None, 0.5])
@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("count", [1, 3])
def test_what_a_smaller_dtype_holds_is_computed_as_it_would_be_read(count: int, codec: str, mix: float | None) -> None:
    pair = []
    for kind in (Reference, KeptReference):
        parameters = TorchParameters(half_model())
        fragments = Fragments(codec, parameters.layout.size, 0, count)
        replica = Replica(parameters, fragments, mix=mix)
        replica._reference = kind(parameters, fragments)
        pair.append(replica)
    size = parameters.layout.size

    def on_both(call: Callable[[Replica], Boundary | None]) -> None:
        made = [call(replica) for replica in pair]
        if made[0] is not None and made[1] is not None:
            assert bytes(made[0].encoded) == bytes(made[1].encoded)
            assert made[0].norm == made[1].norm
        one, other = pair
        np.testing.assert_array_equal(one.parameters.read(), other.parameters.read())
        for fragment in range(count):
            elements = slice(0, min(fragments.wires[fragment].count, 60_000))
            np.testing.assert_array_equal(
                *(replica._reference.parts(fragment)(elements) for replica in pair), err_msg=str(fragment)
            )
            np.testing.assert_array_equal(one._feedback[fragment], other._feedback[fragment])

    thetas = {1: noise(size, 1, 0.3)}

    def state(number: int) -> tuple[int, Vector, Vector, str]:
        for round in range(max(thetas) + 1, number + 1):
            thetas[round] = thetas[round - 1].copy()
            fragment = fragments.of_round(round)
            fragments.put(thetas[round], fragment, noise(fragments.wires[fragment].count, round, 0.3))
        return number, thetas[number], np.zeros(size, np.float32), f"state {number}"

    def commit(replica: Replica, number: int, counted: bool = True) -> None:
        round, *rest = state(number)
        replica.apply(Apply(round, *rest, ("a",), counted, False, 1, 0))

    on_both(lambda replica: replica.start(*state(1)))
    for number in range(2, 6):
        on_both(lambda replica, number=number: work(replica, noise(size, 50 + number)))
        on_both(lambda replica: replica.contribution(finishing=False))
        on_both(lambda replica, number=number: commit(replica, number))
        assert not pair[0]._reference.with_work or count > 1 or mix is not None
    for number in range(6, 20, 2):
        on_both(lambda replica, number=number: work(replica, noise(size, 50 + number)))
        on_both(lambda replica: replica.contribution_of_now(finishing=False)())
        on_both(lambda replica, number=number: work(replica, noise(size, 90 + number)))
        if number % 3 == 0:
            on_both(lambda replica, number=number: replica.rebase(*state(number)))
        on_both(lambda replica, number=number: commit(replica, number + 1, counted=number % 4 == 0))
        if number % 5 == 0:
            on_both(lambda replica: replica.release())
    assert pair[0]._reference.with_work or mix is not None
    on_both(lambda replica: replica.start(*state(30)))
    on_both(lambda replica: replica.settle())
    assert not pair[0]._reference.with_work
    assert not any(replica.was_changed() for replica in pair)
    pair[0].parameters.load(pair[0].parameters.read() + np.float32(0.01))
    assert pair[0].was_changed()
