"""Which elements of a chunk are kept: those of largest magnitude."""

from typing import Any

import numpy as np


def largest(magnitudes: Any, keep: int) -> Any:
    """Indices, ascending, of the ``keep`` largest in each row; of equal ones the first.

    Args:
        magnitudes: float32 (rows, columns), finite (a NaN would be the largest of all and hide the others).
        keep: from 1 to the number of columns.

    Returns:
        int64 (rows, keep).
    """
    rows, columns = magnitudes.shape
    threshold = np.partition(magnitudes, columns - keep, axis=1)[:, columns - keep, None]
    chosen = magnitudes >= threshold
    found = np.flatnonzero(chosen)
    if found.size > rows * keep:
        _drop_ties(magnitudes, threshold, chosen, keep)
        found = np.flatnonzero(chosen)
    indices = found.reshape(rows, keep)
    indices -= np.arange(rows)[:, None] * columns
    return indices


def _drop_ties(magnitudes: Any, threshold: Any, chosen: Any, keep: int) -> None:
    """Where more than ``keep`` reach the threshold, those that just do so and come last are not chosen."""
    for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > keep):
        tied = np.flatnonzero(magnitudes[row] == threshold[row])
        excess = int(np.count_nonzero(chosen[row])) - keep
        chosen[row, tied[-excess:]] = False
