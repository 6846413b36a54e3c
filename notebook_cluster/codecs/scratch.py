"""Memory for what an encoder needs on its way: new pages for each group of chunks cost as much as the work on them."""

import math
import threading
from typing import Any

import numpy as np

from notebook_cluster.memory import Scratch

_LARGEST = 16 << 20
"""Bytes: more than any group of chunks has."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.scratch = Scratch(_LARGEST)


_KEPT = _Kept()


def scratch(use: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array with whatever is in it, valid until this thread asks for the same ``use`` again."""
    kind = np.dtype(dtype)
    return _KEPT.scratch.take(use, math.prod(shape) * kind.itemsize).view(kind).reshape(shape)
