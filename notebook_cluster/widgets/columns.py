"""The points of a curve as numpy columns, thinned as in :mod:`.curves`, but for many curves each second.

Loaded with the plotly figure only.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from notebook_cluster.widgets.curves import Curve

Column: TypeAlias = npt.NDArray[np.float64]


def by_step(curve: Curve) -> tuple[Column, Column]:
    """(steps, values); a value NaN between two runs whose steps begin again."""
    x, y = np.asarray(curve.step, np.float64), np.asarray(curve.value, np.float64)
    again = np.flatnonzero(np.diff(x) < 0) + 1
    return np.insert(x, again, x[again]), np.insert(y, again, np.nan)


def by_time(curve: Curve, start: float) -> tuple[Column, Column]:
    """(seconds since ``start``, values)."""
    return np.asarray(curve.time, np.float64) - start, np.asarray(curve.value, np.float64)


def thin(x: Column, y: Column, limit: int) -> tuple[Column, Column]:
    """At most ``limit`` points (at least 4): first, last, lowest and highest of each slice between. A value that is not
    finite stands for the lowest of its slice: a gap stays visible."""
    if len(y) <= limit:
        return x, y
    inner = y[1:-1]
    width = -(-len(inner) // max((limit - 2) // 2, 1))
    rows = -(-len(inner) // width)
    finite = np.isfinite(inner)
    lowest = np.argmin(_in_rows(np.where(finite, inner, np.inf), np.inf, rows, width), axis=1)
    highest = np.argmax(_in_rows(np.where(finite, inner, -np.inf), -np.inf, rows, width), axis=1)
    gaps = _in_rows(np.where(finite, 0.0, 1.0), 0.0, rows, width)
    lowest = np.where(gaps.any(axis=1), np.argmax(gaps, axis=1), lowest)
    begins = 1 + width * np.arange(rows)
    kept = np.unique(np.concatenate(([0], begins + lowest, begins + highest, [len(y) - 1])))
    return x[kept], y[kept]


def _in_rows(values: Column, filling: float, rows: int, width: int) -> Column:
    filled = np.full(rows * width, filling)
    filled[: len(values)] = values
    return filled.reshape(rows, width)
