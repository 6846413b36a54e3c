"""The coordinator's side of the rounds when something breaks, one order of losses each."""

import pytest

from notebook_cluster.journal.records import SealRecord
from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol import runs
from notebook_cluster.rounds.leader import machine as rounds
from tests.rounds_helpers import Cluster, register, sent, told, weights

# ---- losses in a round ---------------------------------------------------------------------------------------


def test_lost_before_the_seal_the_others_seal_without_it():
    cluster = Cluster().train()
    cluster.arrive("ab")
    assert list(weights(sent(cluster.lose("c"), p.Seal, "a")[0])) == ["a", "b"]


def test_lost_before_anybody_is_prepared_the_others_try_again_with_new_weights_and_slices():
    cluster = Cluster().train()
    cluster.arrive()
    seals = sent(cluster.lose("c"), p.Seal)
    assert set(seals) == {"a", "b"}
    assert (seals["a"].round, seals["a"].attempt) == (1, 2)
    assert weights(seals["a"]) == {"a": 0.5, "b": 0.5}
    assert [s.owner for s in seals["a"].slices] == ["a", "b"]


def test_lost_after_somebody_is_prepared_the_attempt_is_completed():
    """Trap 13: what a prepared node holds may not be computed again over other members."""
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("a")
    effects = cluster.lose("c")
    assert not sent(effects, p.Seal)
    assert sent(effects, p.CompleteAttempt) == {"b": p.CompleteAttempt(job="model", round=1, attempt=1, sources=["a"])}
    commits = sent(cluster.prepare("b"), p.Commit)
    assert set(commits) == {"a", "b"}
    assert commits["a"].members == ["a", "b", "c"]


def test_the_only_prepared_node_lost_too_the_last_one_tries_again():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("a")
    cluster.lose("c")
    seal = sent(cluster.lose("a"), p.Seal, "b")[0]
    assert (seal.attempt, list(weights(seal))) == (2, ["b"])


def test_prepared_of_an_old_attempt_counts_for_nothing():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.lose("c")
    assert not sent(cluster.prepare("ab", attempt=1), p.Commit)
    assert sent(cluster.prepare("ab", attempt=2), p.Commit)


def test_the_loss_of_a_later_process_says_that_the_known_one_is_gone():
    """Its start was never heard of, because it ended at once."""
    cluster = Cluster().train()
    cluster.arrive()
    effects = cluster.feed(rounds.MemberLost("c", 2, "killed", gone=True))
    assert weights(sent(effects, p.Seal)["a"]) == {"a": 0.5, "b": 0.5}


def test_messages_of_an_older_incarnation_count_for_nothing():
    cluster = Cluster("ab").train("ab")
    cluster.lose("b")
    cluster.feed(rounds.MemberUp("b", 2, 1))
    cluster.arrive("a")
    assert not cluster.arrive("b")
    assert cluster.job.open is not None


def test_a_killed_node_that_is_restarted_takes_the_state_and_is_in_the_next_round():
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    cluster.lose("b")
    cluster.prepare("a", attempt=2)
    cluster.incarnations["b"] = 2
    cluster.feed(rounds.MemberUp("b", 2, 1))
    assert sent(cluster.say("b", register("hb")), runs.Registered, "b")[0].source == "a"
    cluster.say("b", runs.Joined(job="model", round=1, state_hash="h1"))
    cluster.arrive("a", number=2, base="h1")
    seal = sent(cluster.arrive("b", number=2, base="h1"), p.Seal, "b")[0]
    assert [(m.name, m.incarnation) for m in seal.members] == [("a", 1), ("b", 2)]


def test_a_lost_source_is_replaced_at_once():
    cluster = Cluster("abcd").train("abc")
    cluster.feed(rounds.Tick(111.0))
    source = sent(cluster.say("d", register("hd")), runs.Registered, "d")[0].source
    again = sent(cluster.lose(source), runs.Registered, "d")[0].source
    assert again in set("abc") - {source}


