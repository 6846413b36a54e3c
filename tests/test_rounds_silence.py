"""The coordinator's side of the rounds when a node makes no progress: left out for a while, and taken back."""

import pytest

from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol import runs
from notebook_cluster.protocol.awake import AwakeClock
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.training.settings.arguments import Strategy
from tests.rounds_helpers import Cluster, register, sent, told, weights


def quiet(cluster, now, **seconds):
    """A tick at which these nodes have given no sign for so long."""
    return cluster.feed(rounds.Tick(now, {name: (value, "its process is stopped") for name, value in seconds.items()}))


def test_a_round_that_gathers_goes_on_without_a_node_that_makes_no_progress():
    cluster = Cluster().train()
    cluster.arrive("ab")
    assert not sent(quiet(cluster, 103.0, c=3.9), p.Seal)
    effects = quiet(cluster, 103.3, c=4.1)
    assert weights(sent(effects, p.Seal, "a")[0]) == {"a": 0.5, "b": 0.5}
    assert told(effects, "warning") == [
        "'c' has made no progress for 4 s (its process is stopped): the rounds of 'model' go on without it until it "
        "does"
    ]
    assert not told(quiet(cluster, 103.6, c=4.4), "warning")


def test_the_open_attempt_is_sealed_again_without_it_or_completed_from_those_that_hold_all_means():
    cluster = Cluster().train()
    cluster.arrive()
    seal = sent(quiet(cluster, 104.0, b=4.0), p.Seal, "a")[0]
    assert (seal.attempt, weights(seal)) == (2, {"a": 0.5, "c": 0.5})
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare("a")
    effects = quiet(cluster, 104.0, b=4.0)
    assert sent(effects, p.CompleteAttempt, "c")[0].sources == ["a"]
    commit = sent(cluster.prepare("c"), p.Commit, "a")[0]
    assert commit.members == ["a", "b", "c"]


def back(cluster, node, **fields):
    """It gives signs again, and answers."""
    query = sent(cluster.feed(rounds.Tick(cluster.state.now + 0.3)), p.RoundQuery, node)
    arrived = p.Arrived(
        job="model", round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s", codec="float32",
        norm=1.0, finite=True, contribution=1,
    )  # fmt: skip
    return query, cluster.status(node, 0, "h0", phase="arrived", arrived=arrived, **fields)


def test_a_node_that_is_back_is_asked_where_it_is_and_its_work_is_in_the_next_round():
    cluster = Cluster().train()
    cluster.arrive()
    quiet(cluster, 104.0, c=4.0)
    cluster.prepare("ab", attempt=2)
    query, effects = back(cluster, "c")
    assert query == [p.RoundQuery(job="model")]
    behind = sent(effects, p.Behind, "c")[0]
    assert (behind.round, behind.counted, [row.round for row in behind.missed]) == (1, False, [1])
    cluster.say("c", runs.Joined(job="model", round=1, state_hash="h1"))
    cluster.arrive("ab", number=2, base="h1")
    assert weights(sent(cluster.arrive("c", number=2, base="h1"), p.Seal, "a")[0])["c"] == pytest.approx(0.3333)
    assert "'c' makes progress again" in told(cluster.effects, "info")[0]


def test_it_is_in_the_open_gathering_again_when_nothing_went_on_meanwhile():
    cluster = Cluster().train()
    cluster.arrive("a")
    quiet(cluster, 104.0, c=4.0)
    assert not sent(back(cluster, "c")[1], p.Behind)
    assert weights(sent(cluster.arrive("b"), p.Seal, "a")[0]) == {"a": 0.3333, "b": 0.3333, "c": 0.3333}


def test_the_patience_of_the_job_counts():
    cluster = Cluster()
    for name in "abc":
        cluster.say(name, register("h0", patience=30.0))
    cluster.arrive("ab")
    assert not sent(quiet(cluster, 120.0, c=20.0), p.Seal)
    assert rounds.patience_for(cluster.state, "c") == 30.0
    assert sent(quiet(cluster, 125.0, c=25.0), p.Seal)


@pytest.mark.parametrize("patience", [-1.0, 0.0])
def test_a_patience_that_no_node_of_ours_would_say_is_the_usual_one(patience):
    cluster = Cluster()
    for name in "abc":
        cluster.say(name, register("h0", patience=patience))
    cluster.arrive("ab")
    assert not sent(quiet(cluster, 103.0, c=3.0), p.Seal)
    assert sent(quiet(cluster, 104.0, c=4.0), p.Seal)


def test_nodes_with_unlike_patience_are_named():
    cluster = Cluster("ab")
    cluster.say("a", register())
    refused = sent(cluster.say("b", register(patience=60.0)), runs.RegisterRefused, "b")
    assert "'b' has patience=60.0, 'a' (rank 0) has patience=5.0" in refused[0].reason


def test_a_joiner_waits_for_a_silent_node_that_alone_has_the_state():
    cluster = Cluster("ab").train("a")
    cluster.feed(rounds.Tick(111.0))
    cluster.arrive("a")
    cluster.prepare("a")
    quiet(cluster, 116.0, a=4.0)
    effects = cluster.say("b", register("hb"))
    assert not sent(effects, runs.Registered)
    assert "waiting for a: only there is round 1 of 'model'" in told(effects, "warning")[0]
    cluster.feed(rounds.Tick(117.0))
    assert sent(cluster.status("a", 1, "h1"), runs.Registered, "b")[0].source == "a"


