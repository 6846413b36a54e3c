"""Which points of a run's curves a tracker has not logged yet."""

from collections.abc import Iterable
from typing import NamedTuple

from notebook_cluster.client.curve_rows import outside_name, place_of_curve
from notebook_cluster.protocol.state import Series
from notebook_cluster.tracking.remembered import Target

CLOCK = 1.0
"""Seconds: the times of one node's points may step back by so much, when its clock becomes known better."""


class NewPoint(NamedTuple):
    """``place``: two names, of the run of a job and of the node; ``curve``: which one it is in Target.last."""

    place: tuple[str, str]
    metric: str
    step: int
    time: float
    value: float
    curve: str


def new_points(
    pieces: Iterable[Series], target: Target, places: dict[str, list[int]], *, memory: bool
) -> list[NewPoint]:
    """Points of ``pieces`` that are not in ``target``, in order of time; runs that are new are put into ``places``.

    ``memory``: also the memory that nodes use. Pieces of one curve follow each other in order; when the file was
    written anew they begin with points that were logged before, thinned.
    """
    pieces = list(pieces)
    _note_runs(places, pieces)
    found: list[NewPoint] = []
    last = dict(target.last)
    for one in pieces:
        if one.name == "memory" and not memory:
            continue
        curve = "\n".join((one.job, str(one.run), one.node, one.name))
        place = place_of_curve(one.job, _place(places, one), one.node)
        metric = outside_name(one.name)
        for step, time, value in zip(one.step, one.time, one.value, strict=True):
            before = last.get(curve)
            if before is None or time > before[1] or (step > before[0] and time > before[1] - CLOCK):
                found.append(NewPoint(place, metric, step, time, value, curve))
                last[curve] = (step, time if before is None else max(time, before[1]))
    return sorted(found, key=lambda point: point.time)


def note_logged(target: Target, points: Iterable[NewPoint]) -> None:
    """They are logged: they are not new any more."""
    for point in points:
        before = target.last.get(point.curve, (0, point.time))
        target.last[point.curve] = point.step, max(point.time, before[1])
        target.points += 1


def _note_runs(places: dict[str, list[int]], pieces: Iterable[Series]) -> None:
    for job, run in sorted({(one.job, one.run) for one in pieces if one.job}):
        runs = places.setdefault(job, [])
        if run not in runs:
            runs.append(run)


def _place(places: dict[str, list[int]], one: Series) -> int | None:
    return places[one.job].index(one.run) + 1 if one.job else None
