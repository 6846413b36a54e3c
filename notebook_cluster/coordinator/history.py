"""What a report says about the run beside the curves: rounds with who waited for whom, checkpoints, cells, versions."""

import time
from typing import TYPE_CHECKING, Any

from notebook_cluster.coordinator.cells import cell_view
from notebook_cluster.protocol.history import CheckpointView, PeerVersions, RoundView, RunHistory
from notebook_cluster.protocol.rounds import Arrived, Saved
from notebook_cluster.protocol.state import RoundWait

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

MAX_ROUNDS = 2000
MAX_CHECKPOINTS = 500
MAX_CELLS = 500
SHOWN_WAITS = 8
"""Rounds of each job that panels show."""
_MAX_TEXT = 200
_MAX_PACKAGES = 64


class Rounds:
    """The committed rounds of all jobs, from the records of the run log.

    Attributes:
        rounds: at most MAX_ROUNDS, oldest first; of two neighbours that are long past the one with the longer wait.
        seen: how many there were.
    """

    def __init__(self) -> None:
        self.rounds: list[RoundView] = []
        self.seen = 0

    def replay(self, record: dict[str, Any]) -> None:
        """Take over a record of the run log, as :meth:`History.annotated` made it."""
        if record["kind"] == "void":
            # The job is back at the round before: what was said about this one is no more.
            self.rounds = [r for r in self.rounds if r.job != record["job"] or r.round < record["round"]]
        if record["kind"] != "commit" or "time" not in record:
            return
        commit = record["commit"]
        self.seen += 1
        self.rounds.append(
            RoundView(
                job=record["job"], round=commit["round"], time=record["time"], members=list(commit["members"]),
                waits=record["waits"], bytes_sent=record["bytes_sent"], hash_mismatches=record["hash_mismatches"],
                state_hash=commit["state_hash"],
            )
        )  # fmt: skip
        if len(self.rounds) > MAX_ROUNDS:
            old, new = self.rounds[: MAX_ROUNDS // 2], self.rounds[MAX_ROUNDS // 2 :]
            self.rounds = [max(pair, key=_longest) for pair in zip(old[::2], old[1::2], strict=False)] + new

    def waits(self, job: str) -> list[RoundWait]:
        """The last rounds of ``job`` for panels: for whom was waited, and how long at most."""
        found = []
        for one in reversed(self.rounds):
            if one.job == job and len(one.waits) > 1:
                found.append(RoundWait(round=one.round, node=min(one.waits, key=one.waits.__getitem__),
                                       seconds=_longest(one)))  # fmt: skip
            if len(found) == SHOWN_WAITS:
                break
        return found[::-1]


class History:
    """Fed by :mod:`.rounds_host`; ``hub`` is asked for cells and peers."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self.committed = Rounds()
        self.checkpoints: list[CheckpointView] = []
        self._arrivals: dict[tuple[str, int], dict[str, float]] = {}

    def arrived(self, node: str, message: Arrived) -> None:
        """A node is at the boundary of a round; one that says so again was there before."""
        places = self._arrivals.setdefault((message.job, message.round), {})
        places.setdefault(node, time.monotonic())
        if len(self._arrivals) > MAX_ROUNDS:
            self._arrivals.pop(next(iter(self._arrivals)))

    def annotated(self, record: dict[str, Any]) -> dict[str, Any]:
        """``record`` of the run log, a commit with when it was and how long each member waited for the last one."""
        if record["kind"] == "commit":
            places = self._arrivals.pop((record["job"], record["commit"]["round"]), {})
            present = [member["name"] for member in record["members"] if member["name"] in places]
            last = max((places[name] for name in present), default=0.0)
            waits = {name: round(last - places[name], 3) for name in present}
            record = {**record, "time": time.time(), "waits": waits}
        self.committed.replay(record)
        return record

    def saved(self, message: Saved) -> None:
        """A checkpoint is on disk."""
        name, path = message.name[:_MAX_TEXT], message.path[:1000]
        view = CheckpointView(name=name, job=message.job[:_MAX_TEXT], round=message.round, path=path, time=time.time())
        self.checkpoints = [*self.checkpoints, view][-MAX_CHECKPOINTS:]

    def view(self) -> RunHistory:
        """Everything, for a report."""
        cells = list(self._hub.state.cells.values())
        return RunHistory(
            rounds=self.committed.rounds, rounds_seen=self.committed.seen, checkpoints=self.checkpoints,
            cells=[cell_view(cell) for cell in cells[-MAX_CELLS:]], cells_seen=len(cells), peers=self.peers(),
        )  # fmt: skip

    def peers(self) -> list[PeerVersions]:
        """What the connected peers said about themselves."""
        rows = []
        for link in self._hub.peers.links.values():
            if link.info is not None:
                packages = list(link.info.packages.items())[:_MAX_PACKAGES]
                rows.append(
                    PeerVersions(
                        peer=link.name, python=link.info.python[:_MAX_TEXT], platform=link.info.platform[:_MAX_TEXT],
                        packages={name[:_MAX_TEXT]: version[:_MAX_TEXT] for name, version in packages},
                    )
                )  # fmt: skip
        return rows


def _longest(one: RoundView) -> float:
    return max(one.waits.values(), default=0.0)
