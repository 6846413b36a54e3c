"""The coordinator's side of unequal machines: a quorum and its grace, late work, outer settings that change."""

import pytest

from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol import runs
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.numerics.outer import bits_float, float_bits
from tests.rounds_helpers import Cluster, register, sent, told, weights


def quorum_cluster(names="abc", quorum=2, grace=5.0, **fields):
    cluster = Cluster(names)
    for name in names:
        cluster.say(name, register("h0", quorum=quorum, grace=grace, **fields))
    return cluster


def test_without_a_quorum_everybody_is_waited_for():
    cluster = Cluster().train()
    cluster.arrive("ab")
    assert not sent(cluster.feed(rounds.Tick(100_000.0)), p.Seal)


def test_a_quorum_closes_the_round_at_once_and_seals_it_after_the_grace():
    cluster = quorum_cluster()
    assert not sent(cluster.arrive("a"), p.Close)
    assert sent(cluster.arrive("b"), p.Close) == {"c": p.Close(job="model", round=1)}
    assert not cluster.feed(rounds.Tick(104.9))
    seals = sent(cluster.feed(rounds.Tick(105.0)), p.Seal)
    assert seals.keys() == {"a", "b"}
    assert weights(seals["a"]) == {"a": 0.5, "b": 0.5}
    assert not seals["a"].last


def test_who_comes_within_the_grace_is_in_and_then_nobody_waits_longer():
    cluster = quorum_cluster()
    cluster.arrive("ab")
    seals = sent(cluster.arrive("c", samples=5.0, steps=20), p.Seal)
    assert weights(seals["a"]) == {"a": 0.4, "b": 0.4, "c": 0.2}


@pytest.mark.parametrize(("quorum", "enough"), [(1, 1), (0.5, 2), (0.75, 3), (1.0, 4), (9, 4)])
def test_a_quorum_is_a_number_of_nodes_or_a_share_of_them(quorum, enough):
    cluster = quorum_cluster("abcd", quorum)
    for count, name in enumerate("abcd", 1):
        effects = cluster.arrive(name)
        assert bool(sent(effects, p.Close) or sent(effects, p.Seal)) == (count in (enough, 4))
        if count == enough:
            break


def test_nodes_that_only_receive_do_not_make_a_quorum():
    cluster = quorum_cluster(quorum=2)
    cluster.arrive("ab", samples=0.0, finishing=True)
    cluster.feed(rounds.Tick(1000.0))
    assert cluster.job.open is None
    assert sent(cluster.arrive("c"), p.Seal)


def test_a_late_node_is_told_where_the_state_is_and_brings_its_work_to_the_next_round():
    cluster = quorum_cluster()
    cluster.arrive("ab")
    cluster.feed(rounds.Tick(106.0))
    assert sent(cluster.prepare("ab"), p.Commit).keys() == {"a", "b"}
    behind = sent(cluster.arrive("c"), p.Behind, "c")[0]
    assert (behind.round, behind.counted) == (1, False)
    cluster.say("c", runs.Joined(job="model", round=1, state_hash="h1"))
    cluster.arrive("c", number=2, base="h1", contribution=1)
    seals = sent(cluster.arrive("ab", number=2, base="h1"), p.Seal)
    assert seals.keys() == {"a", "b", "c"}


def test_a_member_of_the_last_round_that_says_nothing_holds_a_quorum_up_for_the_grace_only():
    cluster = quorum_cluster()
    cluster.arrive()
    cluster.prepare()
    cluster.lose("c", gone=False)
    cluster.feed(rounds.MemberUp("c", 1, 2))
    assert sent(cluster.arrive("ab", number=2, base="h1"), p.Close).keys() == {"c"}
    assert not sent(cluster.feed(rounds.Tick(104.9)), p.Seal)
    assert sent(cluster.feed(rounds.Tick(105.0)), p.Seal).keys() == {"a", "b"}


def test_a_finishing_quorum_does_not_end_the_loop_of_the_others():
    cluster = quorum_cluster()
    cluster.arrive("ab", finishing=True)
    seals = sent(cluster.feed(rounds.Tick(106.0)), p.Seal)
    assert not seals["a"].last


def test_each_round_has_its_own_grace():
    cluster = quorum_cluster()
    cluster.arrive("ab")
    cluster.arrive("c")
    cluster.prepare("abc")
    cluster.feed(rounds.Tick(200.0))
    assert sent(cluster.arrive("ab", number=2, base="h1"), p.Close).keys() == {"c"}
    assert not cluster.feed(rounds.Tick(204.0))
    assert sent(cluster.feed(rounds.Tick(205.5)), p.Seal).keys() == {"a", "b"}


@pytest.mark.parametrize(("what", "value"), [("quorum", 1), ("grace", 2.0)])
def test_another_quorum_or_grace_is_refused_by_name(what, value):
    cluster = Cluster("ab")
    cluster.say("a", register(quorum=2, grace=5.0))
    fields = {"quorum": 2, "grace": 5.0} | {what: value}
    reason = sent(cluster.say("b", register(**fields)), runs.RegisterRefused, "b")[0].reason
    assert f"'b' has {what}={value}, 'a' (rank 0) has {what}=" in reason