def test_who_was_sent_the_state_by_a_node_comes_on_with_what_that_one_has():
    cluster = Cluster("abcd")
    cluster.lose("d")
    cluster.train("abc")
    cluster.lose("a", gone=False)
    cluster.incarnations["d"] = 2
    cluster.feed(rounds.MemberUp("d", 2, 3))
    cluster.feed(rounds.NodeJoinedCell(1, "d"))
    assert sent(cluster.say("d", register("hd")), runs.Registered, "d")[0].source == "c"
    cluster.feed(rounds.MemberUp("a", 1, 0))
    cluster.status("a", 0, "h0")
    cluster.arrive("abc")
    cluster.prepare("abc")
    cluster.say("d", runs.Joined(job="model", round=0, state_hash="h0"))
    (behind,) = sent(cluster.arrive("d"), p.Behind, "d")
    assert (behind.source, [row.round for row in behind.missed]) == ("c", [1])  # by its rank it would be a


def test_a_node_that_asked_often_for_another_source_than_a_lost_one_is_waited_for_still():
    cluster = Cluster()
    for name in "abc":
        cluster.say(name, register(f"h{name}"))
    for _ in range(5):  # it hears of the loss before the coordinator does
        assert sent(cluster.say("c", register("hc")), runs.Registered, "c")[0].source == "a"
    answers = sent(cluster.lose("a"), runs.Registered)
    assert (answers["b"].source, answers["c"].source) == (None, "b")
    assert not sent(cluster.arrive("b", base="hb"), p.Seal)
    cluster.say("c", runs.Joined(job="model", round=0, state_hash="hb"))
    assert sent(cluster.arrive("c", base="hb"), p.Seal).keys() == {"b", "c"}


# ---- nodes that come back ------------------------------------------------------------------------------------


def back(cluster, node, arrived_round=1, **fields):
    """A node that was out of reach is back and says where it is."""
    query = sent(cluster.feed(rounds.MemberUp(node, 1, ord(node) - ord("a"))), p.RoundQuery, node)
    arrived = p.Arrived(
        job="model", round=arrived_round, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s",
        codec="float32", norm=1.0, finite=True, contribution=1,
    )  # fmt: skip
    return query, cluster.status(node, 0, "h0", phase="exchanging", attempt=1, arrived=arrived, **fields)


def back_after_its_round():
    """Round 1 is committed with a, b and c; c was out of reach since and is asked where it is, a and b are at the next
    boundary."""
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare()
    cluster.lose("c", gone=False)
    assert sent(cluster.feed(rounds.MemberUp("c", 1, 2)), p.RoundQuery, "c")
    assert not sent(cluster.arrive("ab", number=2, base="h1"), p.Seal)
    return cluster


def test_a_member_of_the_last_round_that_is_back_is_waited_for_until_it_has_said_where_it_is():
    cluster = back_after_its_round()
    assert not sent(cluster.status("c", 1, "h1"), p.Seal)
    assert sent(cluster.arrive("c", number=2, base="h1"), p.Seal).keys() == {"a", "b", "c"}


def test_a_member_of_the_last_round_that_is_lost_again_is_not_waited_for():
    assert sent(back_after_its_round().lose("c", gone=False), p.Seal).keys() == {"a", "b"}


def test_a_member_of_the_last_round_that_turns_out_to_be_behind_is_not_waited_for():
    cluster = back_after_its_round()
    arrived = p.Arrived(
        job="model", round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s", codec="float32",
        norm=1.0, finite=True, contribution=1,
    )  # fmt: skip
    effects = cluster.status("c", 0, "h0", phase="arrived", arrived=arrived)
    assert sent(effects, p.Seal).keys() == {"a", "b"}
    assert sent(effects, p.Behind, "c")[0].counted
    assert sent(cluster.prepare("ab", number=2, state_hash="h2"), p.Commit).keys() == {"a", "b"}
    # while it takes over the state the others go on
    assert sent(cluster.arrive("ab", number=3, base="h2"), p.Seal).keys() == {"a", "b"}


def test_a_member_that_was_left_out_of_the_last_round_holds_nobody_up():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("ab")
    stalled = p.Stalled(job="model", round=1, attempt=1, waiting_for=["a"])
    cluster.say("c", stalled)
    cluster.feed(rounds.Tick(103.0))
    cluster.say("c", stalled)
    assert sent(cluster.feed(rounds.Tick(106.0)), p.Commit).keys() == {"a", "b"}
    assert sent(cluster.arrive("ab", number=2, base="h1"), p.Seal).keys() == {"a", "b"}


def test_a_late_node_is_sent_to_the_state_and_brings_its_work_again():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.lose("c", gone=False)
    cluster.prepare("ab", attempt=2)
    query, effects = back(cluster, "c")
    assert query
    behind = sent(effects, p.Behind, "c")[0]
    assert (behind.round, behind.counted) == (1, False)


