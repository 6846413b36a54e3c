"""``python -m benchmarks.churn.desk``: the notebook's side, as a process on the desk that is told what to do by lines.

A line in is ``{"id": 3, "do": "restart", "with": ["peer-1"]}``, a line out the answer with that id. Whenever the
coordinator is gone it is started again, as ``%cluster start`` does.
"""

import json
import sys
import threading
import time
from typing import Any

from notebook_cluster.client import Cluster, ClusterError

NAME = "churn"


class Desk:
    """A client of the cluster, of whichever coordinator it has by now."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._over = False
        self._lock = threading.Lock()
        """One answer is written at a time."""

    @property
    def cluster(self) -> Cluster:
        """ClusterError: the coordinator is not there now."""
        cluster = self._cluster
        if cluster is None or cluster.connection.closed is not None:
            raise ClusterError("the coordinator is gone")
        return cluster

    def start(self, code: str, known: list[str]) -> list[str]:
        """Begin, with one node here and one on each peer that shares with ``code``."""
        self._cluster = Cluster.start(NAME, local=1, peers=known, code=code)
        threading.Thread(target=self._revive, daemon=True).start()
        return [node.name for node in self.cluster.state().nodes]

    def _revive(self) -> None:
        while not self._over:
            try:
                self.cluster  # noqa: B018
            except ClusterError:
                self._start_again()
            time.sleep(0.05)

    def _start_again(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
        try:
            self._cluster = Cluster.start(NAME)
        except ClusterError as error:
            self._cluster = None
            print(f"not started again: {error}", file=sys.stderr, flush=True)
            time.sleep(0.2)

    # ---- what may be asked -----------------------------------------------------------------------------------

    def execute(self, source: str) -> int:
        """The number of the cell, which runs on all nodes; nodes that come later join it and replay no cell before."""
        return self.cluster.execute(source, replay=False).cell

    def state(self) -> dict[str, Any]:
        """Nodes, the last cell, and the newest lines for people."""
        state = self.cluster.state()
        return {
            "head": state.head,
            "pid": self.cluster.connection.file.pid,
            "nodes": {row.name: (row.condition, row.incarnation, row.reason, row.log_tail) for row in state.nodes},
            "cell": None if state.cell is None else (state.cell.id, state.cell.status, state.cell.nodes),
            "events": [(row.time, row.text) for row in state.events],
            "mismatches": sum(job.hash_mismatches for job in state.jobs),
        }

    def restart(self, node: str) -> None:
        """A new kernel."""
        self.cluster.restart(node)

    def remove(self, node: str) -> None:
        """The node leaves."""
        self.cluster.remove(node)

    def add(self, peer: str) -> list[str]:
        """The peer's node comes back."""
        return self.cluster.add(peer)

    def hand_over(self, to: str) -> str:
        """The cluster is led from that peer, or from here."""
        return self.cluster.hand_over(to)

    def stop(self) -> None:
        """``%cluster stop``."""
        self._over = True
        self.cluster.stop()

    def answer(self, line: str) -> None:
        """Do what a line says and print the answer."""
        order = json.loads(line)
        try:
            value, error = getattr(self, order["do"])(*order["with"]), ""
        except Exception as caught:
            value, error = None, f"{type(caught).__name__}: {caught}"
        with self._lock:
            print(json.dumps({"id": order["id"], "value": value, "error": error}), flush=True)


def main() -> None:
    desk = Desk()
    for line in sys.stdin:
        threading.Thread(target=desk.answer, args=(line,), daemon=True).start()


if __name__ == "__main__":
    main()
