"""The coordinator's side of a cell that makes one sync object after the other under one name."""

import msgspec
import pytest

from notebook_cluster.journal.records import Record
from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol import runs
from notebook_cluster.rounds.leader import machine as rounds
from tests.rounds_helpers import Cluster, register, sent, told


def anew(node, run, **fields):
    """What ``node`` registers with in a loop with fresh=True."""
    return register(f"h0{node}", run=run, fresh=True, **fields)


def begun(names="abc"):
    cluster = Cluster(names)
    for name in names:
        cluster.say(name, anew(name, 1))
    return cluster


def finished(names="abc"):
    """All have trained one round in run 1 and finished it; the state is h1."""
    cluster = begun(names)
    for name in names[1:]:
        cluster.say(name, runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.arrive(names, base="h0a", finishing=True)
    assert all(commit.last for commit in sent(cluster.prepare(names), p.Commit).values())
    return cluster


def next_run(cluster, names="abc", run=2, **fields):
    effects = []
    for name in names:
        effects += cluster.say(name, anew(name, run, **fields))
    return effects


def test_the_next_run_begins_anew_when_all_have_come_to_it():
    cluster = finished()
    assert not sent(next_run(cluster, "ab"), runs.Registered)
    answers = sent(next_run(cluster, "c"), runs.Registered)
    assert {(a.round, a.state_hash, a.run) for a in answers.values()} == {(0, "h0a", 2)}
    assert {name: answer.source for name, answer in answers.items()} == {"a": None, "b": "a", "c": "a"}
    assert (cluster.job.run, cluster.job.round) == (2, 0)


def test_one_that_is_not_fresh_goes_on_with_what_is_held():
    cluster = finished()
    effects = []
    for name in "abc":
        effects += cluster.say(name, register("h1", round=1, holds_state=True, run=2))
    assert {(a.round, a.state_hash, a.source) for a in sent(effects, runs.Registered).values()} == {(1, "h1", None)}


@pytest.mark.parametrize(
    "change", [{"codec": "int8"}, {"schema": [("v", [3], "float32")], "schema_hash": "t"}, {"every": "30 seconds"}]
)
def test_the_next_run_may_have_another_model_and_other_settings(change):
    cluster = finished()
    effects = next_run(cluster, **change)
    assert not sent(effects, runs.RegisterRefused)
    assert set(sent(effects, runs.Registered)) == set("abc")


def test_resume_is_looked_at_in_every_run():
    cluster = finished()
    effects = next_run(cluster, "ac", resume="digits")
    effects += cluster.say("b", register("h7", run=2, resume="digits", resume_round=7, round=7))
    answers = sent(effects, runs.Registered)
    assert {name: (a.round, a.source) for name, a in answers.items()} == {"a": (7, "b"), "b": (7, None), "c": (7, "b")}


def test_who_is_ahead_waits_until_the_run_is_over_on_all():
    """It has caught an error of its own."""
    cluster = begun()
    cluster.say("b", anew("b", 2))
    assert cluster.job.run == 1
    (line,) = told(cluster.feed(rounds.Tick(106.0)), "warning")
    assert line == "sync object 2 of 'model' in this cell waits on 'b' until number 1 is finished on 'a', 'c'"
    assert not told(cluster.feed(rounds.Tick(112.0)), "warning")
    cluster.say("c", runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.arrive("ac", base="h0a", finishing=True)
    cluster.prepare("ac")
    answers = sent(next_run(cluster, "ac"), runs.Registered)
    assert {(a.round, a.state_hash) for a in answers.values()} == {(0, "h0a")}
    assert set(answers) == set("abc")


def test_who_is_ahead_of_two_runs_does_not_take_one_from_the_others():
    """It could not even register in the one between."""
    cluster = finished()
    cluster.say("b", anew("b", 3))
    assert set(sent(next_run(cluster, "ac"), runs.Registered)) == {"a", "c"}
    assert cluster.job.run == 2


@pytest.mark.parametrize("run", [2, 3, 1 << 62])
def test_one_node_alone_takes_no_run_from_others_that_are_slow(run):
    cluster = Cluster()
    cluster.say("b", anew("b", run))
    for now in (115.0, 130.0, 160.0):
        assert not sent(cluster.feed(rounds.Tick(now)), runs.Registered)
    assert set(sent(next_run(cluster, "ac", run=1), runs.Registered)) == {"a", "c"}


def test_most_nodes_do_not_wait_for_one_that_makes_no_sync_object():
    """None of them could register in the first run."""
    cluster = Cluster()
    assert not sent(next_run(cluster, "ab") + cluster.feed(rounds.Tick(109.0)), runs.Registered)
    assert set(sent(cluster.feed(rounds.Tick(110.0)), runs.Registered)) == {"a", "b"}


def test_nodes_of_which_all_could_not_register_are_together_in_the_one_after():
    cluster = finished()
    assert set(sent(next_run(cluster, run=3) + cluster.feed(rounds.Tick(100.5)), runs.Registered)) == set("abc")
    assert cluster.job.run == 3


def test_the_first_run_of_a_later_cell_is_not_taken_from_the_others_either():
    cluster = finished()
    for name in "abc":
        cluster.feed(rounds.CellLeft(1, name, "ok"))
    cluster.feed(rounds.CellBegan(2, tuple("abc")))
    cluster.say("b", anew("b", 2, cell=2))
    assert set(sent(next_run(cluster, "ac", run=1, cell=2), runs.Registered)) == {"a", "c"}


def test_a_node_whose_loop_has_fewer_turns_is_not_waited_for():
    cluster = finished()
    next_run(cluster, "ab")
    assert set(sent(cluster.feed(rounds.CellLeft(1, "c", "ok")), runs.Registered)) == {"a", "b"}


def test_a_node_of_the_cell_that_makes_no_sync_object_is_waited_for_once():
    cluster = Cluster()
    for name in "ab":
        cluster.say(name, anew(name, 1))
    assert set(sent(cluster.feed(rounds.Tick(110.0)), runs.Registered)) == {"a", "b"}
    cluster.say("b", runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.arrive("ab", base="h0a", finishing=True)
    cluster.prepare("ab")
    assert set(sent(next_run(cluster, "ab"), runs.Registered)) == {"a", "b"}


def test_a_late_node_is_waited_for_until_the_grace_is_over_and_then_joins_the_run():
    cluster = finished()
    next_run(cluster, "ab")
    assert set(sent(cluster.feed(rounds.Tick(110.0)), runs.Registered)) == {"a", "b"}
    answer = sent(next_run(cluster, "c"), runs.Registered)["c"]
    assert (answer.round, answer.state_hash, answer.run) == (0, "h0a", 2)


def test_the_next_run_does_not_wait_for_a_node_that_makes_no_progress():
    cluster = begun()
    for name in "bc":
        cluster.say(name, runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.feed(rounds.Tick(104.0, {"c": (4.0, "its process is stopped")}))
    cluster.arrive("ab", base="h0a", finishing=True)
    cluster.prepare("ab")
    assert set(sent(next_run(cluster, "ab"), runs.Registered)) == {"a", "b"}
    assert sent(cluster.feed(rounds.Tick(104.3)), p.RoundQuery).keys() == {"c"}
    assert sent(cluster.status("c", 0, "h0a"), runs.RunOver)["c"].run == 1
    assert sent(next_run(cluster, "c"), runs.Registered)["c"].run == 2


# ---- joiners -------------------------------------------------------------------------------------------------


def restarted(cluster, name="c"):
    cluster.lose(name)
    cluster.incarnations[name] += 1
    cluster.feed(rounds.MemberUp(name, cluster.incarnations[name], 2))
    cluster.feed(rounds.NodeJoinedCell(1, name))


def test_a_restarted_node_passes_what_is_over_and_joins_the_run_that_is_on():
    cluster = finished()
    next_run(cluster)
    restarted(cluster)
    assert sent(next_run(cluster, "c", run=1), runs.RunOver) == {"c": runs.RunOver(job="model", cell=1, run=1)}
    assert sent(next_run(cluster, "c"), runs.Registered)["c"].source == "a"


def test_the_next_run_does_not_wait_for_a_node_that_passes():
    cluster = finished()
    next_run(cluster)
    restarted(cluster)
    next_run(cluster, "c", run=1)
    cluster.say("b", runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.arrive("ab", base="h0a", finishing=True)
    cluster.prepare("ab", attempt=2)
    assert set(sent(next_run(cluster, "ab", run=3), runs.Registered)) == {"a", "b"}
    assert sent(next_run(cluster, "c"), runs.RunOver)["c"].run == 2
    assert sent(next_run(cluster, "c", run=3), runs.Registered)["c"].run == 3


def test_a_node_that_joins_the_only_run_after_the_others_have_finished_it_takes_part():
    cluster = finished()
    restarted(cluster)
    effects = next_run(cluster, "c", run=1)
    answer = sent(effects, runs.Registered)["c"]
    assert (answer.round, answer.state_hash, answer.source) == (1, "h1", "a")
    (line,) = told(effects, "warning")
    assert line.startswith("'c' comes to 'model' when 'a', 'b' finished it, at round 1: it takes over their state")
    restarted(cluster)
    assert not told(next_run(cluster, "c", run=1), "warning"), "once in a cell"


def test_it_is_sent_away_when_the_others_come_to_the_next():
    cluster = finished()
    restarted(cluster)
    next_run(cluster, "c", run=1)
    assert sent(next_run(cluster, "a"), runs.RunOver)["c"].run == 1
    answers = sent(next_run(cluster, "b") + next_run(cluster, "c"), runs.Registered)
    assert {name: answer.round for name, answer in answers.items()} == {"a": 0, "b": 0, "c": 0}


@pytest.mark.parametrize("says", ["status", "arrived"])
def test_a_node_that_was_out_of_reach_meanwhile_is_told(says):
    cluster = begun("ab")
    cluster.say("b", runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.lose("b", gone=False)
    cluster.arrive("a", base="h0a", finishing=True)
    cluster.prepare("a")
    next_run(cluster, "a")
    assert sent(cluster.feed(rounds.MemberUp("b", 1, 1)), p.RoundQuery, "b")
    effects = cluster.status("b", 0, "h0a") if says == "status" else cluster.arrive("b", base="h0a")
    assert sent(effects, runs.RunOver) == {"b": runs.RunOver(job="model", cell=1, run=1)}
    assert sent(next_run(cluster, "b"), runs.Registered)["b"].source == "a"


def test_a_last_state_that_is_nowhere_any_more_is_not_waited_for():
    """The others have begun the next run with states of their own."""
    cluster = begun()
    for name in "bc":
        cluster.say(name, runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.arrive(base="h0a", finishing=True)
    cluster.prepare("ab")
    assert sent(cluster.prepare("c", state_hash="other"), p.Behind, "c")
    assert not sent(next_run(cluster, "a"), runs.RunOver)
    assert sent(next_run(cluster, "b"), runs.RunOver)["c"].run == 1
    assert set(sent(next_run(cluster, "c"), runs.Registered)) == set("abc")


# ---- a coordinator that is started again ------------------------------------------------------------------------


def test_who_waits_for_the_next_run_is_in_the_log():
    cluster = begun()
    cluster.say("b", anew("b", 2))
    cluster.restart()
    for name in "ac":
        cluster.status(name, 0, "h0a")
    cluster.say("b", anew("b", 2))
    cluster.status("b", 0, "h0b", joining=True, holds=False)
    cluster.arrive("ac", base="h0a", finishing=True)
    cluster.prepare("ac")
    assert set(sent(next_run(cluster, "ac"), runs.Registered)) == set("abc")


@pytest.mark.parametrize(("cell", "running"), [(1, "bc"), (0, "")], ids=["in the cell", "after it"])
def test_who_left_while_it_waited_for_the_next_run_is_not_in_it_after_a_restart(cell, running):
    """With its own model it would begin a run that nobody else is in."""
    cluster = begun()
    for name in "bc":
        cluster.say(name, runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.say("a", anew("a", 2))
    cluster.say("a", p.LeftRounds(job="model", reason="interrupted"))
    cluster.feed(rounds.CellLeft(1, "a", "interrupted"))
    cluster.arrive("bc", base="h0a", finishing=True)
    cluster.prepare("bc")
    for name in set("bc") - set(running):
        cluster.feed(rounds.CellLeft(1, name, "ok"))
    cluster.restart(cell=cell, running=running)
    cluster.status("a", 0, "h0a", left=True, holds=False)
    for name in "bc":
        cluster.status(name, 1, "h1", left=True)
    assert (cluster.job.run, cluster.job.state_hash) == (1, "h1")
    if running:
        next_run(cluster, "bc")
        assert {name for name, one in cluster.job.participants.items() if one.active} == {"b", "c"}


def test_a_log_in_which_the_first_that_came_wanted_a_later_run_is_read():
    """It had caught an error of its own before it registered in the first."""
    cluster = Cluster()
    cluster.say("b", anew("b", 2))
    cluster.restart()
    assert cluster.job.later.keys() == {"b"}
    assert set(sent(next_run(cluster, "ac", run=1), runs.Registered)) == {"a", "c"}


def test_a_run_goes_on_after_a_restart_at_its_own_number():
    cluster = finished()
    next_run(cluster)
    cluster.restart()
    for name in "abc":
        cluster.status(name, 0, "h0a")
    assert (cluster.job.run, cluster.job.round) == (2, 0)
    assert set(sent(cluster.arrive(base="h0a"), p.Seal)) == set("abc")


def test_that_a_run_was_finished_without_a_last_round_is_in_the_log():
    cluster = begun()
    for name in "bc":
        cluster.say(name, runs.Joined(job="model", round=0, state_hash="h0a"))
    cluster.arrive(base="h0a", finishing=True, samples=0.0)
    assert sent(cluster.effects, p.Finished).keys() == set("abc")
    cluster.restart()
    for name in "abc":
        cluster.status(name, 0, "h0a", left=True)
    restarted(cluster)
    next_run(cluster, "c", run=1)
    assert sent(next_run(cluster, "a"), runs.RunOver)["c"].run == 1


def test_a_log_of_before_runs_had_numbers_is_read():
    cluster = finished()
    before = cluster.log
    for record in before:
        record.get("register", {}).pop("run", None)
        record.get("settings", {}).pop("run", None)
    cluster.records = [msgspec.convert(record, Record) for record in before]
    cluster.restart()
    assert (cluster.job.run, cluster.job.round, cluster.job.state_hash) == (1, 1, "h1")


def test_views_are_told_first_of_the_model_that_is_trained_now_or_was_last():
    cluster = Cluster("ab")
    cluster.say("a", register(job="encoder"))
    cluster.say("b", register(job="encoder"))
    cluster.feed(rounds.CellBegan(2, ("a", "b")))
    for job in ("head", "zebra"):
        cluster.say("a", register(job=job, cell=2))
        cluster.say("b", register(job=job, cell=2))
    assert [view.name for view in rounds.job_views(cluster.state)] == ["head", "zebra", "encoder"]
    cluster.say("a", register(job="encoder", cell=2))
    assert [view.name for view in rounds.job_views(cluster.state)] == ["encoder", "head", "zebra"]


# ---- a state that another strategy keeps otherwise -------------------------------------------------------------------


def kept(state_hash, keeps="mean", *, cell=1, **fields):
    return register(state_hash, cell, keeps=keeps, **fields)


def after_gradients():
    """Two of three nodes have the mean of gradients of round 9; the next cell begins on all three."""
    cluster = Cluster("abc")
    cluster.feed(rounds.CellBegan(1, ("b", "c")))
    for name in "bc":
        cluster.say(name, kept("h0", round=9, resume="kept", resume_round=9))
    cluster.feed(rounds.CellBegan(2, tuple("abc")))
    return cluster


def test_the_state_that_nodes_of_the_cell_have_converted_is_the_one_of_all():
    cluster = after_gradients()
    effects = cluster.say("a", kept("ha", "float32", cell=2))
    for name in "bc":
        effects += cluster.say(name, kept("h1", "float32", cell=2, round=9, holds_state=True))
    answers = sent(effects, runs.Registered)
    assert {name: (a.round, a.state_hash, a.source) for name, a in answers.items()} == {
        "a": (9, "h1", "b"), "b": (9, "h1", None), "c": (9, "h1", None),
    }  # fmt: skip
    assert not [effect for effect in effects if isinstance(effect, rounds.Tell)]


def test_a_state_that_only_nodes_elsewhere_have_as_it_was_is_not_waited_for_and_that_is_told():
    cluster = after_gradients()
    cluster.feed(rounds.CellBegan(3, ("a",)))
    effects = cluster.say("a", kept("ha", "float32", cell=3))
    answer = sent(effects, runs.Registered)["a"]
    assert (answer.round, answer.state_hash, answer.source) == (0, "ha", None)
    texts = [effect.text for effect in effects if isinstance(effect, rounds.Tell)]
    assert texts == ["no node of this cell holds round 9 of 'model': it goes on from round 0"]


def test_kept_alike_it_is_taken_from_a_node_elsewhere():
    for keeps in ("mean", ""):  # the latter as an older journal has it
        cluster = Cluster("abc")
        cluster.feed(rounds.CellBegan(1, ("b", "c")))
        for name in "bc":
            cluster.say(name, kept("h0", keeps, round=9, resume="kept", resume_round=9))
        cluster.feed(rounds.CellBegan(2, ("a",)))
        answer = sent(cluster.say("a", kept("ha", cell=2)), runs.Registered)["a"]
        assert (answer.round, answer.state_hash, answer.source) == (9, "h0", "b")


# ---- nodes of the cell that are in no run ----------------------------------------------------------------------


def test_nodes_whose_cell_ended_without_the_sync_object_of_the_others_are_named():
    cluster = Cluster()
    cluster.feed(rounds.CellLeft(1, "b", "ok"))
    cluster.feed(rounds.CellLeft(1, "c", "error"))  # which the cell shows
    cluster.say("a", register("h0"))
    (line,) = told(cluster.effects, "warning")
    assert line.startswith(
        "'model' is trained without 'b', where the cell ended without a sync object of this name: make"
    )
    assert next(effect for effect in cluster.effects if getattr(effect, "text", "") == line).in_cell
    cluster.feed(rounds.CellBegan(2, tuple("abc")))  # and once more in the next
    for name in "ab":
        cluster.say(name, register("h0", cell=2))
    cluster.feed(rounds.CellLeft(2, "c", "ok"))
    assert sum("is trained without 'c'" in text for text in told(cluster.effects, "warning")) == 1


def test_nodes_that_have_yet_to_make_their_sync_object_are_named_when_the_others_begin():
    cluster = Cluster()
    for name in "ab":
        cluster.say(name, register("h0"))
    cluster.feed(rounds.Tick(109.0))
    assert told(cluster.effects, "warning") == []
    cluster.feed(rounds.Tick(111.0))
    (line,) = told(cluster.effects, "warning")
    assert line.startswith("'model' begins without 'c', where no sync object of this name was made within 10 s")


def test_nothing_is_told_where_all_come_or_where_a_cell_has_one_sync_object_after_the_other():
    cluster = Cluster().train()
    for name in "abc":
        cluster.feed(rounds.CellLeft(1, name, "ok"))
    cluster.feed(rounds.CellBegan(2, tuple("ab")))
    for name in "ab":
        cluster.say(name, register("h0", cell=2))
    assert told(cluster.effects, "warning") == []