def test_a_late_node_whose_work_is_in_the_committed_mean_is_told_so():
    """Trap 14: otherwise its work would be counted twice."""
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("a")
    cluster.lose("c", gone=False)
    cluster.prepare("b")
    _, effects = back(cluster, "c")
    assert sent(effects, p.Behind, "c")[0].counted


def test_a_node_that_is_back_prepared_for_the_committed_round_gets_the_commit():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("abc"[:1])
    cluster.lose("c", gone=False)
    cluster.prepare("b")
    _, effects = back(cluster, "c", prepared_round=1, prepared_state_hash="h1")
    assert sent(effects, p.Commit, "c")[0].state_hash == "h1"


def test_a_late_node_is_not_waited_for_until_it_has_the_state():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.lose("c", gone=False)
    cluster.prepare("ab", attempt=2)
    back(cluster, "c")
    assert sent(cluster.arrive("ab", number=2, base="h1"), p.Seal)


# ---- contributions that are not used -------------------------------------------------------------------------


def test_a_contribution_that_is_not_finite_is_refused_and_its_node_receives():
    cluster = Cluster("ab").train("ab")
    effects = cluster.arrive("a", finite=False)
    assert sent(effects, p.Refused, "a")
    assert "the work of 'a' for round 1 holds NaN or infinity" in told(effects, "warning")[0]
    assert weights(sent(cluster.arrive("b"), p.Seal, "a")[0]) == {"a": 0.0, "b": 1.0}


def test_a_contribution_far_out_of_scale_is_refused():
    cluster = Cluster().train()
    cluster.arrive("ab", norm=2.0)
    effects = cluster.arrive("c", norm=300.0)
    assert "the work of 'c' for round 1 is out of scale (norm 300, the others' median 2)" in told(effects, "warning")[0]
    assert weights(sent(effects, p.Seal, "a")[0])["c"] == 0


def test_a_contribution_found_not_finite_by_an_owner_is_refused_and_the_round_sealed_again():
    cluster = Cluster().train()
    cluster.arrive()
    effects = cluster.say("a", p.Stalled(job="model", round=1, attempt=1, waiting_for=[], not_finite=["b"]))
    assert sent(effects, p.Refused, "b")
    assert weights(sent(effects, p.Seal, "b")[0]) == {"a": 0.5, "b": 0.0, "c": 0.5}


def test_a_model_that_changed_after_registering_is_refused():
    cluster = Cluster("ab").train("ab")
    cluster.arrive("a")
    effects = cluster.arrive("b")
    cluster = Cluster("ab").train("ab")
    cluster.arrive("a")
    message = p.Arrived(
        job="model", round=1, incarnation=1, base_hash="h0", samples=1.0, steps=1, schema_hash="other", codec="float32",
        norm=1.0, finite=True,
    )  # fmt: skip
    effects = cluster.say("b", message)
    assert "the model of 'b' changed" in sent(effects, runs.RegisterRefused, "b")[0].reason
    assert list(weights(sent(effects, p.Seal, "a")[0])) == ["a"]


# ---- hashes that differ --------------------------------------------------------------------------------------


def test_the_majority_counts_and_the_odd_node_is_named_and_synchronised_again():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("ab")
    effects = cluster.prepare("c", state_hash="odd")
    assert set(sent(effects, p.Commit)) == {"a", "b"}
    behind = sent(effects, p.Behind, "c")[0]
    assert (behind.state_hash, behind.counted) == ("h1", True)
    assert "'c' computed another state for round 1" in told(effects, "error")[0]
    assert rounds.job_views(cluster.state)[0].hash_mismatches == 1


def test_a_slice_that_differs_names_its_owner():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("ab", slices=("x", "y", "z"))
    effects = cluster.prepare("c", state_hash="odd", slices=("x", "other", "z"))
    assert "the mean it got from 'b' differs" in told(effects, "error")[0]


def differing(cluster=None, names="ab", **fields):
    """Members of round 1 that are PREPARED with different states, the first one as h1."""
    cluster = cluster or Cluster(names).train(names)
    cluster.arrive(names)
    cluster.prepare(names[1:], state_hash="odd", **fields)
    return cluster


