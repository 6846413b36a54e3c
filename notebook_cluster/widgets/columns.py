"""Curves as columns of numbers, for those that are drawn each second. Pure."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from notebook_cluster.protocol.thinning import ThinnedCurve
from notebook_cluster.widgets.curves import smoothed

Column: TypeAlias = npt.NDArray[np.float64]
Places: TypeAlias = npt.NDArray[np.intp]
Sent: TypeAlias = npt.NDArray[np.float32 | np.float64]
"""As a column travels: in a binary buffer, a sixth of the size of JSON numbers."""


def by_step(curve: ThinnedCurve) -> tuple[Column, Column]:
    """(steps, values); a value NaN between two runs whose steps begin again."""
    x, y = np.array(curve.step, np.float64), np.array(curve.value, np.float64)
    again = np.flatnonzero(np.diff(x) < 0) + 1
    if not len(again):
        return x, y
    return np.insert(x, again, x[again]), np.insert(y, again, np.nan)


def by_time(curve: ThinnedCurve, start: float) -> tuple[Column, Column]:
    """(seconds since ``start``, values): copies, for an array that numpy looks into cannot grow."""
    return np.array(curve.time, np.float64) - start, np.array(curve.value, np.float64)


def thin(y: Column, limit: int) -> tuple[Places, Column]:
    """(places, values there), as :func:`.curves.thin`, for many curves each second: at most ``limit`` (at least 4),
    first, last, lowest and highest of each slice between. A value that is not finite stands for the lowest of its
    slice: a gap stays visible."""
    if len(y) <= limit:
        return np.arange(len(y)), y
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
    return kept, y[kept]


def smooth(y: Column, limit: int) -> tuple[Places, Column]:
    """(places, values), at most ``limit``: the means of slices where those end, and of those the running mean of
    :func:`.curves.smoothed`. A slice without any finite value is a gap."""
    places = np.arange(len(y))
    width = max(-(-len(y) // limit), 1)
    if width > 1:
        begins = np.arange(0, len(y), width)
        finite = np.isfinite(y)
        counts = np.add.reduceat(finite.astype(np.float64), begins)
        sums = np.add.reduceat(np.where(finite, y, 0.0), begins)
        places = np.minimum(begins + width, len(y)) - 1
        y = np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)
    return places, np.array(smoothed(y.tolist()), np.float64)


def _in_rows(values: Column, filling: float, rows: int, width: int) -> Column:
    filled = np.full(rows * width, filling)
    filled[: len(values)] = values
    return filled.reshape(rows, width)
