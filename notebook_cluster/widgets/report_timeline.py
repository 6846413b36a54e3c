"""The rounds of a run as one picture: a lane for each node, in it a bar for the time that the others waited for it."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from notebook_cluster.protocol.clock import duration
from notebook_cluster.protocol.state import RoundView
from notebook_cluster.widgets.formatting import NO_PLACE, escaped, integer, plain, plural
from notebook_cluster.widgets.pictures import LinearAxis, numbers_below, short_labels, time_unit

_LANES = 24
_WIDTH, _LEFT, _RIGHT, _TOP, _LANE, _BOTTOM = 980, 170, 150, 44, 18, 26
_LETTERS = 24
_BUCKET = 2.0
"""Pixels: of several rounds in them the one with the longest wait is drawn."""


def timeline(rounds: Sequence[RoundView], started: float, colours: dict[str, str]) -> tuple[str, int]:
    """The picture as ``<svg>``, and how many nodes more it has no lane for; empty where nobody was waited for.

    Longest waits first. Above the lanes a stroke is a round that was committed.
    """
    waited = _by_node(rounds)
    if not waited:
        return "", 0
    names = sorted(waited, key=lambda name: -sum(seconds for _, seconds in waited[name]))
    lanes = names[:_LANES]
    times = [one.time - started for one in rounds]
    begin = min(one.time - max(one.waits.values(), default=0.0) - started for one in rounds)
    scale, unit = time_unit(max(times))
    first = max(begin, 0.0) if max(times) > 0 else begin  # a clock that was set back: before the start
    across = LinearAxis(first / scale, max(times) / scale, _LEFT, _WIDTH - _RIGHT)
    height = _TOP + _LANE * len(lanes) + _BOTTOM
    title = "Rounds, and who was waited for"
    parts = [
        f'<svg class="nbc-chart" style="max-width:{_WIDTH}px" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{title}"><text x="8" y="14" class="nbc-chart-title">{title}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="14" text-anchor="end">{unit}</text>',
        f'<text x="{_LEFT - 10}" y="{_TOP - 8}" text-anchor="end">{plural(len(rounds), "round")}</text>',
        _strokes([across.place(time / scale) for time in times]),
    ]
    labels = short_labels([plain(name, 64) for name in lanes], _LETTERS)
    for number, (name, label) in enumerate(zip(lanes, labels, strict=True)):
        top = _TOP + _LANE * number
        said = f"{duration(sum(seconds for _, seconds in waited[name]))} in {plural(len(waited[name]), 'round')}"
        parts += [
            f'<text x="{_LEFT - 10}" y="{top + 12}" text-anchor="end">{escaped(label)}</text>',
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top + 8}" y2="{top + 8}" class="nbc-chart-grid"/>',
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{top + 12}">{said}</text>',
            *_bars(waited[name], top, colours.get(name, NO_PLACE), lambda time: across.place((time - started) / scale)),
        ]
    return "".join([*parts, *numbers_below(across, height), "</svg>"]), len(names) - len(lanes)


def _by_node(rounds: Sequence[RoundView]) -> dict[str, list[tuple[RoundView, float]]]:
    """Node -> the rounds that waited for it, and how long."""
    waited: dict[str, list[tuple[RoundView, float]]] = defaultdict(list)
    for one in rounds:
        if len(one.waits) > 1 and all(map(math.isfinite, one.waits.values())):
            waited[min(one.waits, key=one.waits.__getitem__)].append((one, max(one.waits.values())))
    return waited


def _strokes(places: Sequence[float]) -> str:
    """A stroke for each round, of those that lie on one pixel one."""
    kept = sorted({round(place) for place in places})
    path = "".join(f"M{place} {_TOP - 18}v10" for place in kept)
    return f'<path d="{path}" class="nbc-chart-round" fill="none"/>'


def _bars(
    waited: Sequence[tuple[RoundView, float]], top: int, colour: str, place: Callable[[float], float]
) -> list[str]:
    longest: dict[int, tuple[RoundView, float]] = {}
    for one, seconds in waited:
        bucket = int(place(one.time) / _BUCKET)
        if bucket not in longest or seconds > longest[bucket][1]:
            longest[bucket] = one, seconds
    parts = []
    for one, seconds in longest.values():
        end = place(one.time)
        begin = min(max(place(one.time - seconds), _LEFT), end - 1.5)
        said = f"{plain(one.job, 64)} round {integer(one.round)}: {duration(seconds)}"
        parts.append(
            f'<rect x="{begin:.1f}" y="{top + 2}" width="{end - begin:.1f}" height="{_LANE - 6}" rx="1" '
            f'fill="{escaped(colour)}"><title>{escaped(said)}</title></rect>'
        )
    return parts