def test_of_two_that_differ_nobody_counts_and_the_same_work_is_sealed_once_more():
    cluster = differing()
    effects = cluster.prepare("a")
    assert not sent(effects, p.Commit)
    first, again = (r["seal"] for r in cluster.log if r["kind"] == "seal")
    assert (again["round"], again["attempt"], again["members"]) == (1, 2, first["members"])
    assert told(effects, "warning") == [
        "round 1 of 'model' came out unlike on 'a' (h1) and 'b' (odd), and no more than half agree: it is played again"
    ]
    assert sent(cluster.prepare("ab", attempt=2), p.Commit).keys() == {"a", "b"}
    assert rounds.job_views(cluster.state)[0].hash_mismatches == 1


def stopped(names="ab", about=None, **fields):
    """The round differed twice: what the coordinator did then."""
    cluster = Cluster(names)
    for name in names:
        cluster.say(name, register("h0", about=(about or {}).get(name, {})))
    differing(cluster, names, **fields)
    cluster.prepare(names[0])
    cluster.prepare(names[1:], attempt=2, state_hash="odd", **fields)
    return cluster, cluster.prepare(names[0], attempt=2)


def test_a_round_that_differs_twice_stops_the_job_with_one_error_for_all():
    about = {"a": {"processor": "EPYC", "numpy": "2.4.1"}, "b": {"processor": "M2", "numpy": "2.4.1"}}
    cluster, effects = stopped(about=about, flushes=True)
    refused = sent(effects, runs.RegisterRefused)
    assert refused.keys() == {"a", "b"}
    assert not sent(effects, p.Commit)
    assert (
        {message.reason for message in refused.values()}
        == set(told(effects, "error"))
        == {
            "round 1 of 'model' came out unlike on 'a' (h1) and 'b' (odd), twice, and no more than half agree: the job "
            "stops at round 0. 'b' rounds subnormal numbers to zero, see torch.set_flush_denormal; processor differs "
            "('a' EPYC, 'b' M2): make them alike; then run the cell again, which goes on from there"
        }
    )
    assert cluster.job.state_hash == "h0"


def test_what_stopped_stays_so_in_its_cell_and_after_a_restart_and_goes_on_in_the_next():
    cluster, _ = stopped()
    again = register("h0", holds_state=True)
    assert sent(cluster.say("a", again), runs.RegisterRefused, "a")
    cluster.restart("ab", running="ab")
    assert sent(cluster.status("a", 0, "h0"), runs.RegisterRefused, "a")  # not told before the restart
    assert not sent(cluster.status("b", 0, "h0", left=True), runs.RegisterRefused)
    assert "twice" in sent(cluster.say("b", again), runs.RegisterRefused, "b")[0].reason
    cluster.feed(rounds.CellBegan(2, ("a", "b")))
    cluster.say("a", register("h0", holds_state=True, cell=2))
    answers = sent(cluster.say("b", register("h0", holds_state=True, cell=2)), runs.Registered)
    assert {name: (row.round, row.source) for name, row in answers.items()} == {"a": (0, None), "b": (0, None)}


def test_a_node_out_of_reach_when_the_job_stopped_hears_of_it_when_it_is_back():
    cluster = Cluster().train()
    cluster.lose("c", gone=False)
    cluster.arrive("ab")
    for attempt in (1, 2):
        cluster.prepare("b", attempt=attempt, state_hash="odd")
        effects = cluster.prepare("a", attempt=attempt)
    assert sent(effects, runs.RegisterRefused).keys() == {"a", "b"}
    back(cluster, "c")
    assert not cluster.job.participants["c"].active


def test_work_that_was_on_its_way_when_the_job_stopped_is_in_no_round():
    cluster = Cluster()
    for name in "abc":
        cluster.say(name, register("h0", quorum=2))
    cluster.arrive("ab")
    for attempt in (1, 2):
        cluster.prepare("b", attempt=attempt, state_hash="odd")
        cluster.prepare("a", attempt=attempt)
    effects = cluster.arrive("c")
    assert not sent(effects, p.Seal)
    assert "twice" in sent(effects, runs.RegisterRefused, "c")[0].reason


