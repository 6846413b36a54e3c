"""The coordinator's side of the rounds when nothing breaks: registering, sealing, committing, finishing, joining."""

import pytest

from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol import runs
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.numerics.outer import bits_float, float_bits
from tests.rounds_helpers import Cluster, register, sent, told, weights

# ---- registering ---------------------------------------------------------------------------------------------


def test_the_lowest_rank_has_the_state_and_the_others_fetch_it():
    cluster = Cluster()
    assert not sent(cluster.say("b", register("hb")), runs.Registered)
    assert not sent(cluster.say("c", register("hc")), runs.Registered)
    answers = sent(cluster.say("a", register("ha")), runs.Registered)
    assert answers["a"].source is None
    assert (answers["b"].source, answers["b"].state_hash, answers["b"].source_incarnation) == ("a", "ha", 1)
    assert answers["c"].source == "a"


def test_an_equal_model_needs_no_transfer():
    cluster = Cluster("ab")
    cluster.say("b", register("same"))
    assert sent(cluster.say("a", register("same")), runs.Registered)["b"].source is None


def test_a_node_whose_cell_ended_is_not_waited_for():
    cluster = Cluster("ab")
    cluster.say("a", register())
    assert sent(cluster.feed(rounds.CellLeft(1, "b", "error")), runs.Registered, "a")


def test_a_silent_node_is_waited_for_until_the_grace_is_over():
    cluster = Cluster("ab")
    cluster.say("b", register("hb"))
    assert not sent(cluster.feed(rounds.Tick(109.0)), runs.Registered)
    assert sent(cluster.feed(rounds.Tick(110.0)), runs.Registered, "b")[0].source is None
    assert sent(cluster.say("a", register("ha")), runs.Registered, "a")[0].source == "b"


def test_another_model_is_refused_with_the_first_parameter_that_differs():
    cluster = Cluster("ab")
    cluster.say("a", register(schema=[("conv1.weight", [16, 1, 3, 3], "float32")]))
    effects = cluster.say("b", register(schema=[("conv1.weight", [32, 1, 3, 3], "float32")], schema_hash="t"))
    assert sent(effects, runs.RegisterRefused, "b")[0].reason == (
        "model of 'b' has 'conv1.weight' 32x1x3x3 float32, 'a' (rank 0) has 'conv1.weight' 16x1x3x3 float32: "
        "use the same model on every node"
    )
    assert sent(effects, runs.Registered, "a")


@pytest.mark.parametrize(("what", "value"), [("every", "30 seconds"), ("codec", "int8"), ("strategy", "LocalSGD")])
def test_different_settings_are_refused_by_name(what, value):
    cluster = Cluster("ab")
    cluster.say("a", register())
    reason = sent(cluster.say("b", register(**{what: value})), runs.RegisterRefused, "b")[0].reason
    assert f"'b' has {what}={value}, 'a' (rank 0) has {what}=" in reason


def test_a_joiner_is_answered_at_once_with_a_live_holder():
    cluster = Cluster("abc").train("ab")
    cluster.feed(rounds.Tick(111.0))
    answer = sent(cluster.say("c", register("hc")), runs.Registered, "c")[0]
    assert answer.source in ("a", "b")
    assert (answer.round, answer.state_hash) == (0, "h0")


def committed(names="abc"):
    """One round is over; its state is h1."""
    cluster = Cluster(names).train(names)
    cluster.arrive(names)
    cluster.prepare(names)
    return cluster


def rerun(cluster, names="abc", **fields):
    for name in names:
        cluster.feed(rounds.CellLeft(1, name, "ok"))
    cluster.feed(rounds.CellBegan(2, tuple(names)))
    effects = []
    for name in names:
        held = {"round": 1, "state_hash": "h1", "holds_state": True, "cell": 2}
        effects += cluster.say(name, register(**{**held, **fields}))
    return sent(effects, runs.Registered)


def test_running_the_cell_again_goes_on_from_the_held_state():
    answers = rerun(committed())
    assert {(a.round, a.state_hash, a.source) for a in answers.values()} == {(1, "h1", None)}


def test_a_new_kernel_in_the_new_cell_takes_the_held_state():
    cluster = committed("ab")
    cluster.feed(rounds.CellBegan(2, ("a", "b")))
    cluster.say("a", register("new", cell=2))
    answers = sent(cluster.say("b", register("h1", cell=2, round=1, holds_state=True)), runs.Registered)
    assert (answers["a"].source, answers["a"].round, answers["b"].source) == ("b", 1, None)


