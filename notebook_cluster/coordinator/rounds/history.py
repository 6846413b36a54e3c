"""What a report says about the run beside the curves: rounds with who waited for whom, checkpoints, cells, versions."""

import time
from typing import TYPE_CHECKING

import msgspec

from notebook_cluster.journal.committed import Rounds
from notebook_cluster.journal.last_run import MAX_CELLS
from notebook_cluster.journal.records import CommitRecord, Record
from notebook_cluster.journal.state import cell_view
from notebook_cluster.protocol.history import CheckpointView, PeerVersions, RunHistory
from notebook_cluster.protocol.rounds import Arrived, Saved

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

MAX_CHECKPOINTS = 500
_MAX_TEXT = 200
_MAX_ARRIVALS = 2000
_MAX_PACKAGES = 64


class CheckpointHistory:
    """Fed by :mod:`.runner`; ``hub`` is asked for cells and peers."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self.checkpoints: list[CheckpointView] = []
        self._arrivals: dict[tuple[str, int], dict[str, float]] = {}

    def arrived(self, node: str, message: Arrived) -> None:
        """A node is at the boundary of a round; one that says so again was there before."""
        places = self._arrivals.setdefault((message.job, message.round), {})
        places.setdefault(node, time.monotonic())
        if len(self._arrivals) > _MAX_ARRIVALS:
            self._arrivals.pop(next(iter(self._arrivals)))

    @property
    def committed(self) -> Rounds:
        """The committed rounds, as the journal has them."""
        return self._hub.log.committed

    def annotated(self, record: Record) -> Record:
        """``record``; a commit with when it was and how long each member waited for the last one."""
        if not isinstance(record, CommitRecord):
            return record
        places = self._arrivals.pop((record.job, record.commit.round), {})
        present = [member.name for member in record.members if member.name in places]
        last = max((places[name] for name in present), default=0.0)
        waits = {name: round(last - places[name], 3) for name in present}
        return msgspec.structs.replace(record, time=time.time(), waits=waits)

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