def test_who_had_left_when_the_job_stopped_and_works_on_in_the_cell_is_told():
    cluster = Cluster().train()
    cluster.say("c", p.LeftRounds(job="model", reason="interrupted"))
    cluster.arrive("ab")
    for attempt in (1, 2):
        cluster.prepare("b", attempt=attempt, state_hash="odd")
        cluster.prepare("a", attempt=attempt)
    effects = cluster.arrive("c")
    assert "twice" in sent(effects, runs.RegisterRefused, "c")[0].reason
    assert not sent(effects, p.Seal)


def test_a_round_of_each_run_is_played_once_more():
    """Models made with the same seed begin every run with the same state."""
    cluster = Cluster("ab")
    for run in (1, 2):
        for name in "ab":
            cluster.say(name, register("h0", run=run, fresh=True))
        first = cluster.job.attempt_floor + 1
        cluster.arrive("ab", finishing=True)
        cluster.prepare("b", attempt=first, state_hash="odd")
        assert not told(cluster.prepare("a", attempt=first), "error")
        assert sent(cluster.prepare("ab", attempt=first + 1), p.Commit).keys() == {"a", "b"}


@pytest.mark.parametrize(("states", "commits"), [("xxy", "x"), ("xyy", "y"), ("xyz", ""), ("xxyy", ""), ("xyyyz", "y")])
def test_more_than_half_of_the_prepared_members_decide(states, commits):
    names = "abcde"[: len(states)]
    cluster = Cluster(names).train(names)
    cluster.arrive(names)
    for name, state in zip(names, states, strict=True):
        effects = cluster.prepare(name, state_hash=state)
    assert (cluster.job.state_hash, bool(sent(effects, p.Commit))) == (commits or "h0", bool(commits))


def test_a_member_that_is_lost_once_it_is_prepared_is_still_heard():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("ca")
    cluster.lose("c")
    assert sent(cluster.prepare("b", state_hash="odd"), p.Commit).keys() == {"a"}
    assert cluster.job.state_hash == "h1"


def test_what_only_lost_members_computed_is_never_committed():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("bc", state_hash="gone")
    cluster.lose("b")
    cluster.lose("c")
    assert not sent(cluster.prepare("a"), p.Commit)
    assert sent(cluster.prepare("a", attempt=2), p.Commit)


@pytest.mark.parametrize("samples", [float("nan"), float("inf"), -1.0])
def test_a_count_of_samples_that_cannot_be_is_refused_and_the_round_goes_on(samples):
    cluster = Cluster().train()
    cluster.arrive("ab")
    effects = cluster.arrive("c", samples=samples)
    assert "counts" in sent(effects, p.Refused, "c")[0].reason
    assert weights(sent(effects, p.Seal, "a")[0]) == {"a": 0.5, "b": 0.5, "c": 0.0}


# ---- an exchange that stands still ---------------------------------------------------------------------------


def stall(cluster, now, **waiting_for):
    effects = cluster.feed(rounds.Tick(now))
    for name, names in waiting_for.items():
        effects += cluster.say(name, p.Stalled(job="model", round=1, attempt=1, waiting_for=list(names)))
    return effects


def test_the_node_named_most_is_left_out_and_not_lost():
    cluster = Cluster().train()
    cluster.arrive()
    for now in (103.0, 105.5):
        assert not sent(stall(cluster, now, a="c", b="c", c="ab"), p.Seal)
    seal = sent(stall(cluster, 108.0, a="c", b="c", c="ab"), p.Seal, "a")[0]
    assert list(weights(seal)) == ["a", "b"]
    assert "round 1 goes on without 'c'" in told(cluster.effects, "warning")[0]
    effects = cluster.prepare("ab", attempt=2)
    assert sent(effects, p.Behind, "c")[0].counted is False


def relays(effects):
    return {effect.waiting + effect.waited_for for effect in effects if isinstance(effect, rounds.Relay)}


def test_relays_are_ordered_first_and_only_what_stands_still_with_them_is_left_out():
    cluster = Cluster().train()
    cluster.arrive()
    assert relays(stall(cluster, 103.0, a="c")) == {"ac"}
    assert relays(stall(cluster, 105.5, a="c", b="c", c="ab")) == {"bc", "ca", "cb"}
    # Five seconds after the first report the last relays are not old enough to be judged.
    effects = stall(cluster, 108.0, a="c", b="c", c="ab")
    assert not relays(effects)
    assert not sent(effects, p.Seal)
    assert list(weights(sent(stall(cluster, 110.5, a="c", b="c", c="ab"), p.Seal, "a")[0])) == ["a", "b"]