def test_new_kernels_everywhere_start_anew_and_that_is_said():
    cluster = committed("ab")
    answers = rerun(cluster, "ab", round=0, state_hash="new", holds_state=False)
    assert {(a.round, a.state_hash) for a in answers.values()} == {(0, "new")}
    assert "no node holds the state of 'model' any more" in told(cluster.effects, "warning")[0]


def test_fresh_starts_anew_from_the_lowest_ranks_model():
    answers = rerun(committed(), fresh=True, round=0, state_hash="new", holds_state=False)
    assert {(a.round, a.state_hash) for a in answers.values()} == {(0, "new")}


def test_another_model_in_a_new_cell_starts_the_job_anew():
    answers = rerun(committed(), schema=[("v", [3], "float32")], round=0, state_hash="new", holds_state=False)
    assert {(a.round, a.state_hash) for a in answers.values()} == {(0, "new")}


def test_attempts_of_a_job_that_starts_anew_are_never_those_of_the_old_one():
    cluster = committed()
    rerun(cluster, fresh=True, round=0, state_hash="h0", holds_state=False)
    seal = sent(cluster.arrive("abc"), p.Seal, "a")[0]
    assert (seal.round, seal.attempt) == (1, 2)


def test_resume_takes_the_state_of_the_newest_checkpoint_found():
    cluster = Cluster("abc")
    cluster.say("a", register("ha", resume="digits"))
    cluster.say("b", register("hb", resume="digits", resume_round=12))
    answers = sent(cluster.say("c", register("hc", resume="digits", resume_round=8)), runs.Registered)
    assert (answers["b"].source, answers["b"].round) == (None, 12)
    assert (answers["a"].source, answers["c"].source, answers["a"].state_hash) == ("b", "b", "hb")


def test_a_checkpoint_that_nobody_found_is_named_with_the_nodes():
    cluster = Cluster("ab")
    cluster.say("a", register(resume="digits"))
    refused = sent(cluster.say("b", register(resume="digits")), runs.RegisterRefused)
    assert set(refused) == {"a", "b"}
    assert "checkpoint 'digits' was not found on a, b" in refused["a"].reason


def test_who_has_the_checkpoint_may_be_slow():
    cluster = Cluster("abc")
    cluster.say("a", register("ha", resume="digits"))
    cluster.say("b", register("hb", resume="digits"))
    effects = cluster.feed(rounds.Tick(130.0))
    assert not sent(effects, runs.RegisterRefused)
    answers = sent(cluster.say("c", register("hc", resume="digits", resume_round=8)), runs.Registered)
    assert (answers["c"].source, answers["a"].source, answers["b"].round) == (None, "c", 8)


def test_a_checkpoint_that_nobody_brings_is_not_waited_for_without_an_end():
    cluster = Cluster("abc")
    cluster.say("a", register("ha", resume="digits"))
    cluster.say("b", register("hb", resume="digits"))
    refused = sent(cluster.feed(rounds.Tick(161.0)), runs.RegisterRefused)
    assert set(refused) == {"a", "b"}


# ---- one round -----------------------------------------------------------------------------------------------


def test_sealed_when_all_arrived_in_rank_order_with_weights_by_samples():
    cluster = Cluster().train()
    cluster.arrive("c", samples=20.0)
    cluster.arrive("a", samples=10.0)
    seals = sent(cluster.arrive("b", samples=10.0), p.Seal)
    assert set(seals) == {"a", "b", "c"}
    assert weights(seals["a"]) == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert list(weights(seals["a"])) == ["a", "b", "c"]


def test_slices_are_whole_blocks_shared_out_evenly():
    seal = sent(Cluster().train().arrive(), p.Seal, "a")[0]
    assert [(s.owner, s.start, s.stop) for s in seal.slices] == [("a", 0, 33), ("b", 33, 66), ("c", 66, 100)]


def test_a_large_model_has_several_slices_of_each_owner():
    for blocks, each in ((4095, 1), (4096, 2), (6144, 3), (100_000, 4)):
        cluster = Cluster("ab")
        for name in "ab":
            cluster.say(name, register(blocks=blocks))
        slices = sent(cluster.arrive("ab"), p.Seal, "a")[0].slices
        assert [s.owner for s in slices] == ["a"] * each + ["b"] * each
        assert [s.start for s in slices] == [0, *(s.stop for s in slices[:-1])]
        assert slices[-1].stop == blocks
        sizes = {s.stop - s.start for s in slices}
        assert max(sizes) - min(sizes) <= 1


