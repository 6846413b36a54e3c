"""One node's state machine: what it does with repeated, late, newer and impossible messages and frames."""

import numpy as np
import pytest
from msgspec import structs

from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import (
    Arrived,
    Behind,
    Commit,
    Finished,
    LeftRounds,
    Member,
    OuterSettings,
    Prepared,
    Refused,
    RoundQuery,
    RoundStatus,
    Seal,
    Slice,
    Stalled,
    Void,
)
from notebook_cluster.protocol.runs import Joined, Register, Registered, RegisterRefused
from notebook_cluster.rounds.member import events_effects as m
from notebook_cluster.rounds.member import machine as member
from notebook_cluster.rounds.member.chunks import to_send
from notebook_cluster.rounds.member.state import KeptMean, MemberSettings
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import float_bits
from tests import oracle

WHOLE = Fragments("float32", 512)
OUTER = OuterSettings(lr_bits=float_bits(0.5), momentum_bits=float_bits(0.9))


def vector(seed):
    return np.random.default_rng(seed).standard_normal(512, np.float32)


THETA, ZEROS = vector(100), np.zeros(512, np.float32)
BASE = oracle.digest(THETA, ZEROS)
WORK = {"a": vector(1), "b": vector(2), "c": vector(3)}


class Node:
    """The machine of one node, with what it asked for so far."""

    def __init__(self, name="a", **settings):
        self.state = member.new_member("model", name, 1, MemberSettings(**settings))
        self.effects = []

    def feed(self, *events):
        """The effects of these events only."""
        new = []
        for event in events:
            self.state, effects = member.apply(self.state, event)
            new += effects
        self.effects += new
        return new

    def control(self, *messages):
        return self.feed(*(m.FromLeader(message) for message in messages))

    def ready(self):
        register = Register(
            job="model", cell=1, strategy="DiLoCo", codec="float32", schema_hash="s", schema=[], parameters=512,
            every="100 steps", state_hash=BASE,
        )  # fmt: skip
        self.feed(m.BeginRun(register, WHOLE, THETA, ZEROS))
        self.control(Registered(job="model", round=0, state_hash=BASE, source=None))
        return self

    def arrive(self, samples=1.0, **fields):
        return self.feed(m.Boundary(bytes(WORK[self.state.node]), samples, 10, **fields))


def messages(effects, kind):
    return [e.message for e in effects if isinstance(e, m.SendControl) and isinstance(e.message, kind)]


def chunks(effects, kind, node=None):
    return [e for e in effects if isinstance(e, m.SendChunk) and e.header.kind == kind and node in (None, e.node)]


