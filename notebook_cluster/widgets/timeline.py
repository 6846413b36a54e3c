"""Rounds on one line of time: a lane for each node, in it a bar for the time that the others waited for it. Those of a
run as one picture for its report (:func:`timeline`), the last ones for a panel (:func:`wait_lanes`)."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

from notebook_cluster.protocol.clock import duration
from notebook_cluster.protocol.state import NodeView, RoundView, RoundWait
from notebook_cluster.widgets.formatting import NO_PLACE, escaped, integer, node_colours, plain, plural
from notebook_cluster.widgets.pictures import LinearAxis, numbers_below, short_labels, time_unit

LANES_SHOWN = 8
"""Nodes that have a lane in a panel."""
_LANES = 24
_WIDTH, _LEFT, _RIGHT, _TOP, _LANE, _BOTTOM = 980, 170, 150, 44, 18, 26
_LETTERS = 24
_BUCKET = 2.0
"""Pixels: of several rounds in them the one with the longest wait is drawn."""
_LONGEST = 1e12
"""Seconds; above it is no wait."""


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
        said = _in_all([seconds for _, seconds in waited[name]])
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


# ---- the last rounds, for a panel ------------------------------------------------------------------------------------


def wait_lanes(waits: Sequence[RoundWait], nodes: Sequence[NodeView]) -> list[dict[str, Any]]:
    """The last rounds, oldest first, as lanes: one with a bar for each round, then one for each of LANES_SHOWN nodes
    that were waited for longest, with a bar for each such wait. A bar is [left, width, text], in percent of the lane.
    Of rounds before the job began anew nothing is shown: they have the same numbers."""
    pairs = enumerate(pairwise(waits), 1)
    waits = waits[max((place for place, (before, wait) in pairs if wait.round <= before.round), default=0) :]
    waits = [wait for wait in waits if math.isfinite(wait.time) and 0 <= wait.seconds < _LONGEST]
    if not waits:
        return []
    begin, end = min(wait.time - wait.seconds for wait in waits), max(wait.time for wait in waits)
    across = max(end - begin, 1e-3)

    def bar(wait: RoundWait, seconds: float, said: str) -> list[float | str]:
        left = 100 * (wait.time - seconds - begin) / across
        return [round(left, 2), round(100 * seconds / across, 2), f"round {integer(wait.round)}{said}"]

    colours, of_node = node_colours(nodes), dict[str, list[RoundWait]]()
    for wait in waits:
        of_node.setdefault(wait.node, []).append(wait)
    longest = sorted(of_node.items(), key=lambda row: -sum(wait.seconds for wait in row[1]))
    lanes = [
        {
            "name": plain(node, 64),
            "said": _in_all([wait.seconds for wait in its]),
            "colour": colours.get(node, NO_PLACE),
            "bars": [bar(wait, wait.seconds, f": {duration(wait.seconds)}") for wait in its],
        }
        for node, its in longest[:LANES_SHOWN]
    ]
    if len(longest) > LANES_SHOWN:
        rest = [wait.seconds for _, its in longest[LANES_SHOWN:] for wait in its]
        more = plural(len(longest) - LANES_SHOWN, "node")
        lanes.append({"name": f"{more} more", "said": _in_all(rest), "colour": NO_PLACE, "bars": []})
    head = {"name": plural(len(waits), "round"), "said": f"in {duration(end - begin)}", "colour": NO_PLACE}
    return [head | {"bars": [bar(wait, 0.0, "") for wait in waits]}, *lanes]


def _in_all(waits: Collection[float]) -> str:
    return f"{duration(sum(waits))} in {plural(len(waits), 'round')}"