def committed_by_a_alone():
    """A cluster of two in which b was silent when a came to round 1, and a is silent now that b is back."""
    cluster = Cluster("ab").train("ab")
    cluster.arrive("ab")
    quiet(cluster, 104.0, b=4.0)
    cluster.prepare("a", attempt=2)
    assert cluster.job.round == 1
    quiet(cluster, 108.0, a=4.0, b=8.0)
    _, effects = back(cluster, "b")
    assert not sent(effects, p.Void)
    return cluster


def test_who_alone_holds_the_last_round_is_waited_for_by_those_that_hold_the_one_before():
    cluster = committed_by_a_alone()
    assert not sent(quiet(cluster, 130.0, a=26.0), p.Void)
    sent(cluster.feed(rounds.Tick(131.0)), p.RoundQuery, "a")
    assert sent(cluster.status("a", 1, "h1"), p.Behind, "b")[0].round == 1
    assert cluster.job.round == 1


@pytest.mark.parametrize("gone", [True, False], ids=["dead", "away for long"])
def test_without_it_the_round_is_played_again_by_those_that_hold_the_one_before(gone):
    cluster = committed_by_a_alone()
    effects = cluster.lose("a") if gone else quiet(cluster, 145.0, a=41.0)
    assert sent(effects, p.Void, "b") == [p.Void(job="model", round=1, state_hash="h0")]
    assert (cluster.job.round, cluster.job.state_hash) == (0, "h0")


def test_a_checkpoint_does_not_wait_for_the_part_of_a_silent_node_nor_for_a_silent_writer():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare()
    cluster.feed(rounds.SaveRequested("name", "model", 1))
    assert sent(quiet(cluster, 104.0, b=4.0), p.PartMissing, "a")[0].node == "b"
    assert sent(quiet(cluster, 109.0, a=4.0, b=9.0), p.Save, "c")[0].writer == "c"


def test_registering_and_recovering_have_their_own_times():
    cluster = Cluster()
    cluster.say("a", register("h0"))
    quiet(cluster, 104.0, a=4.5)
    assert not cluster.job.participants["a"].away
    cluster = Cluster().train()
    cluster.arrive()
    cluster.restart()
    assert not sent(quiet(cluster, 205.0, c=5.0), p.Seal)
    assert not cluster.job.participants["c"].away


def test_a_restarted_coordinator_goes_on_with_those_that_say_where_they_are():
    cluster = Cluster().train()
    cluster.arrive("c")
    cluster.restart(attempts=7)
    for name in "ab":
        cluster.status(name, 0, "h0")
        cluster.arrive(name)
    assert not sent(quiet(cluster, 203.0, c=3.0), p.Seal)
    effects = quiet(cluster, 204.0, c=4.0)
    assert weights(sent(effects, p.Seal, "a")[0]) == {"a": 0.5, "b": 0.5}
    assert "'c' has made no progress for 4 s" in told(effects, "warning")[0]
    assert cluster.job.participants["c"].away
    assert back(cluster, "c")[0] == [p.RoundQuery(job="model")]


def test_a_restarted_coordinator_waits_longer_for_a_silent_node_when_nobody_else_holds_the_last_round():
    cluster = Cluster().train()
    cluster.arrive()
    cluster.prepare()
    cluster.restart(attempts=7)
    for name in "ab":
        cluster.status(name, 0, "h0")
    quiet(cluster, 210.0, c=10.0)
    assert cluster.job.awaited == {"c"}
    cluster.status("c", 1, "h1")
    assert not cluster.job.awaited
    assert cluster.job.round == 1


def test_a_node_that_is_lost_while_it_is_silent_comes_back_as_a_lost_one():
    cluster = Cluster().train()
    cluster.arrive()
    quiet(cluster, 104.0, c=4.0)
    cluster.lose("c", gone=False)
    cluster.prepare("ab", attempt=2)
    assert sent(cluster.feed(rounds.MemberUp("c", 1, 2)), p.RoundQuery, "c")
    assert not cluster.job.participants["c"].away
    assert not sent(cluster.feed(rounds.Tick(120.0)), p.RoundQuery)


@pytest.mark.parametrize("patience", [0, 2.9, float("inf"), float("nan"), "5", None, True])
def test_a_patience_that_is_none_is_refused_by_name(patience):
    with pytest.raises(ValueError, match="patience=") as error:
        Strategy("DiLoCo", 10, "model", None, 0.9, True, "float32", patience=patience)
    assert "use a number of seconds from 3" in str(error.value)


def test_the_clock_of_a_judge_leaves_out_the_time_in_which_it_did_not_run():
    clock = AwakeClock()
    assert [round(clock.read(now), 2) for now in (10.0, 10.25, 10.5, 60.5, 60.75, 61.9)] == [
        10.0, 10.25, 10.5, 10.5, 10.75, 10.75,
    ]  # fmt: skip