def test_a_small_model_has_one_owner():
    cluster = Cluster("ab")
    for name in "ab":
        cluster.say(name, register(blocks=5))
    assert [(s.owner, s.start, s.stop) for s in sent(cluster.arrive("ab"), p.Seal, "a")[0].slices] == [("a", 0, 5)]


def test_the_outer_learning_rate_is_the_default_for_the_members_of_this_seal():
    cluster = Cluster("ab").train("ab")
    seal = sent(cluster.arrive("ab"), p.Seal, "a")[0]
    assert bits_float(seal.outer.lr_bits) == pytest.approx(0.6)
    cluster.lose("b")
    assert bits_float(cluster.job.open.seal.outer.lr_bits) == pytest.approx(0.4)


def test_an_outer_learning_rate_that_was_set_stays():
    cluster = Cluster("a")
    cluster.say("a", register(lr_bits=float_bits(1.0), momentum_bits=0, nesterov=False))
    outer = sent(cluster.arrive("a"), p.Seal, "a")[0].outer
    assert (bits_float(outer.lr_bits), outer.momentum_bits, outer.nesterov) == (1.0, 0, False)


def test_commit_is_logged_before_it_is_sent_and_only_when_all_are_prepared():
    cluster = Cluster().train()
    cluster.arrive()
    assert not sent(cluster.prepare("ab"), p.Commit)
    effects = cluster.prepare("c")
    kinds = [type(effect).__name__ for effect in effects]
    assert kinds.index("Log") < kinds.index("Send")
    commits = sent(effects, p.Commit)
    assert set(commits) == {"a", "b", "c"}
    assert (commits["a"].state_hash, commits["a"].members) == ("h1", ["a", "b", "c"])


def test_the_record_of_a_commit_names_members_weights_slices_and_outer_step():
    record = next(r for r in committed().log if r["kind"] == "commit")
    assert [m["name"] for m in record["members"]] == ["a", "b", "c"]
    assert bits_float(record["members"][0]["weight_bits"]) == pytest.approx(1 / 3)
    assert record["slice_hashes"] == ["x"]
    assert bits_float(record["outer"]["lr_bits"]) == pytest.approx(0.6)
    assert record["commit"]["state_hash"] == "h1"


def test_applying_an_event_leaves_the_old_state_as_it_was():
    cluster = Cluster().train()
    before = cluster.state
    job = before.jobs["model"]
    cluster.arrive()
    cluster.prepare()
    assert before.jobs["model"] is job
    assert (job.round, job.open, job.participants["a"].arrived) == (0, None, None)


def test_a_node_that_makes_its_sync_object_again_is_waited_for():
    """It holds the state: a faster node must not go on alone while that is being answered."""
    cluster = Cluster("ab").train("ab")
    cluster.arrive("b")
    effects = cluster.say("a", register("h0"))
    assert not sent(effects, p.Seal)
    assert sent(effects, runs.Registered, "a")[0].source is None
    assert weights(sent(cluster.arrive("a"), p.Seal, "b")[0]) == {"a": 0.5, "b": 0.5}


def test_a_node_that_makes_another_sync_object_on_the_newest_state_is_waited_for():
    cluster = committed("ab")
    cluster.arrive("b", number=2, base="h1")
    effects = cluster.say("a", register("h1", round=1, holds_state=True))
    assert not sent(effects, p.Seal)
    assert sent(effects, runs.Registered, "a")[0].source is None
    assert sent(cluster.arrive("a", number=2, base="h1"), p.Seal).keys() == {"a", "b"}


def test_what_a_member_said_before_it_heard_of_the_commit_does_not_leave_it_behind():
    cluster = committed("ab")
    cluster.say("b", runs.Joined(job="model", round=0, state_hash="h0"))
    assert not sent(cluster.arrive("a", number=2, base="h1"), p.Seal)
    assert sent(cluster.arrive("b", number=2, base="h1"), p.Seal).keys() == {"a", "b"}


# ---- the end of the loop -------------------------------------------------------------------------------------


