"""Which of the states that machines have kept a new cluster goes on from. Pure.

Of each job the newest training counts, which is the one whose coordinators had the highest epoch: what an earlier
cluster of the same name has kept is not mixed up with it. Of that training it is the state of the highest round, on a
machine that has a node now; the other nodes get it from there.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from notebook_cluster.protocol.clock import clock
from notebook_cluster.protocol.kept import MOST_STATES, KeptState
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.peer import KeptCheckpoint

MOST_ROUND = 1 << 53
MOST_FOLDER = 1000
_MOST_TIME, _MOST_JOB, _MOST_TEXT, _MOST_HASH = 1e11, 63, 200, 128


@dataclass(frozen=True)
class ChosenState:
    """``state`` is on ``peers``, which have nodes. ``newer``: (peer, state) of what is newer and on no such machine."""

    state: KeptState
    peers: list[str]
    newer: tuple[str, KeptState] | None = None


def kept_line(peer: str, kept: KeptCheckpoint) -> str:
    """What people are told of it; empty where it cannot be a checkpoint."""
    if not is_name(kept.name):
        return ""
    when = f", {clock(kept.time)}" if 0 <= kept.time < _MOST_TIME else ""
    job, folder = _printable(kept.job[:_MOST_TEXT]), _printable(kept.folder[:MOST_FOLDER])
    return (
        f"{peer} has kept {kept.name!r} of job {job!r} (round {kept.round}{when}) in {folder}: resume={kept.name!r} "
        "goes on from it"
    )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


def possible(states: Sequence[KeptState]) -> list[KeptState]:
    """Those of what a peer has listed that can be states: a peer that is damaged or lies lists anything."""
    return [state for state in states[:MOST_STATES] if _is_possible(state)]


def choose(kept: Mapping[str, Sequence[KeptState]], usable: Collection[str]) -> list[ChosenState]:
    """One for each job of which a peer in ``usable`` has a state of the newest training, by the names of the jobs."""
    jobs: dict[str, list[tuple[str, KeptState]]] = {}
    for peer, states in kept.items():
        for state in states:
            jobs.setdefault(state.job, []).append((peer, state))
    chosen = [_choose(rows, usable) for _, rows in sorted(jobs.items())]
    return [choice for choice in chosen if choice is not None]


def newest(kept: Mapping[str, Sequence[KeptState]]) -> list[tuple[str, KeptState]]:
    """Of each job the newest state, and on which peer it is."""
    chosen = choose(kept, kept.keys())
    return [(choice.peers[0], choice.state) for choice in chosen]


def _choose(rows: list[tuple[str, KeptState]], usable: Collection[str]) -> ChosenState | None:
    epochs: dict[str, int] = {}
    for _, state in rows:
        epochs[state.cluster_id] = max(state.epoch, epochs.get(state.cluster_id, 0))
    latest = max(rows, key=lambda row: (epochs[row[1].cluster_id], row[1].time))[1].cluster_id
    of_it = sorted(
        (row for row in rows if row[1].cluster_id == latest), key=lambda row: (row[1].round, row[1].time), reverse=True
    )
    here = [row for row in of_it if row[0] in usable]
    if not here:
        return None
    state = here[0][1]
    peers = [peer for peer, other in here if _identity(other) == _identity(state)]
    newer = of_it[0] if of_it[0][1].round > state.round else None
    return ChosenState(state, peers, newer)


def _identity(state: KeptState) -> tuple[str, int, str]:
    return state.name, state.round, state.state_hash


def _is_possible(state: KeptState) -> bool:
    return (
        is_name(state.name)
        and 0 < len(state.job) <= _MOST_JOB
        and state.job.isprintable()
        and 0 <= state.round < MOST_ROUND
        and 0 <= state.epoch < MOST_ROUND
        and 0 <= state.bytes < MOST_ROUND
        and math.isfinite(state.time)
        and 0 <= state.time < _MOST_TIME
        and 0 < len(state.state_hash) <= _MOST_HASH
        and state.state_hash.isalnum()
        and (not state.cluster_id or len(state.cluster_id) <= _MOST_HASH)
    )
