"""``nc.should_stop`` and ``nc.mean_metrics``: what all nodes decide together, also with unequal batches."""

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from notebook_cluster.node.namespace.api import node_runtime
from notebook_cluster.protocol.decisions import MEAN_METRICS, MOST_METRICS, MOST_NAME, SHOULD_STOP

_BY = ("any", "majority", "all")


def should_stop(flag: Any, by: Literal["any", "majority", "all"] = "any") -> bool:
    """Whether all nodes stop, the same on every node: ``if nc.should_stop(patience == 0): break``.

    Waits until every node of the cell has answered. A node that will not make this call answers nothing and is left
    out: it waits in ``sync.finish()`` or at the cell's end, has ended the cell, was lost or makes no progress, or has
    left a loop over ``nc.shard`` in which others still are, and waits in what comes after. So nodes may have different
    numbers of batches. A node that waits in a round for one that asks here counts as a no; a stop that is decided
    meanwhile is the answer of its next call at this line, and also of a node's that joins the cell later.

    Calls are counted for each line: the third call here meets the third call of the others, whatever their epochs are.
    In a cell that is replayed, and in one that only this node runs, the answer is ``flag``.

    Args:
        flag: True or False, 0 or 1, or an array or tensor with one such element.
        by: who has to say True: ``any`` node, the ``majority`` (more than half of those that answer) or ``all``.

    Raises:
        TypeError, ValueError: an argument is none of these; names it and its value.
        ValueError: the nodes made different calls; names both.
        Deadlock: another node waits for this one in another call; names both.
    """
    wanted = _flag(flag)
    if by not in _BY:
        raise ValueError(f'should_stop: by={by!r}: use "any", "majority" or "all"')
    runtime = node_runtime(SHOULD_STOP)
    if runtime.replaying():
        return wanted
    _in_cell(runtime.cell(), SHOULD_STOP)
    return runtime.decisions.ask(SHOULD_STOP, runtime.blocked.site(), by=by, flag=wanted).stop


class MeanMetrics(dict[str, float]):
    """What :func:`mean_metrics` returns: name -> mean over ``nodes``, whose weights add up to ``weight``."""

    def __init__(self, means: Mapping[str, float], nodes: tuple[str, ...], weight: float) -> None:
        super().__init__(means)
        self.nodes = nodes
        self.weight = weight


def mean_metrics(*, weight: Any = 1.0, **metrics: Any) -> MeanMetrics:
    """The means of numbers over all nodes, the same bits on every node:
    ``nc.mean_metrics(loss=loss_sum / count, weight=count)["loss"]``.

    Sums ``weight * value`` of the nodes, over the sum of the weights, in float64. With the number of samples as
    ``weight``, and means over those samples as values, that is the mean over the samples of all nodes; with the default
    every node counts the same. Who is waited for, and who is left out, is as for :func:`should_stop`; ``nodes`` of the
    result says who is in.

    A node of weight 0 has no data: its values count for nothing, even NaN. Where all weights are 0 the means are NaN.
    A value that is NaN or infinite makes the mean so; both are said in a warning that names the nodes.

    Args:
        weight: at least 0 and finite.
        metrics: numbers, or arrays or tensors with one element; the same names on every node.

    Returns:
        A dict with the names; its ``nodes`` are the names of the nodes that are in it, in rank order, and ``weight`` is
        the sum of the weights.

    Raises:
        TypeError, ValueError: an argument is no such number; names it and its value.
        ValueError: the nodes made different calls; names both.
        Deadlock: another node waits for this one in another call; names both.
    """
    if not metrics:
        raise TypeError("mean_metrics: nothing to take the mean of: pass numbers by name, such as loss=0.5")
    if len(metrics) > MOST_METRICS or max(map(len, metrics)) > MOST_NAME:
        raise ValueError(f"mean_metrics: at most {MOST_METRICS} numbers with names of at most {MOST_NAME} characters")
    numbers = {name: _number(name, value) for name, value in metrics.items()}
    size = _number("weight", weight)
    if not 0 <= size < math.inf:
        raise ValueError(f"mean_metrics: weight={size!r}: use a finite number of at least 0, such as the samples")
    runtime = node_runtime(MEAN_METRICS)
    if runtime.replaying():
        return MeanMetrics(numbers, (runtime.name,), size)
    _in_cell(runtime.cell(), MEAN_METRICS)
    decided = runtime.decisions.ask(MEAN_METRICS, runtime.blocked.site(), metrics=numbers, weight=size)
    if decided.trouble:
        warnings.warn(f"mean_metrics: {'; '.join(decided.trouble)}", RuntimeWarning, stacklevel=2)
    means = {name: decided.means[name] for name in numbers}
    return MeanMetrics(means, tuple(decided.serials), decided.weight)


def _in_cell(cell: int, name: str) -> None:
    if not cell:
        raise RuntimeError(f"{name} works while a cell runs: use it in a %%on_all cell")


def _flag(value: Any) -> bool:
    plain = _element("should_stop", "flag", value)
    if type(plain) is not bool and not (isinstance(plain, int | float) and plain in (0, 1)):
        raise TypeError(f"should_stop: flag={_shown(value)}: use True or False, such as loss < 0.1")
    return bool(plain)


def _number(name: str, value: Any) -> float:
    plain = _element("mean_metrics", name, value)
    if not isinstance(plain, int | float):
        raise TypeError(f"mean_metrics: {name}={_shown(value)} is a {type(value).__name__}: use a number")
    try:
        return float(plain)
    except OverflowError:
        raise ValueError(f"mean_metrics: {name}={_shown(value)} is too large for a float64") from None


def _element(call: str, name: str, value: Any) -> Any:
    """The one element of an array or tensor as a number of Python; everything else as it is."""
    item = getattr(value, "item", None)
    if not callable(item):
        return value
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        single = f"{name}.any()" if name == "flag" else f"{name}.mean()"
        raise TypeError(f"{call}: {name} has shape {shape}: use a single number, such as {single}")
    return item()


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + " ..."