def test_leftover_steps_of_all_form_a_last_round():
    cluster = Cluster("ab").train("ab")
    seal = sent(cluster.arrive("ab", finishing=True), p.Seal, "a")[0]
    assert seal.last
    assert sent(cluster.prepare("ab"), p.Commit)["a"].last


def test_a_node_that_finished_receives_only_until_the_others_finish():
    cluster = Cluster("ab").train("ab")
    cluster.arrive("a", finishing=True, samples=0.0)
    seal = sent(cluster.arrive("b"), p.Seal, "a")[0]
    assert weights(seal) == {"a": 0.0, "b": 1.0}
    assert [s.owner for s in seal.slices] == ["b"]
    assert not seal.last


def test_finished_when_nothing_is_left():
    cluster = Cluster("ab").train("ab")
    assert not sent(cluster.arrive("a", finishing=True, samples=0.0), p.Finished)
    assert set(sent(cluster.arrive("b", finishing=True, samples=0.0), p.Finished)) == {"a", "b"}


def test_whoever_finishes_waits_for_a_node_that_is_on_its_way_in():
    cluster = Cluster("ab").train("a")
    cluster.feed(rounds.Tick(111.0))
    cluster.say("b", register("hb"))
    assert not sent(cluster.arrive("a", finishing=True, samples=0.0), p.Finished)
    cluster.say("b", runs.Joined(job="model", round=0, state_hash="h0"))
    assert set(sent(cluster.arrive("b", finishing=True, samples=0.0), p.Finished)) == {"a", "b"}


def test_no_samples_at_all_make_a_round_without_an_outer_step():
    cluster = Cluster("ab").train("ab")
    seal = sent(cluster.arrive("ab", samples=0.0), p.Seal, "a")[0]
    assert seal.slices == []
    assert sent(cluster.prepare("ab", state_hash="h0", slices=()), p.Commit)["a"].members == []


def test_a_node_that_leaves_is_not_waited_for():
    cluster = Cluster().train()
    cluster.arrive("ab")
    seal = sent(cluster.say("c", p.LeftRounds(job="model", reason="error: ValueError")), p.Seal, "a")[0]
    assert list(weights(seal)) == ["a", "b"]


# ---- joining -------------------------------------------------------------------------------------------------


def test_a_join_takes_effect_at_the_next_seal_and_aborts_nothing():
    cluster = Cluster("abc").train("ab")
    cluster.feed(rounds.Tick(111.0))
    cluster.arrive("ab")
    effects = cluster.say("c", register("hc")) + cluster.say("c", runs.Joined(job="model", round=0, state_hash="h0"))
    assert not sent(effects, p.Seal)
    assert sent(cluster.prepare("ab"), p.Commit)


def test_a_joiner_whose_transfer_outlasted_a_round_catches_up_at_its_boundary():
    cluster = Cluster("abc").train("ab")
    cluster.feed(rounds.Tick(111.0))
    cluster.arrive("ab")
    cluster.say("c", register("hc"))
    cluster.prepare("ab")
    cluster.say("c", runs.Joined(job="model", round=0, state_hash="h0"))
    behind = sent(cluster.arrive("c"), p.Behind, "c")[0]
    assert (behind.round, behind.state_hash, behind.counted) == (1, "h1", False)
    assert [(row.round, row.attempt, row.state_hash) for row in behind.missed] == [(1, 1, "h1")]
    cluster.say("c", runs.Joined(job="model", round=1, state_hash="h1"))
    cluster.arrive("ab", number=2, base="h1")
    assert sent(cluster.arrive("c", number=2, base="h1"), p.Seal, "c")


# ---- what views show -----------------------------------------------------------------------------------------


def test_views_see_members_bytes_and_whom_a_round_waits_for():
    cluster = committed()
    for name in "abc":
        cluster.say(name, p.Applied(job="model", round=1, state_hash="h1", bytes_sent=1000, steps=100))
    cluster.say("a", p.Applied(job="model", round=1, state_hash="h1", bytes_sent=1000, steps=100))
    cluster.arrive("ab", number=2, base="h1")
    (view,) = rounds.job_views(cluster.state)
    assert (view.round, view.members, view.waiting_for) == (1, ["a", "b", "c"], ["c"])
    assert view.bytes_sent == 3000
    assert view.bytes_data_parallel == pytest.approx(100 * 2 * 4 * 25_600 * 2, rel=1e-3)
    assert not told(cluster.effects, "error")
