"""Which of the states that machines keep a new cluster goes on from."""

import msgspec
import pytest

from notebook_cluster.coordinator.peers.kept_choice import MOST_ROUND, choose, newest, possible
from notebook_cluster.protocol.kept import MOST_STATES, KeptState


def kept(
    round: int, *, job: str = "model", cluster: str = "digits-1", epoch: int = 1, time: float = 0.0, hash: str = ""
) -> KeptState:
    return KeptState(
        name=f"{job}-kept", job=job, round=round, time=time, bytes=100, state_hash=hash or f"{round:032x}",
        cluster_id=cluster, epoch=epoch,
    )  # fmt: skip


def test_the_highest_round_is_taken_from_all_who_have_it() -> None:
    (chosen,) = choose({"mini": [kept(7)], "desk": [kept(8)], "air": [kept(8)]}, {"mini", "desk", "air"})
    assert (chosen.state.round, chosen.peers, chosen.newer) == (8, ["desk", "air"], None)


def test_of_two_states_of_one_round_the_newer_is_taken() -> None:
    (chosen,) = choose({"mini": [kept(8, time=10, hash="aa")], "desk": [kept(8, time=20, hash="bb")]}, {"mini", "desk"})
    assert (chosen.state.state_hash, chosen.peers) == ("bb", ["desk"])


def test_a_training_of_before_is_not_taken_for_the_newest_however_many_rounds_it_has() -> None:
    old, new = kept(500, cluster="digits-1", epoch=1, time=99), kept(3, cluster="digits-2", epoch=2, time=10)
    (chosen,) = choose({"mini": [old], "desk": [new]}, {"mini", "desk"})
    assert (chosen.state, chosen.newer) == (new, None)
    # nor where the newest one's machine has no node
    assert choose({"mini": [old], "desk": [new]}, {"mini"}) == []
    assert newest({"mini": [old], "desk": [new]}) == [("desk", new)]


def test_a_newer_state_on_a_machine_without_a_node_is_named() -> None:
    (chosen,) = choose({"mini": [kept(8)], "desk": [kept(7)]}, {"desk"})
    assert (chosen.state.round, chosen.newer) == (7, ("mini", kept(8)))


def test_every_job_is_taken_by_itself() -> None:
    states = {"mini": [kept(8, job="teacher"), kept(2, job="student")], "desk": [kept(3, job="student")]}
    assert [(one.state.job, one.state.round) for one in choose(states, {"mini", "desk"})] == [
        ("student", 3), ("teacher", 8),
    ]  # fmt: skip


def test_nothing_is_chosen_of_nothing() -> None:
    assert choose({}, {"mini"}) == []
    assert choose({"mini": []}, {"mini"}) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"round": -1}, {"round": MOST_ROUND}, {"time": float("nan")}, {"time": 1e300}, {"time": -1.0}, {"bytes": -1},
        {"bytes": 1 << 60}, {"name": "../../etc"}, {"name": ""}, {"job": ""}, {"job": "x" * 64}, {"job": "a\x1b[31m"},
        {"state_hash": ""}, {"state_hash": "a" * 129}, {"state_hash": "a b"}, {"epoch": -1}, {"epoch": MOST_ROUND},
        {"cluster_id": "x" * 129},
    ],
)  # fmt: skip
def test_what_cannot_be_a_state_is_dropped(wrong: dict[str, object]) -> None:
    assert possible([msgspec.structs.replace(kept(3), **wrong), kept(4)]) == [kept(4)]


def test_a_peer_lists_no_more_than_a_peer_can_have() -> None:
    assert len(possible([kept(round) for round in range(10_000)])) == MOST_STATES
