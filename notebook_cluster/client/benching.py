"""How fast the nodes of a cluster reach each other, as people ask for it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from notebook_cluster.client.requests import RunningCluster
from notebook_cluster.client.stream import wait
from notebook_cluster.protocol.measuring import MEGABYTE, MeasureWay, PairMeasured, Way
from notebook_cluster.protocol.state import ClusterView, NodeView, by_rank

MEGABYTES = 16
BENCH_HEADS = ("from", "to", "way", "MB/s", "round trip (ms)")


@dataclass(frozen=True)
class BenchedWay:
    """The way from one node to another, as frames of training take it."""

    source: str
    target: str
    way: Way
    """``ipc``, ``tcp+curve`` or ``relay``; empty where nothing was found."""
    megabytes_per_s: float | None
    """One way, 1 MB = 1,000,000 bytes."""
    round_trip_ms: float | None
    """Of an empty frame and its answer: the median of several."""
    megabytes: float
    """That were sent for it."""
    error: str = ""
    """Why there are no figures."""

    def cells(self) -> tuple[str, ...]:
        """The row below BENCH_HEADS."""
        if self.megabytes_per_s is None or self.round_trip_ms is None:
            return self.source, self.target, self.error, "-", "-"
        return self.source, self.target, self.way, f"{self.megabytes_per_s:.4g}", f"{self.round_trip_ms:.3g}"


def who_is_left_out(state: ClusterView) -> dict[str, str]:
    """Nodes to and from which nothing is measured now, and why."""
    return {node.name: node.reason or node.condition for node in by_rank(state.nodes) if not _is_there(node)}


def _is_there(node: NodeView) -> bool:
    return node.rank is not None and node.condition in ("ok", "refused")


class Benching(RunningCluster):
    """The part of :class:`.cluster.Cluster` that measures how fast nodes reach each other."""

    def bench(
        self,
        megabytes: int = MEGABYTES,
        *,
        on_way: Callable[[BenchedWay, int, int], None] = lambda way, done, ways: None,
    ) -> list[BenchedWay]:
        """Measure the way from each node to each other one, one at a time; nobody's namespace or cells know of it.
        Nodes that are not there are left out (:func:`who_is_left_out`); with one node the list is empty.

        Args:
            megabytes: 1 to 64, to send for a bandwidth; fewer where that would take more than a few seconds.
            on_way: called after each one with it, how many are done and how many there are.

        Raises:
            ClusterError: a cell runs, or begins meanwhile.
        """
        found: list[BenchedWay] = []
        names = [node.name for node in by_rank(self.state().nodes) if _is_there(node)]
        pairs = itertools.combinations(names, 2)
        ways = [way for one, other in pairs for way in ((one, other), (other, one))]
        for source, target in ways:
            request = MeasureWay(source=source, target=target, megabytes=megabytes)
            found.append(_benched(source, target, wait(self._request(request, PairMeasured))))
            on_way(found[-1], len(found), len(ways))
        return found


def _benched(source: str, target: str, measured: PairMeasured) -> BenchedWay:
    if measured.error or not measured.bytes_per_s:
        error = measured.error or "no answer in time"
        return BenchedWay(source, target, measured.way, None, None, 0.0, error)
    return BenchedWay(
        source, target, measured.way, round(measured.bytes_per_s / MEGABYTE, 3),
        round(measured.median_round_trip * 1000, 4), measured.sent / MEGABYTE,
    )  # fmt: skip