# ---- optimisers of nodes that each make the step ---------------------------------------------------------------


def test_who_steps_with_other_settings_is_named_when_that_changes():
    cluster = Cluster().train()
    cluster.arrive("ab", optimizer="SGD(lr=0.1)")
    cluster.arrive("c", optimizer="SGD(lr=0.2)\n" + "x" * 5000)
    (warning,) = told(cluster.effects, "warning")
    assert warning.startswith("optimizers of 'model' differ in round 1 ('a' SGD(lr=0.1), 'c' SGD(lr=0.2)xxx")
    assert len(warning) < 600, "of a hostile node's text no more than a line is told"
    for number in (2, 3):
        cluster.prepare("abc", number=number - 1, state_hash=f"h{number - 1}")
        cluster.arrive("ab", number=number, base=f"h{number - 1}", optimizer="SGD(lr=0.1)")
        cluster.arrive("c", number=number, base=f"h{number - 1}", optimizer="SGD(lr=0.3)")
    assert len(told(cluster.effects, "warning")) == 1, "a schedule changes the numbers in every round"
    cluster.prepare("abc", number=3, state_hash="h3")
    cluster.arrive("ac", number=4, base="h3", optimizer="SGD(lr=0.1)")
    cluster.arrive("b", number=4, base="h3", optimizer="Adam(lr=0.1)")
    assert "'a' SGD(lr=0.1), 'b' Adam(lr=0.1)" in told(cluster.effects, "warning")[1]


def test_who_steps_otherwise_and_is_away_for_a_round_is_not_named_again():
    cluster = Cluster().train()
    unlike = {"a": "SGD(lr=0.1)", "b": "SGD(lr=0.1)", "c": "SGD(lr=0.2)"}
    for number, names in enumerate(("abc", "ab", "cab"), 1):  # who is back is waited for when it arrives
        if names == "ab":
            cluster.lose("c", gone=False)
        elif number > 1:
            cluster.feed(rounds.MemberUp("c", 1, 2))
        for name in names:
            cluster.arrive(name, number=number, base=f"h{number - 1}", optimizer=unlike[name])
        cluster.prepare(names, number=number, state_hash=f"h{number}")
    assert cluster.log[-1]["commit"]["members"] == ["a", "b", "c"]
    assert len([text for text in told(cluster.effects, "warning") if "optimizers" in text]) == 1


# ---- outer settings that change --------------------------------------------------------------------------------


def change(lr, momentum=0.9):
    return p.OuterChange(lr_bits=None if lr is None else float_bits(lr), momentum_bits=float_bits(momentum))


def test_outer_settings_that_were_changed_are_those_of_the_next_seal():
    cluster = Cluster("ab").train("ab")
    seal = sent(cluster.arrive("ab", outer=change(0.25, 0.5)), p.Seal, "a")[0]
    assert (bits_float(seal.outer.lr_bits), bits_float(seal.outer.momentum_bits)) == (0.25, 0.5)
    assert not told(cluster.effects, "warning")


def test_where_nodes_differ_the_lowest_rank_decides_and_the_others_are_named_once():
    cluster = Cluster().train()
    cluster.arrive("a", outer=change(0.25))
    cluster.arrive("b", outer=change(0.5))
    seal = sent(cluster.arrive("c"), p.Seal, "a")[0]
    assert bits_float(seal.outer.lr_bits) == 0.25
    warning = (
        "'b' set other outer settings than 'a', whose rank is lower: round 1 uses outer_lr 0.25, outer_momentum 0.9"
    )
    assert told(cluster.effects, "warning") == [warning]
    cluster.prepare("abc")
    cluster.arrive("a", number=2, base="h1", outer=change(0.25))
    cluster.arrive("b", number=2, base="h1", outer=change(0.5))
    cluster.arrive("c", number=2, base="h1")
    assert told(cluster.effects, "warning") == [warning]


def test_a_learning_rate_given_back_to_the_default_is_that_of_the_members():
    cluster = Cluster("ab")
    for name in "ab":
        cluster.say(name, register("h0", lr_bits=float_bits(0.1)))
    seal = sent(cluster.arrive("ab", outer=change(None)), p.Seal, "a")[0]
    assert seal.outer.lr_bits == float_bits(0.6)


# ---- loops that train another model ----------------------------------------------------------------------------


def play(cluster, number, names="abc", **fields):
    """A round in which ``names`` arrive; who is in ``unchanged`` of ``fields`` has changed nothing."""
    unchanged = fields.pop("unchanged", "")
    for name in names:
        row = {"norm": 0.0} if name in unchanged else {}
        cluster.arrive(name, number=number, base=f"h{number - 1}", **row, **fields)
    cluster.prepare(names, number=number, state_hash=f"h{number}")