def test_a_relay_that_helps_keeps_the_node_in_the_round():
    cluster = Cluster().train()
    cluster.arrive()
    stall(cluster, 103.0, a="c")
    cluster.feed(rounds.Tick(107.0))
    cluster.prepare("abc")
    cluster.feed(rounds.Tick(120.0))
    assert cluster.job.round == 1
    assert not told(cluster.effects, "warning")


def test_no_relay_is_ordered_to_a_node_that_is_not_in_the_round():
    cluster = Cluster().train()
    cluster.arrive()
    assert not relays(stall(cluster, 103.0, a=["stranger", "a"]))


def test_a_slow_owner_that_still_makes_progress_is_not_left_out():
    cluster = Cluster().train()
    cluster.arrive()
    for now in (103.0, 105.5, 108.0, 110.5, 113.0):
        assert not sent(stall(cluster, now, a="b", c="b"), p.Seal)


def test_who_cannot_get_the_means_of_prepared_nodes_is_left_behind_with_its_work_counted():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("ab")
    assert sent(stall(cluster, 103.0, c="ab"), p.CompleteAttempt, "c")[0].sources == ["a", "b"]
    stall(cluster, 105.5, c="ab")
    effects = stall(cluster, 108.0, c="ab")
    assert sent(effects, p.Commit)["a"].members == ["a", "b", "c"]
    assert sent(effects, p.Behind, "c")[0].counted


# ---- states that nobody holds --------------------------------------------------------------------------------


def test_a_commit_that_no_reachable_node_holds_is_void_and_the_round_played_again():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.lose("c", gone=False)
    cluster.prepare("ab", attempt=2)
    back(cluster, "c")
    cluster.lose("a")
    effects = cluster.lose("b")
    assert next(r for r in cluster.log if r["kind"] == "void")["round"] == 1
    assert sent(effects, p.Void, "c") == [p.Void(job="model", round=1, state_hash="h0")]
    seal = sent(cluster.arrive("c"), p.Seal, "c")[0]
    assert (seal.round, seal.attempt) == (1, 3)


def test_a_joiner_waits_for_a_node_that_may_bring_the_state_back():
    cluster = Cluster("ab").train("a")
    cluster.feed(rounds.Tick(111.0))
    cluster.arrive("a")
    cluster.prepare("a")
    cluster.lose("a", gone=False)
    effects = cluster.say("b", register("hb"))
    assert not sent(effects, runs.Registered)
    assert "waiting for a: only there is round 1 of 'model'" in told(effects, "warning")[0]
    cluster.feed(rounds.MemberUp("a", 1, 0))
    assert sent(cluster.status("a", 1, "h1"), runs.Registered, "b")[0].source == "a"


@pytest.mark.parametrize("gone", [True, False], ids=["dead", "away for long"])
def test_with_no_state_left_anywhere_the_job_starts_anew_and_says_so(gone):
    cluster = Cluster("ab").train("a")
    cluster.feed(rounds.Tick(111.0))
    cluster.arrive("a")
    cluster.prepare("a")
    cluster.lose("a", gone=gone)
    effects = cluster.say("b", register("hb")) + cluster.feed(rounds.Tick(150.0))
    assert sent(effects, runs.Registered, "b")[0] == runs.Registered(
        job="model", round=0, state_hash="hb", source=None, run=1
    )
    assert "it starts from 'b'" in told(effects, "warning")[-1]


# ---- a restarted coordinator ---------------------------------------------------------------------------------


def test_a_restarted_coordinator_repeats_the_open_seal_and_asks_everybody():
    cluster = Cluster().train()
    cluster.arrive()
    effects = cluster.restart()
    assert set(sent(effects, p.Seal)) == set(sent(effects, p.RoundQuery)) == {"a", "b", "c"}
    assert sent(effects, p.Seal, "a")[0].attempt == 1


def test_a_seal_that_was_lost_with_the_power_is_never_said_again_for_other_work():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.records.pop()
    assert not sent(cluster.restart(attempts=1 << 20), p.Seal)
    for name in "abc":
        arrived = p.Arrived(
            job="model", round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s",
            codec="float32", norm=1.0, finite=True, contribution=1,
        )  # fmt: skip
        effects = cluster.status(name, 0, "h0", phase="prepared", attempt=1, prepared_round=1, arrived=arrived)
        effects += cluster.prepare(name)
    assert sent(effects, p.Seal, "a")[0].attempt == (1 << 20) + 1
    assert rounds.job_views(cluster.state)[0].attempt == 1
    assert sent(cluster.prepare(attempt=(1 << 20) + 1), p.Commit, "a")


