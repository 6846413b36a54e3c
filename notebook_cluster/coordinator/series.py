"""Curves of a run: at most 2,000 points each, thinned rather than cut."""

from notebook_cluster.protocol.state import Series
from notebook_cluster.protocol.thinning import ThinnedCurve


class SeriesStore:
    """All curves of a cluster, by (node, name)."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, str], ThinnedCurve] = {}
        self._fresh: dict[tuple[str, str], list[tuple[int, float, float]]] = {}

    def add(self, node: str, name: str, step: int, time: float, value: float) -> None:
        self._curves.setdefault((node, name), ThinnedCurve()).add(step, time, value)
        self._fresh.setdefault((node, name), []).append((step, time, value))

    def all(self) -> list[Series]:
        return [
            Series(node=node, name=name, step=list(c.step), time=list(c.time), value=list(c.value), seen=c.seen)
            for (node, name), c in self._curves.items()
        ]

    def take_fresh(self) -> list[Series]:
        """Points since the last call."""
        fresh, self._fresh = self._fresh, {}
        return [
            Series(node=node, name=name, step=[p[0] for p in points], time=[p[1] for p in points],
                   value=[p[2] for p in points])
            for (node, name), points in fresh.items()
        ]  # fmt: skip
