"""A cluster that took over what one before it has left: where its jobs begin, and that they do so once."""

from notebook_cluster.protocol import runs
from notebook_cluster.rounds.leader import machine as rounds
from tests.rounds_helpers import Cluster, register, sent


def taken(state_hash="h0", **fields):
    return register(state_hash, resume="model-kept", taken=True, **fields)


def test_all_begin_from_the_node_that_has_what_was_taken_over():
    cluster = Cluster("abc")
    cluster.say("a", taken("ha"))
    cluster.say("b", taken("hb", resume_round=12, round=12))
    answers = sent(cluster.say("c", taken("hc")), runs.Registered)
    assert {name: (a.round, a.state_hash, a.source) for name, a in answers.items()} == {
        "a": (12, "hb", "b"), "b": (12, "hb", None), "c": (12, "hb", "b"),
    }  # fmt: skip


def test_where_the_cluster_has_a_state_already_nobody_goes_back():
    cluster = Cluster("abc")
    for name in "abc":
        cluster.say(name, taken("h0", resume_round=12, round=12))
    cluster.feed(rounds.CellBegan(2, tuple("abc")))
    effects = cluster.say("a", register("h0", cell=2, round=12, holds_state=True))
    # two new kernels, which are most
    effects += cluster.say("b", taken("h9", cell=2, resume_round=9, round=9))
    effects += cluster.say("c", taken("hc", cell=2))
    answers = sent(effects, runs.Registered)
    assert {name: (a.round, a.source) for name, a in answers.items()} == {
        "a": (12, None),
        "b": (12, "a"),
        "c": (12, "a"),
    }


def test_what_no_node_of_the_cell_has_is_an_error_that_says_where_to_run_it_and_not_a_new_beginning():
    cluster = Cluster("ab")
    cluster.say("a", taken("ha"))
    refused = sent(cluster.say("b", taken("hb")), runs.RegisterRefused)
    assert refused["a"].reason == (
        "what this cluster took over of job 'model' ('model-kept') is not on a, b: run the cell also on a node of the "
        "machine that has it, or begin anew with fresh=True"
    )
    # with the node that has it, it is taken
    cluster.feed(rounds.CellBegan(2, tuple("ab")))
    effects = cluster.say("a", taken("ha", cell=2)) + cluster.say("b", taken("hb", cell=2, resume_round=12, round=12))
    assert {name: a.round for name, a in sent(effects, runs.Registered).items()} == {"a": 12, "b": 12}