def test_a_seal_of_which_the_next_one_was_lost_with_the_power_is_played_no_more():
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    assert cluster.job.open.seal.attempt == 1
    cluster.restart("ab", attempts=1 << 20)
    for name in "ab":
        arrived = p.Arrived(
            job="model", round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s",
            codec="float32", norm=1.0, finite=True, contribution=1,
        )  # fmt: skip
        effects = cluster.status(name, 0, "h0", phase="arrived", seen_attempt=2, arrived=arrived)
    assert [seal.attempt for seal in sent(effects, p.Seal, "a")] == [(1 << 20) + 1]


def test_what_need_not_be_synced_is_the_seal():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare()
    logs = [effect for effect in cluster.effects if isinstance(effect, rounds.Log)]
    assert [log.durable for log in logs] == [not isinstance(log.record, SealRecord) for log in logs]
    assert not all(log.durable for log in logs)


def test_it_repeats_a_refusal_that_its_node_may_not_have_heard():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.say("a", p.Stalled(job="model", round=1, attempt=1, waiting_for=[], not_finite=["b"]))
    cluster.restart()
    arrived = {
        name: p.Arrived(
            job="model", round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s",
            codec="float32", norm=1.0, finite=True, contribution=1,
        )
        for name in "abc"
    }  # fmt: skip
    told_again = [sent(cluster.status(name, 0, "h0", arrived=arrived[name]), p.Refused) for name in "abc"]
    assert [list(refused) for refused in told_again] == [[], ["b"], []]


def test_a_node_that_comes_back_after_the_restart_hears_of_the_open_seal():
    cluster = Cluster().train()
    cluster.arrive()
    arrived = p.Arrived(
        job="model", round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s",
        codec="float32", norm=1.0, finite=True, contribution=1,
    )  # fmt: skip
    cluster.restart()
    cluster.lose("c", gone=False)
    assert list(sent(cluster.feed(rounds.MemberUp("c", 1, 2)), p.RoundQuery)) == ["c"]
    assert [seal.attempt for seal in sent(cluster.status("c", 0, "h0", arrived=arrived), p.Seal, "c")] == [1]


def test_a_member_of_the_open_attempt_that_arrives_once_more_hears_of_it_until_it_is_prepared():
    cluster = Cluster().train()
    assert set(sent(cluster.arrive(), p.Seal)) == {"a", "b", "c"}
    assert list(sent(cluster.arrive("b"), p.Seal)) == ["b"]
    cluster.prepare("b")
    assert not sent(cluster.arrive("b"), p.Seal)


def test_it_repeats_the_last_commit():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare()
    assert sent(cluster.restart(), p.Commit, "b")[0].state_hash == "h1"


def test_it_decides_nothing_before_it_has_heard_from_all_or_they_are_lost():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.restart()
    assert rounds.job_views(cluster.state)[0].phase == "recovering"
    for name in "ab":
        arrived = p.Arrived(
            job="model", round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s",
            codec="float32", norm=1.0, finite=True, contribution=1,
        )  # fmt: skip
        cluster.status(name, 0, "h0", phase="prepared", attempt=1, arrived=arrived)
        assert not sent(cluster.prepare(name), p.Commit)
    assert sent(cluster.lose("c"), p.Commit)["a"].members == ["a", "b", "c"]


def test_a_node_that_did_not_get_the_commit_gets_it_again():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare()
    cluster.restart()
    cluster.status("a", 1, "h1")
    effects = cluster.status("b", 0, "h0", attempt=1, phase="prepared", prepared_round=1, prepared_state_hash="h1")
    assert sent(effects, p.Commit, "b")
    assert not sent(cluster.status("c", 1, "h1"), p.Void)


def test_void_when_only_the_dead_had_the_commit():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.lose("c", gone=False)
    cluster.prepare("ab", attempt=2)
    cluster.restart(names="c", running="c")
    effects = cluster.status("c", 0, "h0")
    assert sent(effects, p.Void, "c")[0].state_hash == "h0"