def of(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def seal(members="ab", attempt=1, number=1, base=BASE, owners="ab", last=False):
    weights = {name: float_bits(1 / len(members)) for name in members}
    cut = [0, 1, 2] if len(owners) == 2 else [0, 2]
    return Seal(
        job="model", round=number, attempt=attempt, base_hash=base, outer=OUTER, last=last,
        members=[Member(name=n, incarnation=1, weight_bits=weights[n], contribution=1) for n in members],
        slices=[Slice(owner=owner, start=cut[i], stop=cut[i + 1]) for i, owner in enumerate(owners)],
    )  # fmt: skip


def frame(sender, kind, index, data, attempt=1, number=1, offset=0, total=None, incarnation=1):
    header = JobFrame(
        job="model", incarnation=incarnation, kind=kind, round=number, attempt=attempt, slice=index, offset=offset,
        total=len(data) if total is None else total,
    )  # fmt: skip
    return m.Frame(sender, header, data)


def part(name, index):
    return bytes(WORK[name][256 * index : 256 * index + 256])


def mean_of(*names):
    return oracle.mean([WORK[name] for name in names], [np.float32(1 / len(names))] * len(names))


def prepared_node(**settings):
    """Node a, PREPARED for round 1 with b."""
    node = Node(**settings).ready()
    node.arrive()
    node.control(seal())
    mean = mean_of("a", "b")
    node.feed(frame("b", "contribution", 0, part("b", 0)), frame("b", "mean", 1, bytes(mean[256:])))
    return node


def after_round(*names):
    return oracle.diloco(THETA, ZEROS, mean_of(*names), 0.5, 0.9, True)


def commit(state_hash, members=("a", "b"), attempt=1, last=False, number=1):
    return Commit(
        job="model", round=number, attempt=attempt, state_hash=state_hash, members=list(members), last=last
    )  # fmt: skip


# ---- one round -----------------------------------------------------------------------------------------------


def test_a_boundary_says_arrived_on_the_state_it_holds():
    (arrived,) = messages(Node().ready().arrive(samples=8.0), Arrived)
    assert (arrived.round, arrived.base_hash, arrived.samples) == (1, BASE, 8.0)


def test_a_seal_sends_each_owner_its_slice_and_an_owner_sends_the_mean_of_its_own():
    node = Node().ready()
    node.arrive()
    sent = node.control(seal())
    (own,) = chunks(sent, "contribution")
    assert (own.node, own.header.slice, bytes(own.payload)) == ("b", 1, part("a", 1))
    sent = node.feed(frame("b", "contribution", 0, part("b", 0)))
    (mean,) = chunks(sent, "mean")
    assert (mean.node, bytes(mean.payload)) == ("b", bytes(mean_of("a", "b")[:256]))


def test_owners_get_their_slices_in_turn_first_the_one_behind_in_rank():
    cut = [("a", 0, 1), ("a", 1, 2), ("b", 2, 3), ("b", 3, 4), ("c", 4, 5), ("c", 5, 6)]
    whole = structs.replace(
        seal("abc"), slices=[Slice(owner=owner, start=start, stop=stop) for owner, start, stop in cut]
    )
    assert to_send(whole, "a") == [2, 4, 3, 5]
    assert to_send(whole, "b") == [4, 0, 5, 1]
    assert to_send(whole, "c") == [0, 2, 1, 3]
    uneven = structs.replace(whole, slices=whole.slices[:3])
    assert to_send(uneven, "c") == [0, 2, 1]


def test_prepared_applies_nothing_and_commit_swaps_in_the_oracles_state():
    node = prepared_node()
    theta, momentum = after_round("a", "b")
    (prepared,) = messages(node.effects, Prepared)
    assert prepared.state_hash == oracle.digest(theta, momentum)
    assert node.state.round == 0
    assert node.state.theta is THETA
    assert not of(node.effects, m.Apply)
    (applied,) = of(node.control(commit(prepared.state_hash)), m.Apply)
    assert applied.counted
    assert np.array_equal(applied.theta, theta)
    assert np.array_equal(applied.momentum, momentum)
    assert (node.state.round, node.state.contribution) == (1, None)


def test_an_older_state_of_the_machine_stays_as_it_was():
    """``apply`` is pure: a snapshot taken before a round is still the state before it."""
    node = Node().ready()
    node.arrive()
    node.control(seal())
    before = node.state
    exchange = before.exchange
    node.feed(frame("b", "contribution", 0, part("b", 0)))
    assert before.exchange is exchange
    assert not exchange.means
    assert len(exchange.contributions) == 1


def test_alone_a_node_needs_no_network():
    node = Node().ready()
    node.arrive()
    sent = node.control(seal("a", owners="a"))
    assert not of(sent, m.SendChunk)
    (prepared,) = messages(sent, Prepared)
    assert prepared.state_hash == oracle.digest(*after_round("a"))


def test_a_receiver_of_weight_0_sends_nothing_and_takes_the_state():
    node = Node("c").ready()
    node.feed(m.Boundary(b"", 0.0, 0, finishing=True))
    both = seal()
    node.control(
        Seal(**{f: getattr(both, f) for f in both.__struct_fields__ if f != "members"}, members=[
            *both.members, Member(name="c", incarnation=1, weight_bits=0, contribution=1)])
    )  # fmt: skip
    mean = mean_of("a", "b")
    sent = node.feed(frame("a", "mean", 0, bytes(mean[:256])), frame("b", "mean", 1, bytes(mean[256:])))
    assert not chunks(node.effects, "contribution")
    (prepared,) = messages(sent, Prepared)
    (applied,) = of(node.control(commit(prepared.state_hash)), m.Apply)
    assert not applied.counted


# ---- frames --------------------------------------------------------------------------------------------------


def test_frames_before_their_seal_are_held_and_used():
    node = Node().ready()
    node.arrive()
    mean = mean_of("a", "b")
    node.feed(frame("b", "mean", 1, bytes(mean[256:])), frame("b", "contribution", 0, part("b", 0)))
    assert messages(node.control(seal()), Prepared)


def test_frames_held_for_a_seal_are_bounded():
    node = Node(held_bytes=1500).ready()
    node.arrive()
    node.feed(*(frame("b", "contribution", 0, part("b", 0), attempt=n) for n in range(1, 5)))
    assert len(node.state.held_frames) == 1
    assert node.state.dropped == 3


def test_a_retry_does_not_take_frames_of_the_aborted_attempt():
    """Trap 4: attempt 1 with b and c is aborted, b's left-over bytes of it come during attempt 2."""
    node = Node().ready()
    node.arrive()
    node.control(seal("abc", owners="a"), seal("ab", owners="a", attempt=2))
    assert not messages(node.feed(frame("b", "contribution", 0, bytes(512 * 4), attempt=1)), Prepared)
    (prepared,) = messages(node.feed(frame("b", "contribution", 0, bytes(WORK["b"]), attempt=2)), Prepared)
    assert prepared.state_hash == oracle.digest(*after_round("a", "b"))


def test_slices_of_a_retry_are_cut_anew_from_the_same_bytes():
    """Trap 3: after c died the slice table is that of the new attempt, with the new owners and weights."""
    node = Node().ready()
    node.arrive()
    node.control(seal("abc", owners="a"))
    sent = node.control(seal("ab", attempt=2, owners="ab"))
    (own,) = chunks(sent, "contribution")
    assert (own.node, own.header.slice, own.header.attempt, bytes(own.payload)) == ("b", 1, 2, part("a", 1))


@pytest.mark.parametrize(
    "bad",
    [
        frame("b", "contribution", 0, part("b", 0), incarnation=7),
        frame("z", "contribution", 0, part("b", 0)),
        frame("b", "contribution", 9, part("b", 0)),
        frame("b", "contribution", -1, part("b", 0)),
        frame("b", "contribution", 1, part("b", 0)),
        frame("b", "contribution", 0, part("b", 0), total=1 << 40),
        frame("b", "contribution", 0, part("b", 0), offset=-4),
        frame("b", "contribution", 0, part("b", 0), offset=1000, total=1024),
        frame("b", "contribution", 0, part("b", 0), number=0),
    ],
)
def test_impossible_frames_are_dropped_and_counted(bad):
    node = Node().ready()
    node.arrive()
    node.control(seal())
    assert node.feed(bad) == []
    assert node.state.dropped == 1


def test_chunks_in_any_order_overlapping_and_twice_make_the_slice():
    node = Node().ready()
    node.arrive()
    node.control(seal("ab", owners="a"))
    data = bytes(WORK["b"])
    for start, stop in [(1500, 2048), (0, 700), (0, 700), (600, 1300), (1200, 1600)]:
        assert not messages(node.effects, Prepared)
        node.feed(frame("b", "contribution", 0, data[start:stop], offset=start, total=2048))
    (prepared,) = messages(node.effects, Prepared)
    assert prepared.state_hash == oracle.digest(*after_round("a", "b"))


def test_everything_twice_changes_nothing_more():
    node = prepared_node()
    (prepared,) = messages(node.effects, Prepared)
    again = node.control(seal())
    assert messages(again, Prepared) == [prepared]
    node.control(commit(prepared.state_hash))
    state = node.state
    assert node.control(commit(prepared.state_hash), seal()) == []
    assert node.state.round == state.round == 1


# ---- asking again --------------------------------------------------------------------------------------------


def test_what_is_missing_is_asked_for_from_its_first_gap():
    node = Node(chunk_bytes=512).ready()
    node.feed(m.Tick(10.0))
    node.arrive()
    node.control(seal())
    node.feed(frame("b", "contribution", 0, part("b", 0)[:512], total=1024))
    assert node.feed(m.Tick(10.4)) == []
    wants = chunks(node.feed(m.Tick(10.5)), "want")
    asked = {(w.node, w.header.name, w.header.slice, w.header.offset) for w in wants}
    assert asked == {("b", "contribution", 0, 512), ("b", "mean", 1, 0)}


def test_after_the_owner_any_other_member_is_asked_for_a_mean():
    node = Node().ready()
    node.arrive()
    node.control(seal("abc", owners="c"))
    asked = []
    for now in range(1, 8):
        asked += [w.node for w in chunks(node.feed(m.Tick(float(now))), "want")]
    assert asked[0] == "c"
    assert "b" in asked


def test_without_progress_the_coordinator_hears_whom_the_node_waits_for():
    node = Node().ready()
    node.arrive()
    node.control(seal("abc", owners="ab"))
    stalled = messages([e for now in range(5) for e in node.feed(m.Tick(now * 1.0))], Stalled)
    assert stalled[0].waiting_for == ["b", "c"]


def test_a_want_is_answered_with_the_rest_of_the_slice():
    node = prepared_node(chunk_bytes=512)
    want = JobFrame(job="model", incarnation=1, kind="want", name="mean", round=1, attempt=1, slice=1, offset=512)
    (sent,) = chunks(node.feed(m.Frame("c", want)), "mean", "c")
    assert (sent.header.offset, bytes(sent.payload)) == (512, bytes(mean_of("a", "b")[256:])[512:])


def test_means_of_the_last_rounds_are_served_after_commit():
    node = prepared_node()
    node.control(commit(messages(node.effects, Prepared)[0].state_hash))
    want = JobFrame(job="model", incarnation=1, kind="want", name="mean", round=1, attempt=1, slice=0)
    assert chunks(node.feed(m.Frame("c", want)), "mean", "c")
    other = JobFrame(job="model", incarnation=1, kind="want", name="mean", round=1, attempt=2, slice=0)
    assert node.feed(m.Frame("c", other)) == []


def want(kind, index, offset=0, ticket=0, sender="b", number=1, attempt=1):
    header = JobFrame(
        job="model", incarnation=1, kind="want", name=kind, round=number, attempt=attempt, slice=index, offset=offset,
        ticket=ticket,
    )  # fmt: skip
    return m.Frame(sender, header)


def sent(kind, index, ticket, sender="b", **fields):
    known = {"job": "model", "incarnation": 1, "round": 1, "attempt": 1}
    header = JobFrame(kind="sent", name=kind, slice=index, ticket=ticket, **{**known, **fields})
    return m.Frame(sender, header)


def test_a_want_for_what_is_on_its_way_does_not_send_it_again():
    """A slow link: everything is in the mesh's queues, and the other node sees nothing of it yet."""
    node = prepared_node(chunk_bytes=512)
    before = node.state.bytes_sent
    for request in (want("contribution", 1), want("mean", 0, offset=512), want("mean", 0, offset=512)):
        (answer,) = of(node.feed(request), m.SendChunk)
        assert (answer.header.kind, answer.header.ticket, len(answer.payload)) == ("sent", 1, 0)
        assert (answer.header.name, answer.header.slice) == (request.header.name, request.header.slice)
    assert node.state.bytes_sent == before


def test_what_had_not_come_before_sent_is_sent_again_once():
    node = prepared_node(chunk_bytes=512)
    (again,) = chunks(node.feed(want("mean", 0, offset=512, ticket=1)), "mean", "b")
    assert (again.header.offset, bytes(again.payload)) == (512, bytes(mean_of("a", "b")[:256])[512:])
    (answer,) = of(node.feed(want("mean", 0, offset=512, ticket=1)), m.SendChunk)
    assert (answer.header.kind, answer.header.ticket) == ("sent", 2)
    assert chunks(node.feed(want("mean", 0, offset=512, ticket=2)), "mean", "b")


def test_after_sent_a_node_asks_at_once_for_what_is_lost_and_for_nothing_else():
    node = Node(chunk_bytes=512).ready()
    node.arrive()
    node.control(seal())
    node.feed(frame("b", "contribution", 0, part("b", 0)[:512], total=1024))
    (again,) = of(node.feed(sent("contribution", 0, 1)), m.SendChunk)
    assert (again.node, again.header.kind, again.header.name) == ("b", "want", "contribution")
    assert (again.header.slice, again.header.offset, again.header.ticket) == (0, 512, 1)
    assert node.feed(sent("contribution", 0, 1)) == []
    node.feed(frame("b", "contribution", 0, part("b", 0)[512:], offset=512, total=1024))
    assert node.feed(sent("contribution", 0, 2)) == []
    asked = chunks(node.feed(m.Tick(1.0), m.Tick(3.0)), "want")
    assert [(w.header.name, w.header.ticket) for w in asked] == [("mean", 0)]


def test_means_that_are_kept_are_not_sent_again_either():
    node = prepared_node()
    node.control(commit(messages(node.effects, Prepared)[0].state_hash))
    assert [e.header.kind for e in node.feed(want("mean", 0))] == ["sent"]
    assert [e.header.kind for e in node.feed(want("mean", 0, ticket=1))] == ["mean"]


@pytest.mark.parametrize(("anyway", "last", "kept"), [(10_000, True, 1), (100, True, 0), (100, False, 0)])
def test_the_means_of_a_large_model_are_not_kept_after_the_last_round(anyway, last, kept):
    node = prepared_node(kept_anyway=anyway)
    node.control(commit(messages(node.effects, Prepared)[0].state_hash, last=last))
    assert (len(node.state.kept), node.state.left) == (kept, last)


def test_what_was_sent_in_rounds_that_nobody_can_ask_for_is_forgotten():
    node = prepared_node(kept_rounds=1)
    (prepared,) = messages(node.effects, Prepared)
    node.control(commit(prepared.state_hash))
    for number in (2, 3):
        node.arrive()
        both = [Member(name=n, incarnation=1, weight_bits=float_bits(0.5), contribution=number) for n in "ab"]
        node.control(structs.replace(seal(number=number, base=node.state.state_hash), members=both))
        mean = mean_of("a", "b")
        new = node.feed(
            frame("b", "contribution", 0, part("b", 0), number=number),
            frame("b", "mean", 1, bytes(mean[256:]), number=number),
        )
        (prepared,) = messages(new, Prepared)
        node.control(commit(prepared.state_hash, number=number))
    assert {key[0] for key in node.state.handed} == {2, 3}


def test_an_owner_that_waits_itself_says_so_and_nobody_else_is_asked():
    owner = Node("c").ready()
    owner.arrive()
    owner.control(seal("abc", owners="c"))
    (answer,) = of(owner.feed(want("mean", 0, sender="a")), m.SendChunk)
    assert (answer.node, answer.header.kind, answer.header.ticket) == ("a", "sent", 0)
    node = Node().ready()
    node.arrive()
    node.control(seal("abc", owners="c"))
    for now in range(1, 12):
        asked = chunks(node.feed(m.Tick(float(now))), "want")
        assert {(w.node, w.header.name) for w in asked} <= {("c", "mean")}
        if asked:
            assert node.feed(m.Frame("c", answer.header)) == []


def test_a_member_that_answers_for_a_silent_owner_is_asked_on():
    node = Node().ready()
    node.arrive()
    node.control(seal("abc", owners="c"))
    asked = []
    for now in range(1, 12):
        wants = chunks(node.feed(m.Tick(float(now))), "want")
        asked += [w.node for w in wants]
        if any(w.node == "b" for w in wants):
            node.feed(sent("mean", 0, 1))
    assert asked[:2] == ["c", "c"]
    assert set(asked[3:]) == {"b"}


@pytest.mark.parametrize(
    "bad",
    [
        sent("mean", 1, 5, sender="z"),
        sent("mean", 1, 5, incarnation=7),
        sent("mean", 9, 5),
        sent("nothing", 1, 5),
        want("mean", 0, ticket=-1),
    ],
)
def test_impossible_answers_and_requests_are_dropped_and_counted(bad):
    node = Node().ready()
    node.arrive()
    node.control(seal())
    assert node.feed(bad) == []
    assert node.state.dropped == 1


def test_a_contribution_that_turns_out_not_finite_is_named():
    node = Node().ready()
    node.arrive()
    node.control(seal("ab", owners="a"))
    broken = WORK["b"].copy()
    broken[400] = np.nan
    (stalled,) = messages(node.feed(frame("b", "contribution", 0, bytes(broken))), Stalled)
    assert stalled.not_finite == ["b"]


# ---- being late, refused, behind -----------------------------------------------------------------------------


def test_a_late_node_arrives_again_with_the_same_bytes_on_the_newer_state():
    """Trap 14: its work was not counted, so nothing of it is spent; error feedback is not touched (no Apply)."""
    node = Node().ready()
    node.arrive()
    theta, momentum = after_round("b", "c")
    digest = oracle.digest(theta, momentum)
    behind = Behind(job="model", round=1, state_hash=digest, source="b", source_incarnation=1)
    (fetch,) = of(node.control(behind), m.FetchState)
    assert (fetch.source, fetch.round) == ("b", 1)
    encoded = node.state.contribution.encoded
    effects = node.feed(m.StateFetched(1, theta, momentum, digest))
    assert not of(effects, m.Apply)
    assert of(effects, m.Rebase)
    assert messages(effects, Joined)[0].round == 1
    (arrived,) = messages(effects, Arrived)
    assert (arrived.round, arrived.base_hash, arrived.contribution) == (2, digest, 1)
    assert node.state.contribution.encoded is encoded


def test_a_node_whose_work_was_counted_without_it_does_not_bring_it_again():
    node = Node().ready()
    node.arrive()
    theta, momentum = after_round("a", "b")
    digest = oracle.digest(theta, momentum)
    node.control(Behind(job="model", round=1, state_hash=digest, source="b", source_incarnation=1, counted=True))
    effects = node.feed(m.StateFetched(1, theta, momentum, digest))
    assert of(effects, m.Apply)[0].counted
    assert not messages(effects, Arrived)
    assert node.state.contribution is None


def test_a_node_that_missed_one_round_takes_its_mean_instead_of_the_whole_state():
    from notebook_cluster.protocol.rounds import CatchUp

    node = Node().ready()
    node.arrive()
    theta, momentum = after_round("b", "c")
    digest, mean = oracle.digest(theta, momentum), bytes(mean_of("b", "c"))
    missed = CatchUp(round=1, attempt=3, slices=[Slice(owner="b", start=0, stop=2)], outer=OUTER, state_hash=digest)
    behind = Behind(job="model", round=1, state_hash=digest, source="b", source_incarnation=1, missed=[missed])
    effects = node.control(behind)
    assert not of(effects, m.FetchState)
    assert [w.node for w in chunks(effects, "want")] == ["b"]
    effects = node.feed(frame("b", "mean", 0, mean, attempt=3))
    assert np.array_equal(of(effects, m.Rebase)[0].theta, theta)
    assert messages(effects, Arrived)[0].base_hash == digest


@pytest.mark.parametrize("mean", [b"", bytes(2048)], ids=["silent", "wrong"])
def test_without_the_right_mean_the_whole_state_is_fetched(mean):
    from notebook_cluster.protocol.rounds import CatchUp

    node = Node().ready()
    node.arrive()
    missed = CatchUp(round=1, attempt=3, slices=[Slice(owner="b", start=0, stop=2)], outer=OUTER, state_hash="h")
    node.control(Behind(job="model", round=1, state_hash="h", source="b", source_incarnation=1, missed=[missed]))
    effects = node.feed(*([frame("b", "mean", 0, mean, attempt=3)] if mean else []), m.Tick(1.0), m.Tick(4.0))
    assert of(effects, m.FetchState)[0].source == "b"
    assert node.state.round == 0


def missed_round(number, source, digest="h"):
    """BEHIND by this one round."""
    from notebook_cluster.protocol.rounds import CatchUp

    slices = [Slice(owner="b", start=0, stop=2)]
    row = CatchUp(round=number, attempt=3, slices=slices, outer=OUTER, state_hash=digest)
    return Behind(
        job="model", round=number, state_hash=digest, source=source, source_incarnation=1, missed=[row], contribution=0
    )  # fmt: skip


def test_who_was_sent_the_state_as_a_whole_comes_on_with_the_means_since_from_the_same_node():
    for source, comes_on in (("b", True), ("c", False)):
        node = Node(kept_rounds=0).ready()  # not even one mean is kept for others
        node.arrive()
        effects = node.control(missed_round(1, "b"))
        assert of(effects, m.FetchState)[0].source == "b"
        node.feed(m.StateFetched(1, THETA, ZEROS, "h"))
        effects = node.control(missed_round(2, source))
        assert bool(of(effects, m.FetchState)) != comes_on
        assert [want.node for want in chunks(effects, "want")] == ["b"] * comes_on


def test_the_means_since_a_state_that_is_being_sent_are_kept_while_they_are_less_than_that():
    node = prepared_node(kept_rounds=1)

    def kept(size):
        means = tuple(KeptMean(number, 1, (), size) for number in range(4, 10))
        return [mean.round for mean in member._bounded(node.state, means)]

    assert kept(100) == [9]
    node.feed(m.Served("late", 5), m.Served("later", 7))
    assert kept(100) == kept(1000) == [6, 7, 8, 9]
    node.feed(m.Served("later", -1))
    assert kept(100) == [6, 7, 8, 9]
    node.feed(m.Served("later", 7))
    assert kept(1024) == [8, 9]
    assert node.state.serving == {"later": 7}  # the other one is sent the state again
    want = JobFrame(job="model", incarnation=1, kind="want", name="mean", round=9, attempt=1)
    node.state.kept = (KeptMean(9, 1, (b"mean",), 4),)
    node.feed(m.Frame("later", want, b""))
    assert kept(1024) == [9]
    node.feed(m.Served("later", 7))
    node.state.left = True  # it may be a long time until the next round: a small model's are kept
    assert kept(100) == [8, 9]
    node.state.settings = structs.replace(node.state.settings, kept_anyway=150)
    assert kept(100) == [9]


def test_who_is_in_a_round_needs_no_means_of_before():
    node = Node().ready()
    node.arrive()
    node.feed(m.Served("b", 0), m.Served("late", 0))
    node.control(seal())
    assert node.state.serving == {"late": 0}


def behind_by_two(first_hash):
    """BEHIND with two missed rounds, the first of which has this node's work."""
    from notebook_cluster.protocol.rounds import CatchUp

    slices = [Slice(owner="b", start=0, stop=2)]
    rows = [
        CatchUp(round=number, attempt=3, slices=slices, outer=OUTER, state_hash=digest)
        for number, digest in ((1, first_hash), (2, "h2"))
    ]
    return Behind(job="model", round=2, state_hash="h2", source="b", source_incarnation=1, counted=True, missed=rows)


def caught_up_with_the_first():
    """A node that has the first of two missed rounds, which counted its work; and its state's hash."""
    node = Node().ready()
    node.arrive()
    theta, momentum = after_round("a", "b")
    digest = oracle.digest(theta, momentum)
    node.control(behind_by_two(digest))
    node.feed(frame("b", "mean", 0, bytes(mean_of("a", "b")), attempt=3))
    return node, digest


def test_work_that_was_counted_stays_counted_whoever_is_asked_next(monkeypatch):
    monkeypatch.setattr("notebook_cluster.rounds.member.joining._is_shorter", lambda state, missed: bool(missed))
    node, digest = caught_up_with_the_first()
    assert (node.state.round, node.state.state_hash) == (1, digest)
    node.feed(m.Tick(1.0), m.Tick(10.0), m.FetchFailed("b", "gone"))
    # the coordinator cannot see in this arrival what the round before it counted
    node.control(Behind(job="model", round=2, state_hash="h2", source="c", source_incarnation=1, counted=False))
    effects = node.feed(m.StateFetched(2, THETA, ZEROS, "h2"))
    assert of(effects, m.Apply)[0].counted
    assert not messages(effects, Arrived)
    assert node.state.contribution is None


def test_void_after_catching_up_with_the_round_that_counted_the_work_does_not_bring_it_again(monkeypatch):
    monkeypatch.setattr("notebook_cluster.rounds.member.joining._is_shorter", lambda state, missed: bool(missed))
    node, digest = caught_up_with_the_first()
    effects = node.control(Void(job="model", round=2, state_hash=digest))
    (apply,) = of(effects, m.Apply)
    assert (apply.round, apply.counted, apply.state_hash) == (1, True, digest)
    assert not messages(effects, Arrived)


def test_a_seal_of_a_coordinator_that_went_back_ends_the_catching_up(monkeypatch):
    monkeypatch.setattr("notebook_cluster.rounds.member.joining._is_shorter", lambda state, missed: bool(missed))
    node = Node().ready()
    node.arrive()
    node.control(behind_by_two("h1"))
    effects = node.control(seal(attempt=4))
    assert of(effects, m.CancelFetch)
    assert not of(node.feed(m.Tick(1.0), m.Tick(10.0)), m.FetchState)
    assert node.state.phase == "exchanging"


def test_a_late_contribution_to_another_fragment_is_released_and_the_node_receives():
    node = Node()
    register = Register(
        job="model", cell=1, strategy="DiLoCo", codec="float32", schema_hash="s", schema=[], parameters=512,
        every="100 steps", state_hash=BASE, fragments=2,
    )  # fmt: skip
    node.feed(m.BeginRun(register, Fragments("float32", 512, 0, 2), THETA, ZEROS))
    node.control(Registered(job="model", round=0, state_hash=BASE, source=None))
    node.feed(m.Boundary(bytes(1024), 3.0, 10, fragment=0, finishing=True))
    node.control(Behind(job="model", round=1, state_hash="h1", source="b", source_incarnation=1))
    effects = node.feed(m.StateFetched(1, THETA, ZEROS, "h1"))
    assert [type(effect) for effect in effects if not isinstance(effect, m.SendControl)] == [
        m.Rebase,
        m.ReleaseContribution,
    ]
    (arrived,) = messages(effects, Arrived)
    assert (arrived.round, arrived.fragment, arrived.samples, arrived.finishing, arrived.more) == (
        2,
        1,
        0.0,
        True,
        True,
    )


def test_a_refused_contribution_is_dropped_and_the_node_stays_as_a_receiver():
    node = Node().ready()
    node.arrive()
    refused = Refused(job="model", round=1, reason="NaN", contribution=1)
    (discarded,) = of(node.control(refused), m.DiscardContribution)
    assert discarded.reason == "NaN"
    assert node.state.contribution.samples == 0
    assert node.control(Refused(job="model", round=1, reason="late", contribution=0)) == []


def test_a_joiner_takes_the_state_of_the_source_and_says_so():
    node = Node()
    register = Register(
        job="model", cell=1, strategy="DiLoCo", codec="float32", schema_hash="s", schema=[], parameters=512,
        every="100 steps", state_hash="own",
    )  # fmt: skip
    node.feed(m.BeginRun(register, WHOLE, vector(9), ZEROS))
    node.control(Registered(job="model", round=3, state_hash=BASE, source="b", source_incarnation=2))
    effects = node.feed(m.StateFetched(3, THETA, ZEROS, BASE))
    assert messages(effects, Joined) == [Joined(job="model", round=3, state_hash=BASE)]
    assert of(effects, m.BeginTraining)[0].theta is THETA


def test_a_joiner_that_is_taken_for_the_holder_of_an_earlier_run_says_what_it_holds_and_asks_again():
    """A restarted coordinator may have heard of it what it said before it registered."""
    node = Node()
    register = Register(
        job="model", cell=1, run=2, strategy="DiLoCo", codec="float32", schema_hash="s", schema=[], parameters=512,
        every="100 steps", state_hash="own",
    )  # fmt: skip
    node.feed(m.BeginRun(register, WHOLE, vector(9), ZEROS))
    effects = node.control(Registered(job="model", round=4, state_hash="ended", source=None, run=2))
    assert [effect.message for effect in of(effects, m.SendControl)] == [
        Joined(job="model", round=0, state_hash="own"),
        register,
    ]
    assert node.state.phase == "registering"


def test_a_source_that_is_gone_makes_the_node_ask_again():
    node = Node().ready()
    (arrived,) = messages(node.arrive(), Arrived)
    node.control(Behind(job="model", round=1, state_hash="h", source="b", source_incarnation=1))
    assert messages(node.feed(m.FetchFailed("b", "gone")), Arrived) == [arrived]


def test_a_state_that_never_comes_is_asked_for_less_and_less_often_until_it_comes():
    node = Node().ready()
    behind = Behind(job="model", round=1, state_hash="h", source="b", source_incarnation=1)
    (arrived,), now, pauses = messages(node.arrive(), Arrived), 10.0, []
    for _ in range(7):
        node.control(behind)
        began, said = now, messages(node.feed(m.Tick(now), m.FetchFailed("b", "damaged")), Arrived)
        while not said:
            now += 0.25
            said = messages(node.feed(m.Tick(now)), Arrived)
        assert said == [arrived]
        pauses.append(now - began)
    assert pauses == [0, 0.25, 0.5, 1, 2, 4, 4]
    node.control(behind)
    node.feed(m.StateFetched(1, THETA, ZEROS, "h"))
    node.control(structs.replace(behind, round=2, state_hash="i"))
    assert messages(node.feed(m.FetchFailed("b", "gone")), Arrived)


def test_a_node_that_left_while_it_waits_to_ask_again_asks_no_more():
    node = Node().ready()
    behind = Behind(job="model", round=1, state_hash="h", source="b", source_incarnation=1)
    node.arrive()
    for _ in range(2):
        node.control(behind)
        node.feed(m.Tick(1.0), m.FetchFailed("b", "damaged"))
    node.feed(m.LeaveRounds("interrupted"))
    assert not messages(node.feed(m.Tick(2.0), m.Tick(9.0)), Arrived)
    assert node.state.phase == "training"


def test_new_work_while_it_waits_for_another_source_asks_anew():
    """The answer on its way is about the work before, so it is not taken."""
    node = Node().ready()
    node.arrive()
    behind = Behind(job="model", round=1, state_hash="h", source="b", source_incarnation=1, contribution=1)
    node.control(behind)
    assert not messages(node.arrive(), Arrived)
    node.control(structs.replace(behind, contribution=2))
    node.feed(m.FetchFailed("b", "gone"), m.LeaveRounds("interrupted"))
    assert [arrived.contribution for arrived in messages(node.arrive(), Arrived)] == [3]
    assert not node.control(structs.replace(behind, contribution=2))
    assert of(node.control(structs.replace(behind, contribution=3)), m.FetchState)


def test_a_node_that_left_while_its_source_went_away_arrives_again_with_its_next_work():
    node = Node().ready()
    node.arrive()
    node.control(Behind(job="model", round=1, state_hash="h", source="b", source_incarnation=1))
    node.feed(m.LeaveRounds("interrupted"), m.FetchFailed("b", "gone"))
    assert [arrived.base_hash for arrived in messages(node.arrive(), Arrived)] == [BASE]


def test_an_answer_to_an_older_arrival_says_nothing_of_the_work_in_hand():
    node = Node().ready()
    node.arrive()
    node.arrive()  # the one before was counted in a round
    behind = Behind(job="model", round=1, state_hash="h", source="b", source_incarnation=1, contribution=1)
    assert not node.control(behind)
    assert of(node.control(structs.replace(behind, contribution=2, counted=True)), m.FetchState)


def test_a_registration_that_was_heard_twice_does_not_stop_a_node_that_is_on():
    node = Node().ready()
    (arrived,) = messages(node.arrive(), Arrived)
    effects = node.control(Registered(job="model", round=4, state_hash="h4", source="b", source_incarnation=1))
    assert messages(effects, Joined) == [Joined(job="model", round=0, state_hash=BASE)]
    assert messages(effects, Arrived) == [arrived]
    assert not of(effects, m.FetchState)


def test_a_node_that_arrived_once_more_begins_the_last_attempt_again_and_no_older_one():
    node = Node().ready()
    node.arrive()
    sent = chunks(node.control(seal(attempt=2)), "contribution")
    assert sent
    assert messages(node.control(Registered(job="model", round=0, state_hash=BASE, source=None)), Arrived)
    assert node.control(seal(attempt=1)) == []
    assert chunks(node.control(seal(attempt=2)), "contribution") == sent
    assert node.state.phase == "exchanging"


def test_void_plays_the_round_again_with_the_work_that_is_there():
    node = Node().ready()
    (arrived,) = messages(node.arrive(), Arrived)
    node.control(Behind(job="model", round=1, state_hash="h", source="b", source_incarnation=1, counted=True))
    effects = node.control(Void(job="model", round=1, state_hash=BASE))
    assert of(effects, m.CancelFetch)
    assert messages(effects, Arrived) == [arrived]


def test_a_commit_that_it_is_not_prepared_for_is_not_applied_but_asked_about():
    node = Node().ready()
    (arrived,) = messages(node.arrive(), Arrived)
    effects = node.control(commit("something else"))
    assert not of(effects, m.Apply)
    assert messages(effects, Arrived) == [arrived]
    assert node.state.round == 0


# ---- leaving, restarts ---------------------------------------------------------------------------------------


def test_new_work_after_leaving_is_not_mixed_with_the_old_in_one_attempt():
    node = Node().ready()
    node.arrive()
    node.control(seal())
    assert messages(node.feed(m.LeaveRounds("interrupted")), LeftRounds)
    node.arrive(samples=2.0)
    assert node.control(seal()) == []
    assert node.state.phase == "arrived"


def test_a_node_that_left_still_applies_the_commit_it_is_prepared_for():
    node = prepared_node()
    node.feed(m.LeaveRounds("interrupted"))
    digest = messages(node.effects, Prepared)[0].state_hash
    assert of(node.control(commit(digest)), m.Apply)[0].counted


def test_last_commit_and_finished_end_the_loop():
    node = prepared_node()
    digest = messages(node.effects, Prepared)[0].state_hash
    assert of(node.control(commit(digest, last=True)), m.Apply)[0].last
    node = Node().ready()
    node.feed(m.Boundary(b"", 0.0, 0, finishing=True))
    assert of(node.control(Finished(job="model", round=0)), m.Finish) == [m.Finish(0)]


def test_a_restarted_coordinator_is_told_everything():
    node = prepared_node()
    (prepared,) = messages(node.effects, Prepared)
    effects = node.control(RoundQuery(job="model"))
    (status,) = messages(effects, RoundStatus)
    assert (status.round, status.phase, status.prepared_round) == (0, "prepared", 1)
    assert status.prepared_state_hash == prepared.state_hash
    assert status.arrived is not None
    assert messages(effects, Prepared) == [prepared]


def registering():
    """A node that has registered and was not answered yet."""
    node = Node()
    register = Register(
        job="model", cell=1, strategy="DiLoCo", codec="float32", schema_hash="s", schema=[], parameters=512,
        every="100 steps", state_hash=BASE,
    )  # fmt: skip
    node.feed(m.BeginRun(register, WHOLE, THETA, ZEROS))
    return node


def test_a_node_that_waits_for_its_registration_registers_again_after_a_restart():
    effects = registering().control(RoundQuery(job="model"))
    assert [type(e.message) for e in effects] == [Register, RoundStatus]


def test_a_refusal_that_comes_twice_is_told_once():
    """The second would be raised in the next cell."""
    node = Node().ready()
    node.arrive()
    refused = RegisterRefused(job="model", reason="the job stops")
    assert of(node.control(refused), m.Fail) == [m.Fail("the job stops")]
    assert node.control(refused) == []


def test_a_node_that_left_before_it_was_answered_does_not_register_again():
    """Its cell is over: the others would wait for it in every round."""
    node = registering()
    node.feed(m.LeaveRounds("interrupted"))
    (status,) = (effect.message for effect in node.control(RoundQuery(job="model")))
    assert (status.left, status.joining, status.holds) == (True, False, False)


# ---- nodes that read this one's memory -----------------------------------------------------------------------


def test_a_slice_goes_to_who_can_read_it_as_a_whole_and_in_chunks_to_others():
    node = Node(chunk_bytes=100).ready()
    node.state = member.sending(node.state, frozenset("b"), vectors.bytes_of)
    node.arrive()
    thirds = seal("abc", owners="ab")
    sent = chunks(node.control(thirds), "contribution")
    assert [(one.node, one.header.offset, len(one.payload)) for one in sent] == [("b", 0, 1024)]
    node.feed(*(frame(name, "contribution", 0, part(name, 0)) for name in "bc"))
    means = chunks(node.effects, "mean")
    assert [len(one.payload) for one in means if one.node == "b"] == [1024]
    assert [len(one.payload) for one in means if one.node == "c"] == [100] * 10 + [24]


def test_a_slice_that_comes_as_a_whole_is_kept_as_it_came():
    """Also after a part of it came another way."""
    node = Node().ready()
    node.arrive()
    node.control(seal("abc", owners="ab"))
    node.feed(frame("b", "contribution", 0, part("b", 0)[:700], total=1024))
    assert node.state.exchange.partial
    data = np.frombuffer(part("b", 0), np.uint8).copy()
    node.feed(frame("b", "contribution", 0, data.data))
    kept = node.state.exchange.contributions[0, "b"]
    assert np.shares_memory(np.frombuffer(kept, np.uint8), data)
    assert kept.readonly
    assert not node.state.exchange.partial


def test_what_others_hold_for_it_is_none_of_what_may_wait_for_a_seal():
    node = Node(held_bytes=1500).ready()
    node.arrive()
    mean = bytes(mean_of("a", "b")[256:])
    lent = [np.frombuffer(data, np.uint8).data for data in (part("b", 0), mean)]
    node.feed(frame("b", "contribution", 0, lent[0]), frame("b", "mean", 1, lent[1]))
    node.feed(*(frame("c", "mean", 1, memoryview(mean)) for _ in range(2)))
    assert [sender for sender, _, _ in node.state.held_frames] == ["b", "b", "c"]
    node.control(seal())
    assert messages(node.effects, Prepared)
