"""A coordinator that was killed and started again: what it does before and after every node has said where it is."""

import msgspec

from notebook_cluster.protocol import rounds as p
from notebook_cluster.rounds.leader import machine as rounds
from tests.rounds_helpers import Cluster, register, sent

REQUEST = p.CheckpointRequest(job="model", name="digits")


def restarted(names="abc", jobs=("model",)):
    """Nodes that train these jobs; a new coordinator asks them where they are."""
    cluster = Cluster(names)
    for job in jobs:
        for name in names:
            cluster.say(name, register("h0", job=job))
    cluster.restart(names=names, running=names)
    return cluster


def arrived(node, job="model"):
    """At the boundary of round 1, as this node's answer to RoundQuery says it."""
    mine = p.Arrived(
        job=job, round=1, incarnation=1, base_hash="h0", samples=10.0, steps=100, schema_hash="s", codec="float32",
        norm=1.0, finite=True, contribution=1,
    )  # fmt: skip
    return p.RoundStatus(job=job, round=0, state_hash="h0", phase="arrived", cell=1, arrived=mine)


def test_what_a_node_says_of_one_job_does_not_decide_another():
    cluster = restarted("ab", jobs=("model", "other"))
    cluster.say("a", arrived("a"))
    cluster.say("a", arrived("a", "other"))
    assert not sent(cluster.say("b", arrived("b", "other")), p.Seal, "b")[1:]
    assert cluster.job.open is None
    views = {view.name: view for view in rounds.job_views(cluster.state)}
    assert (views["model"].phase, views["model"].waiting_for) == ("recovering", ["b"])
    assert views["other"].phase == "exchanging"
    (seal,) = sent(cluster.say("b", arrived("b")), p.Seal, "b")
    assert [member.name for member in seal.members] == ["a", "b"]


def test_a_node_that_says_nothing_is_not_waited_for_without_end():
    cluster = restarted("ab")
    cluster.say("a", arrived("a"))
    assert cluster.job.open is None
    cluster.feed(rounds.Tick(200.0 + cluster.state.settings.recover_grace))
    assert rounds.job_views(cluster.state)[0].phase != "recovering"


def test_a_checkpoint_that_is_asked_for_too_early_is_written_once_it_is_known_who_holds_the_state():
    cluster = restarted()
    assert not cluster.say("b", REQUEST)
    assert not cluster.feed(rounds.SaveRequested("digits", "model", 7))
    for name in "ab":
        assert not sent(cluster.status(name, 0, "h0"), p.Save)
    orders = sent(cluster.status("c", 0, "h0"), p.Save)
    assert set(orders) == set("abc")
    done = p.Saved(job="model", name="digits", round=0, ticket=orders["a"].ticket, path="/x")
    effects = cluster.say(orders["a"].writer, done)
    assert set(sent(effects, p.Saved)) == set("abc")
    assert rounds.SaveAnswer(7, "/x", "") in effects


def test_what_the_writer_says_of_a_checkpoint_from_before_is_not_taken_for_the_one_asked_for_now():
    cluster = restarted()
    for name in "abc":
        cluster.status(name, 0, "h0")
    order = sent(cluster.say("b", REQUEST), p.Save, "b")[0]
    before = p.Saved(job="model", name="other", round=0, ticket=order.ticket, path="/before")
    assert not cluster.say(order.writer, before)
    done = msgspec.structs.replace(before, name="digits", path="/x")
    assert sent(cluster.say(order.writer, done), p.Saved, "b")[0].path == "/x"