def test_an_older_word_that_is_heard_again_does_not_take_the_state_from_a_node_that_registers_again():
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    cluster.prepare("ab")
    again = register("h1", round=1, holds_state=True)
    cluster.say("a", again)
    cluster.restart("ab", running="ab")
    cluster.arrive("a")  # not acknowledged before, like all that follows
    cluster.say("a", again)
    cluster.status("a", 1, "h1", joining=True)
    effects = cluster.status("b", 0, "h0")
    assert not sent(effects, p.Void)
    assert (sent(effects, runs.Registered, "a")[0].round, sent(effects, runs.Registered, "a")[0].source) == (1, None)


def test_the_first_round_waits_for_those_that_still_fetch_the_state_after_a_restart_too():
    cluster = Cluster()
    for name in "abc":
        cluster.say(name, register(f"h{name}"))
    cluster.restart()
    cluster.status("a", 0, "ha")
    for name in "bc":
        cluster.say(name, register(f"h{name}"))
        cluster.status(name, 0, f"h{name}", joining=True, holds=False)
    assert not sent(cluster.arrive("a", base="ha"), p.Seal)
    for name in "bc":
        cluster.say(name, runs.Joined(job="model", round=0, state_hash="ha"))
    assert set(sent(cluster.arrive("bc", base="ha"), p.Seal)) == set("abc")


def test_who_fetched_the_state_when_a_round_was_over_is_not_waited_for_after_a_restart():
    cluster = Cluster().train("ab")
    cluster.feed(rounds.Tick(111.0))
    cluster.arrive("ab")
    cluster.prepare("ab")
    cluster.say("c", register("hc"))
    cluster.restart()
    for name in "ab":
        cluster.status(name, 1, "h1")
    cluster.say("c", register("hc"))
    cluster.status("c", 0, "hc", joining=True, holds=False)
    assert set(sent(cluster.arrive("ab", number=2, base="h1"), p.Seal)) == {"a", "b"}


@pytest.mark.parametrize("silent", [False, True], ids=["lost", "silent"])
def test_the_only_holder_that_is_back_in_a_later_cell_is_asked_before_anything_is_thrown_away(silent):
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare()
    for name in "abc":
        cluster.feed(rounds.CellLeft(1, name, "ok"))
    for rank, name in enumerate("bc", 1):
        cluster.lose(name)
        cluster.incarnations[name] = 2
        cluster.feed(rounds.MemberUp(name, 2, rank))
    if silent:
        cluster.feed(rounds.Tick(104.0, {"a": (4.0, "")}))
    else:
        cluster.lose("a", gone=False)
    cluster.feed(rounds.CellBegan(2, ("b", "c")))
    for name in "bc":
        cluster.say(name, register(f"h{name}", cell=2))
    effects = cluster.feed(rounds.Tick(104.3) if silent else rounds.MemberUp("a", 1, 0))
    assert sent(effects, p.RoundQuery).keys() == {"a"}
    assert not sent(effects, runs.Registered)
    answers = sent(cluster.status("a", 1, "h1", left=True), runs.Registered)
    assert {name: (row.round, row.source) for name, row in answers.items()} == {"b": (1, "a"), "c": (1, "a")}


def test_counters_survive_the_restart():
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    cluster.prepare("ab")
    cluster.say("a", p.Applied(job="model", round=1, state_hash="h1", bytes_sent=500, steps=10))
    cluster.arrive("ab", number=2, base="h1")
    cluster.prepare("ab", number=2, state_hash="h2")
    cluster.restart(names="ab")
    view = rounds.job_views(cluster.state)[0]
    assert (view.round, view.bytes_sent) == (2, 500)


def test_a_node_that_was_lost_when_the_coordinator_was_restarted_is_asked_where_it_is_when_it_is_back():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.lose("c", gone=False)
    cluster.prepare("ab", attempt=2)
    cluster.restart("ab", attempts=7)
    for name in "ab":
        cluster.status(name, 1, "h1")
    assert sent(cluster.feed(rounds.MemberUp("c", 1, 2)), p.RoundQuery, "c") == [p.RoundQuery(job="model")]
    arrived = p.Arrived(
        job="model", round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s", codec="float32",
        norm=1.0, finite=True, contribution=1,
    )  # fmt: skip
    assert sent(cluster.status("c", 0, "h0", phase="exchanging", arrived=arrived), p.Behind, "c")
