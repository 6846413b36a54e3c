"""The result of one call from the answers of those that took part, in float64."""

import math
from collections.abc import Collection, Mapping

from notebook_cluster.protocol.decisions import Ask

_MOST_NAMES = 6


def vote(by: str, flags: Collection[bool], absent: int) -> bool:
    """Whether to stop; ``absent`` nodes will be asked later and count as a no.

    ``any``: one is enough; ``majority``: more than half of the nodes; ``all``.
    """
    if by == "any":
        return any(flags)
    if by == "majority":
        return 2 * sum(flags) > len(flags) + absent
    return all(flags) and not absent


def mean_of(answers: Mapping[str, Ask]) -> tuple[dict[str, float], float, list[str]]:
    """The means by weight, the sum of the weights, and what is wrong with them.

    An answer of weight 0 counts for nothing, whatever its numbers are. Where all weights are 0 the means are NaN. Sums
    are exact until they are rounded once (``math.fsum``), so the order of the nodes does not matter.
    """
    counted = {node: ask for node, ask in answers.items() if ask.weight > 0}
    names = next(iter(answers.values())).metrics
    if not counted:
        who = "this node is" if len(answers) == 1 else f"all {len(answers)} nodes are"
        return (
            dict.fromkeys(names, math.nan),
            0.0,
            [f"the weights of {_listed(list(answers))} are 0 ({who} without data)"],
        )
    total = _sum([ask.weight for ask in counted.values()])
    means = {name: _mean([(ask.weight, ask.metrics[name]) for ask in counted.values()], total) for name in names}
    trouble = []
    for name in names:
        for value in ("nan", "inf", "-inf"):
            nodes = [node for node, ask in counted.items() if str(ask.metrics[name]) == value]
            if nodes:
                trouble.append(f"{name} is {value} on {_listed(nodes)}")
    return means, total, trouble


def _mean(rows: list[tuple[float, float]], total: float) -> float:
    if math.isinf(total) or len(rows) == 1:
        return _sum([value / len(rows) for _, value in rows])
    return _sum([weight * value for weight, value in rows]) / total


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # larger than a float64, or inf - inf
        return sum(values)


def _listed(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _MOST_NAMES} more" if len(nodes) > _MOST_NAMES else ""
    return ", ".join(nodes[:_MOST_NAMES]) + more


def difference(asks: Mapping[str, Ask]) -> str:
    """One line when the nodes made different calls; empty when it is the same."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node, ask in asks.items():
        groups.setdefault((signature(ask), ask.site), []).append(node)
    if len({call for call, _ in groups}) < 2:
        return ""
    parts = [
        f"{_listed(nodes)} {'calls' if len(nodes) == 1 else 'call'} {call} ({site})"
        for (call, site), nodes in groups.items()
    ]
    return f"{', '.join(parts)}: make the same calls on every node, with the same arguments and in the same order"


def signature(ask: Ask) -> str:
    """What has to be the same on all nodes, as people write it."""
    inside = f"by={ask.by!r}" if ask.by else ", ".join(f"{name}=" for name in sorted(ask.metrics))
    return f"{ask.name}({inside})"
