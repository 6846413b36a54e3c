"""Checkpoints as the coordinator orders them."""

from notebook_cluster.protocol import rounds as p
from notebook_cluster.rounds.leader import machine as rounds
from tests.rounds_helpers import Cluster, sent

REQUEST = p.CheckpointRequest(job="model", name="digits")


def cluster_in_training(names="abc"):
    return Cluster(names).train(names)


def saved(ticket=1, **fields):
    return p.Saved(job="model", name="digits", round=0, ticket=ticket, **{"path": "/x", **fields})


def test_all_nodes_asking_make_one_checkpoint_of_the_committed_round():
    cluster = cluster_in_training()
    orders = sent(cluster.say("b", REQUEST), p.Save)
    assert set(orders) == {"a", "b", "c"}
    assert (orders["a"].writer, orders["a"].round, orders["a"].members) == ("a", 0, ["a", "b", "c"])
    assert not sent(cluster.say("a", REQUEST), p.Save)


def test_the_answer_of_the_writer_goes_to_everybody():
    cluster = cluster_in_training()
    cluster.say("b", REQUEST)
    assert not sent(cluster.say("c", saved()), p.Saved)
    assert set(sent(cluster.say("a", saved()), p.Saved)) == {"a", "b", "c"}


def test_asking_again_in_the_same_round_is_answered_with_what_is_there():
    cluster = cluster_in_training()
    cluster.say("b", REQUEST)
    cluster.say("a", saved())
    effects = cluster.say("c", REQUEST)
    assert not sent(effects, p.Save)
    assert sent(effects, p.Saved, "c")[0].path == "/x"


def test_a_node_on_the_notebooks_own_machine_writes_when_there_is_one():
    cluster = cluster_in_training()
    cluster.feed(rounds.HomeNodes(("b",)))
    assert sent(cluster.say("a", REQUEST), p.Save, "c")[0].writer == "b"


def test_the_writer_is_told_of_parts_that_will_not_come():
    cluster = cluster_in_training()
    cluster.say("a", REQUEST)
    assert sent(cluster.lose("c"), p.PartMissing) == {"a": p.PartMissing(job="model", ticket=1, node="c")}
    assert not sent(cluster.feed(rounds.Tick(101.0)), p.PartMissing)


def test_a_lost_writer_is_replaced():
    cluster = cluster_in_training()
    cluster.say("b", REQUEST)
    order = sent(cluster.lose("a"), p.Save, "b")[0]
    assert (order.writer, order.ticket, order.members) == ("b", 2, ["b", "c"])


def test_a_view_gets_the_path_or_the_error():
    cluster = cluster_in_training()
    cluster.feed(rounds.SaveRequested("digits", "", 7))
    assert rounds.SaveAnswer(7, "/x", "") in cluster.say("a", saved())
    cluster.feed(rounds.SaveRequested("again", "model", 8))
    effects = cluster.say("a", p.Saved(job="model", name="again", round=0, ticket=2, error="disk full"))
    assert rounds.SaveAnswer(8, "", "disk full") in effects


def test_a_view_that_names_no_job_or_an_unknown_one_is_told_what_there_is():
    (answer,) = Cluster().feed(rounds.SaveRequested("digits", "", 1))
    assert "run a cell that makes nc.DiLoCo(model) first" in answer.error
    (answer,) = cluster_in_training().feed(rounds.SaveRequested("digits", "other", 1))
    assert "there is no training job 'other'; choose one of model" in answer.error


def test_a_restarted_coordinator_gives_no_ticket_again():
    """Else parts that were on their way for the old order would get into the checkpoint of the new one."""
    cluster = cluster_in_training()
    before = sent(cluster.say("b", REQUEST), p.Save, "a")[0]
    cluster.restart()
    for name in "abc":
        cluster.status(name, 0, before.state_hash)
    after = sent(cluster.say("b", REQUEST), p.Save, "a")[0]
    assert after.ticket > before.ticket
    assert not sent(cluster.say("a", saved(before.ticket)), p.Saved)
    assert set(sent(cluster.say("a", saved(after.ticket)), p.Saved)) == {"a", "b", "c"}
