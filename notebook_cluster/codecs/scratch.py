"""Memory for what an encoder needs on its way: new pages for each group of chunks cost as much as the work on them."""

import threading
from typing import Any

import numpy as np


class _Kept(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[tuple[str, str], Any] = {}


_KEPT = _Kept()


def scratch(use: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array with whatever is in it, valid until this thread asks for the same ``use`` again. Small ones only: the
    largest of each use stays."""
    kind, size = np.dtype(dtype), int(np.prod(shape))
    key = use, kind.str
    kept = _KEPT.arrays.get(key)
    if kept is None or kept.size < size:
        kept = _KEPT.arrays[key] = np.empty(size, kind)
    return kept[:size].reshape(shape)