def test_a_model_that_no_step_changes_is_named_once():
    cluster = Cluster().train()
    for number in (1, 2):
        play(cluster, number, steps=4, unchanged="bc")
    assert told(cluster.effects, "warning") == []
    cluster.arrive("abc", number=3, base="h2", steps=4, norm=0.0)
    (line,) = told(cluster.effects, "warning")
    assert line.startswith(
        "the model of 'model' is not trained on 'b', 'c': the steps of the loop change nothing in it"
    )
    (effect,) = [effect for effect in cluster.effects if getattr(effect, "text", "") == line]
    assert effect.in_cell
    cluster.prepare("abc", number=3, state_hash="h3")
    play(cluster, 4, steps=4, unchanged="abc")
    assert len(told(cluster.effects, "warning")) == 1, "a round with a change begins the count of 'a' anew"
    play(cluster, 5, steps=40, unchanged="a")
    assert "not trained on 'a':" in told(cluster.effects, "warning")[1]


@pytest.mark.parametrize(
    ("dtypes", "said"),
    [
        (("float32", "float32"), "is the learning rate above 0?"),
        (("float64", "float32"), "above 0, and large enough to change float32, in which rounds are"),
        (("bfloat16", "float32"), "above 0, and large enough to change a number in bfloat16?"),
    ],
)
def test_steps_that_are_too_small_for_the_numbers_of_a_model_are_a_reason(dtypes, said):
    schema = [(f"p{index}", [2], dtype) for index, dtype in enumerate(dtypes)]
    cluster = Cluster()
    for name in "abc":
        cluster.say(name, register("h0", schema=schema))
    play(cluster, 1, steps=40, unchanged="abc")
    (line,) = told(cluster.effects, "warning")
    assert said in line


def test_steps_that_do_nothing_at_first_or_are_none_are_no_fault():
    cluster = Cluster().train()
    play(cluster, 1, steps=9, unchanged="abc")
    play(cluster, 2, steps=100)
    for number in range(3, 8):
        play(cluster, number, steps=0, samples=0.0, unchanged="b")
        assert told(cluster.effects, "warning") == []


def test_a_round_that_is_sealed_again_counts_once_and_every_fragment_has_its_turn():
    cluster = Cluster("ab")
    for name in "ab":
        cluster.say(name, register("h0", fragments=2, fragment_blocks=[50, 50]))
    cluster.arrive("ab", steps=40, norm=0.0)
    cluster.prepare("a", slices=("x",))
    cluster.prepare("b", slices=("y",), state_hash="h9")  # two of two differ: it is played again
    assert cluster.job.attempt == 2
    assert all("not trained" not in line for line in told(cluster.effects, "warning"))
    cluster.prepare("ab", attempt=2)
    cluster.arrive("ab", number=2, base="h1", steps=40, norm=0.0, fragment=1)
    assert sum("not trained on 'a', 'b'" in line for line in told(cluster.effects, "warning")) == 1


def test_of_a_strategy_that_sends_gradients_it_is_said_of_them():
    cluster = Cluster("ab")
    for name in "ab":
        cluster.say(name, register("h0", every_step=True))
    cluster.arrive("ab", steps=10, norm=0.0)
    assert "not trained on 'a', 'b': all gradients are 0." in told(cluster.effects, "warning")[0]


# ---- nodes that do the same work -------------------------------------------------------------------------------


def test_nodes_that_bring_the_same_twice_in_a_row_are_named_once():
    cluster = Cluster().train()
    play(cluster, 1, "ab", sample="x", norm=0.25)
    cluster.arrive("c", number=1, sample="y", norm=0.25)
    cluster.prepare("abc")
    assert told(cluster.effects, "warning") == []
    for number in (2, 3, 4):
        play(cluster, number, "ab", sample="x", norm=0.5)
        cluster.arrive("c", number=number, base=f"h{number - 1}", sample="x", norm=0.75)
        cluster.prepare("abc", number=number, state_hash=f"h{number}")
    (line,) = told(cluster.effects, "warning")
    assert line.startswith("'a', 'b' did the same work for 'model' in rounds 1 and 2, to the bit: ")
    assert "nc.shard(data, batch_size=...)" in line
    (effect,) = [effect for effect in cluster.effects if getattr(effect, "text", "") == line]
    assert effect.in_cell


def test_what_is_the_same_in_one_round_only_or_is_no_work_is_not_named():
    cluster = Cluster().train()
    for number, names in enumerate(("ab", "bc", "ca", ""), 1):
        for name in "abc":
            sample = "x" if name in names else name
            cluster.arrive(name, number=number, base=f"h{number - 1}", sample=sample)
        cluster.prepare("abc", number=number, state_hash=f"h{number}")
    for number in (5, 6, 7):
        play(cluster, number, samples=0.0, steps=0, sample="")
    assert told(cluster.effects, "warning") == []
