"""Curves of a run: at most 2,000 points each, thinned rather than cut."""

from notebook_cluster.protocol.state import Series

MAX_POINTS = 2000


class Curve:
    """One series. When it is full every second point goes, and from then on only every second comes in."""

    def __init__(self) -> None:
        self.step: list[int] = []
        self.time: list[float] = []
        self.value: list[float] = []
        self._stride = 1
        self._seen = 0

    def add(self, step: int, time: float, value: float) -> bool:
        """True when the point was kept."""
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return False
        self.step.append(step)
        self.time.append(time)
        self.value.append(value)
        if len(self.step) >= MAX_POINTS:
            self.step, self.time, self.value = self.step[::2], self.time[::2], self.value[::2]
            self._stride *= 2
        return True


class SeriesStore:
    """All curves of a cluster, by (node, name)."""

    def __init__(self) -> None:
        self._curves: dict[tuple[str, str], Curve] = {}
        self._fresh: dict[tuple[str, str], list[tuple[int, float, float]]] = {}

    def add(self, node: str, name: str, step: int, time: float, value: float) -> None:
        curve = self._curves.setdefault((node, name), Curve())
        if curve.add(step, time, value):
            self._fresh.setdefault((node, name), []).append((step, time, value))

    def all(self) -> list[Series]:
        return [
            Series(node=node, name=name, step=list(c.step), time=list(c.time), value=list(c.value))
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
