"""The step of a large model: only its hash is known until COMMIT, which writes where the state is, if nobody else has
it."""

import itertools

import numpy as np
import pytest

from notebook_cluster.codecs import get_codec
from notebook_cluster.protocol.rounds import Arrived, Behind, CatchUp, Member, Prepared, Seal, Slice, Void
from notebook_cluster.protocol.runs import Joined, Register, Registered
from notebook_cluster.rounds.member import events_effects as m
from notebook_cluster.rounds.member import joining, next_state
from notebook_cluster.rounds.member import machine as member
from notebook_cluster.rounds.member.state import MemberSettings, most_kept
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import converted
from notebook_cluster.rounds.numerics.outer import float_bits, outer_step, state_hash
from tests.test_member import (
    BASE,
    OUTER,
    THETA,
    ZEROS,
    Node,
    after_round,
    chunks,
    commit,
    frame,
    messages,
    of,
    prepared_node,
    seal,
)

BUFFERS = 37


def noise(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def stepped(
    codec: str,
    parameters: int,
    *,
    in_place_from: int,
    over_senders: bool = False,
    mu: float = 0.9,
    count: int = 1,
    momentum_dtype: str = "float32",
):
    """A node that owns nothing, PREPARED for round 1 of two nodes, and its state before."""
    fragments = Fragments(codec, parameters, BUFFERS, count, over_senders=over_senders, momentum_dtype=momentum_dtype)
    wire, size, part = fragments.wire(1), fragments.size, fragments.wire(1).count
    theta, momentum = noise(size, 1), converted(noise(size, 2), momentum_dtype, size)
    register = Register(
        job="model", cell=1, strategy="DiLoCo", codec=codec, schema_hash="s", schema=[], parameters=parameters,
        every="100 steps", state_hash=state_hash(theta, momentum),
    )  # fmt: skip
    node = Node(in_place_from=in_place_from)
    node.feed(m.BeginRun(register, fragments, theta, momentum))
    node.control(Registered(job="model", round=0, state_hash=register.state_hash, source=None))
    node.feed(m.Boundary(wire.encode(noise(part, 3)), 1.0, 10))
    cut = [0, wire.blocks // 3, wire.blocks - 1, wire.blocks]
    slices = [Slice(owner="b", start=start, stop=stop) for start, stop in itertools.pairwise(cut)]
    weight = float_bits(0.5)
    members = [Member(name=name, incarnation=1, weight_bits=weight, contribution=1) for name in "ab"]
    outer = type(OUTER)(lr_bits=float_bits(0.5), momentum_bits=float_bits(mu))
    node.control(
        Seal(job="model", round=1, attempt=1, base_hash=register.state_hash, outer=outer, members=members,
             slices=slices)
    )  # fmt: skip
    for index in (2, 0, 1):
        start, stop = wire.byte_range(slices[index].start, slices[index].stop)
        sent = [memoryview(wire.encode(noise(part, seed)))[start:stop] for seed in (3, 4)]
        data = bytes(sent[0])
        if fragments.all_gather:
            data = np.array([0.5, 0.5], "<f4").tobytes() + b"".join(map(bytes, sent))
        node.feed(mean_frame(index, data))
    return node, theta, momentum


def mean_frame(index: int, data: bytes) -> m.Frame:
    return frame("b", "mean", index, data)


def stepped_by_hand(
    fragments: Fragments, theta: np.ndarray, momentum: np.ndarray, mu: float
) -> tuple[np.ndarray, np.ndarray]:
    """(theta, momentum) after the round of :func:`stepped`, as copies of the whole, in which a fragment differs."""
    wire, fragment = fragments.wire(1), fragments.of_round(1)
    before = fragments.take(theta, fragment), fragments.take(momentum, fragment)
    ours, theirs = (wire.decode(wire.encode(noise(wire.count, seed))) for seed in (3, 4))
    mean = np.float32(0.5) * ours + np.float32(0.5) * theirs if fragments.all_gather else ours.copy()  # as sent there
    after = theta.copy(), momentum.copy()
    for whole, elements in zip(after, outer_step(*before, mean, 0.5, mu, OUTER.nesterov, wire.buffers), strict=True):
        fragments.put(whole, fragment, elements)
    return after


CASES = [
    ("float32", False, 0.9), ("float32", False, 0.0), ("int8", False, 0.9), ("int4", False, 0.9), ("bf16", False, 0.9),
    ("sparse", True, 0.0), ("topk-256", False, 0.0), ("randomk", False, 0.0), ("float32", False, 0.9, 3),
    ("int8", False, 0.9, 3), ("topk-256", False, 0.0, 2),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_state_is_the_one_that_is_computed_aside_bit_for_bit(case: tuple) -> None:
    codec, over_senders, mu, count = (*case, 1)[:4]
    parameters = 5 * next_state._GROUP + 3 * get_codec(codec).block + 11
    how = {"over_senders": over_senders, "mu": mu, "count": count}
    aside, theta, momentum = stepped(codec, parameters, in_place_from=1 << 30, **how)
    (expected,) = messages(aside.effects, Prepared)
    if count > 1:  # never aside as a whole
        assert expected.state_hash == state_hash(*stepped_by_hand(aside.state.fragments, theta, momentum, mu))
    for alone in (False, True):
        node, theta, momentum = stepped(codec, parameters, in_place_from=0, **how)
        (prepared,) = messages(node.effects, Prepared)
        assert prepared == expected
        assert (node.state.exchange.theta is None) == (count == 1)
        before = theta.copy(), momentum.copy()
        (applied,) = of(node.feed(m.FromLeader(commit(prepared.state_hash), alone)), m.Apply)
        assert (node.state.theta is theta, node.state.momentum is momentum) == (alone, alone)
        if not alone:
            assert np.array_equal(theta, before[0])
            assert np.array_equal(momentum, before[1])
        assert state_hash(applied.theta, applied.momentum) == prepared.state_hash == node.state.state_hash


def test_a_model_of_gradients_or_with_one_optimizer_for_all_is_not_stepped_in_place() -> None:
    state = member.new_member("model", "a", 1, MemberSettings(in_place_from=0))
    for fragments in (Fragments("int8", 4096, 0, gradients=True), Fragments("int8", 4096, central_optimizer=True)):
        state.fragments = fragments
        assert not next_state.is_large(state)
    state.fragments = Fragments("int8", 4096)
    assert next_state.is_large(state)


def test_a_small_model_in_fragments_has_no_second_state_beside_it() -> None:
    node, theta, momentum = stepped("int8", 4096, in_place_from=MemberSettings().in_place_from, count=3)
    exchange = node.state.exchange
    part = node.state.fragments.wire(1).count
    assert exchange.in_place
    assert (exchange.theta.size, exchange.momentum.size) == (part, part)
    assert part < theta.size == momentum.size


@pytest.mark.parametrize("alone", [False, True])
def test_a_mean_that_changed_after_prepared_is_no_state_and_the_whole_one_is_fetched(alone: bool) -> None:
    node = prepared_node(in_place_from=0)
    (prepared,) = messages(node.effects, Prepared)
    exchange = node.state.exchange
    spoiled = bytearray(exchange.means[1])
    spoiled[8] ^= 1
    exchange.means[1] = memoryview(bytes(spoiled))
    effects = node.feed(m.FromLeader(commit(prepared.state_hash), alone))
    assert not of(effects, m.Apply)
    assert "has changed" in of(effects, m.Log)[0].text
    (arrived,) = messages(effects, Arrived)
    assert arrived.round == 1
    assert arrived.base_hash not in (BASE, prepared.state_hash)
    assert not node.state.holds  # it serves nobody
    theta, momentum = after_round("a", "b")
    behind = Behind(
        job="model", round=1, state_hash=prepared.state_hash, source="b", source_incarnation=1, contribution=1
    )  # the coordinator does not know of what state this node speaks, nor what is in it
    (fetch,) = of(node.control(behind), m.FetchState)
    assert (fetch.source, fetch.round) == ("b", 1)
    effects = node.feed(m.StateFetched(1, theta, momentum, prepared.state_hash))
    assert messages(effects, Joined)
    assert of(effects, m.Apply)[0].counted
    assert node.state.holds


def damaged_as_it_took_a_commit():
    """A node with a state that is neither the one before nor the next; what it was PREPARED for, and with what."""
    node = prepared_node(in_place_from=0)
    (prepared,) = messages(node.effects, Prepared)
    exchange = node.state.exchange
    exchange.digests = (exchange.digests[0][::-1], *exchange.digests[1:])
    node.feed(m.FromLeader(commit(prepared.state_hash), True))
    return node, prepared, exchange


def test_work_of_a_round_that_could_not_be_taken_and_is_void_is_in_a_later_one() -> None:
    node, _, _ = damaged_as_it_took_a_commit()
    node.control(Void(job="model", round=1, state_hash=BASE))
    node.control(Behind(job="model", round=0, state_hash=BASE, source="b", source_incarnation=1, contribution=1))
    effects = node.feed(m.StateFetched(0, THETA, ZEROS, BASE))
    assert of(effects, m.Rebase)
    (arrived,) = messages(effects, Arrived)
    assert (arrived.round, arrived.samples > 0) == (1, True)


def test_the_mean_of_a_late_round_does_not_repair_a_state_that_is_neither() -> None:
    """Means of missed rounds are added to a state; of one that was left in the middle they make nothing."""
    node, prepared, exchange = damaged_as_it_took_a_commit()
    missed = CatchUp(
        round=1, attempt=1, slices=exchange.seal.slices, outer=OUTER, senders=2, state_hash=prepared.state_hash
    )  # fmt: skip
    effects = node.control(
        Behind(
            job="model", round=1, state_hash=prepared.state_hash, source="b", source_incarnation=1, contribution=1,
            missed=[missed],
        )
    )  # fmt: skip
    assert of(effects, m.FetchState)
    assert not chunks(effects, "want")


def test_a_seal_of_another_attempt_makes_the_hash_anew() -> None:
    node = prepared_node(in_place_from=0)
    node.control(seal("a", attempt=2, owners="aa"))
    prepared = messages(node.effects, Prepared)[-1]
    assert prepared.attempt == 2
    assert np.array_equal(node.state.theta, THETA)
    assert np.array_equal(node.state.momentum, ZEROS)
    node.feed(m.FromLeader(commit(prepared.state_hash, "a", attempt=2)))
    assert np.array_equal(node.state.theta, after_round("a")[0])


@pytest.mark.parametrize(("codec", "kept"), [("float32", 0), ("int8", 1), ("int4", 2)])
def test_of_a_large_model_a_mean_is_kept_for_late_nodes_where_it_is_small(codec: str, kept: int) -> None:
    fragments = Fragments(codec, 100_000_000)
    assert most_kept(MemberSettings(), fragments) // fragments.wire(1).size == kept


def test_who_leaves_gives_the_means_back() -> None:
    node = prepared_node()
    node.control(commit(messages(node.effects, Prepared)[0].state_hash))
    assert len(node.state.kept) == 1
    node.state.settings = MemberSettings(kept_anyway=100)
    node.feed(m.LeaveRounds("interrupted"))
    assert not node.state.kept


@pytest.mark.parametrize("alone", [False, True])
def test_without_memory_at_commit_the_node_asks_for_the_state(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be PREPARED for ever otherwise. What was not written to is held and served still."""
    node = prepared_node(in_place_from=0)
    (prepared,) = messages(node.effects, Prepared)

    def none(*arguments: object, **options: object) -> None:
        raise MemoryError("none left")

    if alone:
        monkeypatch.setattr(next_state, "outer_step", none)
    else:
        monkeypatch.setattr(vectors, "copy", none)
    effects = node.feed(m.FromLeader(commit(prepared.state_hash), alone))
    assert "MemoryError: none left" in of(effects, m.Log)[0].text
    (arrived,) = messages(effects, Arrived)
    assert node.state.holds == (not alone)
    assert (arrived.base_hash == BASE) == (not alone)
    monkeypatch.undo()
    behind = Behind(
        job="model", round=1, state_hash=prepared.state_hash, source="b", source_incarnation=1, counted=True,
        contribution=1,
    )  # fmt: skip
    assert of(node.control(behind), m.FetchState)
    node.feed(m.StateFetched(1, *after_round("a", "b"), prepared.state_hash))
    assert (node.state.round, node.state.holds, node.state.state_hash) == (1, True, prepared.state_hash)


def test_means_are_asked_for_only_where_others_keep_them() -> None:
    def asks(codec: str, parameters: int, rounds: int) -> bool:
        state = member.new_member("model", "a", 1)
        state.fragments, state.holds = Fragments(codec, parameters), True
        slices = [Slice(owner="b", start=0, stop=state.fragments.wire(1).blocks)]
        missed = tuple(
            CatchUp(round=number, attempt=1, slices=slices, outer=OUTER, senders=2, state_hash="")
            for number in range(1, rounds + 1)
        )
        return joining._is_shorter(state, missed)

    assert asks("float32", 1_000_000, 1)
    assert not asks("float32", 30_000_000, 1)
    assert asks("int8", 100_000_000, 1)
    assert not asks("int8", 100_000_000, 2)
    assert asks("int8", 10_000, 4)
    assert not asks("int8", 10_000, 5)
