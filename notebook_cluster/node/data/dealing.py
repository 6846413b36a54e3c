"""Parts of what is left: pure functions that give all nodes the same result."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_cluster.node.data.taken import Taken
from notebook_cluster.protocol.mesh import ShardKey

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Positions = NDArray[Any]

_PERIOD = 1 << 12
"""Positions of a stream after which parts by speed repeat."""
_SPEED_SECONDS = 10.0


class MeasuredSpeed:
    """Of this node's loops in one cell: what counts where training tells no speed."""

    def __init__(self) -> None:
        self._measured = 0, 0.0

    def add(self, samples: int, seconds: float) -> None:
        """A loop came back for the next batch after so long."""
        before = self._measured
        if before[1] > _SPEED_SECONDS:  # the older half fades
            before = before[0] // 2, before[1] / 2
        self._measured = before[0] + samples, before[1] + seconds

    def rate(self) -> float:
        """Samples per second; 0: not known. On any thread."""
        samples, seconds = self._measured
        return samples / seconds if samples and seconds > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Cut:
    """What was taken before one generation, and who gets parts of the rest: name, samples per second (0: unknown)."""

    taken: Taken
    receivers: tuple[tuple[str, float], ...]

    def hash(self) -> str:
        """Equal on two nodes that hold the same cut."""
        settled = self.taken.settled()
        form = repr((settled.base, bytes(settled.bits), self.receivers))
        return hashlib.blake2b(form.encode(), digest_size=12).hexdigest()


class EndlessPart:
    """Positions of a stream whose end is not known: ``part[a:b]`` gives int64, ascending.

    Args:
        free: what is left below ``top``; above all is.
        owned: which of each ``period`` of them are in this part.
    """

    def __init__(self, free: "Positions", top: int, owned: "Positions", period: int) -> None:
        self._free, self._top, self._owned, self._period = free, top, owned, period

    def __len__(self) -> int:
        return sys.maxsize if len(self._owned) else 0

    def __getitem__(self, which: slice) -> "Positions":
        import numpy

        start, stop, _ = which.indices(len(self))
        turns = numpy.arange(start, max(start, stop), dtype=numpy.int64)
        each = max(len(self._owned), 1)
        places = turns // each * self._period + self._owned[turns % each]
        below = places[places < len(self._free)]
        return numpy.concatenate([self._free[below], places[len(below) :] - len(self._free) + self._top])


def part_of(cut: Cut, key: ShardKey, name: str) -> "Positions | EndlessPart":
    """The positions of ``name`` in ``cut``: int64, ascending. Empty when it got none."""
    import numpy

    names = [receiver for receiver, _ in cut.receivers]
    speeds = [speed for _, speed in cut.receivers] if key.by_speed else [0.0] * len(names)
    free = cut.taken.free()
    if key.count:
        return deal(free, speeds)[names.index(name)] if name in names else free[:0]
    period = len(names) if not any(speeds) else _PERIOD
    slots = numpy.arange(period)
    owned = deal(slots, speeds)[names.index(name)] if name in names else slots[:0]
    return EndlessPart(free, cut.taken.top, owned, period)


def deal(positions: "Positions", speeds: Sequence[float]) -> "list[Positions]":
    """``positions`` in parts of sizes in proportion to ``speeds``, each spread evenly over the whole.

    A speed of 0 is unknown and counts as the mean of the others; all unknown or equal: every n-th. Sizes are rounded so
    that they add up (largest remainder, the lower index first).
    """
    import numpy

    known = [speed for speed in speeds if speed > 0]
    if not known or all(speed == known[0] for speed in known):
        return [positions[index :: len(speeds)] for index in range(len(speeds))]
    mean = sum(known) / len(known)
    weights = [speed if speed > 0 else mean for speed in speeds]
    exact = [len(positions) * weight / sum(weights) for weight in weights]
    sizes = [int(size) for size in exact]
    by_remainder = sorted(range(len(sizes)), key=lambda index: (sizes[index] - exact[index], index))
    for index in by_remainder[: len(positions) - sum(sizes)]:
        sizes[index] += 1
    places = numpy.concatenate([(numpy.arange(size) + 0.5) / max(size, 1) for size in sizes])
    owners = numpy.repeat(numpy.arange(len(sizes)), sizes)[numpy.argsort(places, kind="stable")]
    return [positions[owners == index] for index in range(len(sizes))]
