"""Short hashes of what variables hold: equal hashes mean equal values, whatever the node.

blake2b over type, shape and content. Of more than ``MOST_HASHED`` bytes evenly spread pieces are read; the hash then
has ``~`` in front.
"""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from notebook_cluster.values.encoding import dtype_name, library_of

MOST_HASHED = 64 << 20
"""Bytes of one variable."""
_PIECE = 1 << 20
_MOST_ITEMS = 100_000
_DEEPEST = 20
_HEX_DIGITS = 8
_SORTABLE = (str, int, float, bool, bytes, type(None))


class ContentHash:
    """Takes what is to be hashed until the deadline (of ``time.monotonic``)."""

    def __init__(self, deadline: float) -> None:
        self.sampled = False
        """Not everything was looked at."""
        self._deadline = deadline
        self._state = hashlib.blake2b(digest_size=16)

    def feed(self, data: Any) -> None:
        """Raises TimeoutError after the deadline."""
        if time.monotonic() > self._deadline:
            raise TimeoutError("no time is left")
        self._state.update(data)

    def text(self) -> str:
        return ("~" if self.sampled else "") + self._state.hexdigest()[:_HEX_DIGITS]


def content_hash(deadline: float, feed: Callable[[ContentHash], None]) -> str:
    """The hash of what ``feed(state)`` gives; empty when there was no time, or it cannot be read."""
    state = ContentHash(deadline)
    try:
        feed(state)
    except Exception:
        return ""
    return state.text()


def feed_array(state: ContentHash, value: Any, most: int = MOST_HASHED) -> None:
    """Dtype, shape and bytes of a numpy array, torch tensor or MLX array.

    Raises:
        ValueError: it has no bytes in a row.
    """
    library = library_of(value)
    item = int(value.element_size() if library == "torch" else value.itemsize)
    size = int(value.numel() if library == "torch" else value.size)
    state.feed(f"{dtype_name(value)}{tuple(value.shape)}".encode())
    state.sampled |= size * item > most
    read = {"numpy": _numpy_reader, "torch": _torch_reader, "mlx": _mlx_reader}[library](value, size * item > most)
    for start, stop in _pieces(size, item, most):
        state.feed(read(start, stop))


def _pieces(size: int, item: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, stop), in items, of what is read of ``size`` items of ``item`` bytes: all, or pieces spread evenly."""
    step = min(max(_PIECE // max(item, 1), 1), max(most // max(item, 1), 1))
    if size * item <= most:
        yield from ((start, min(start + step, size)) for start in range(0, size, step))
        return
    count = max(most // (step * item), 1)
    for index in range(count):
        start = (size - step) * index // max(count - 1, 1)
        yield start, start + step


def _numpy_reader(value: Any, large: bool) -> Callable[[int, int], bytes]:
    import numpy

    array = numpy.asarray(value)
    if array.dtype.hasobject:
        raise ValueError("objects have no bytes")
    return lambda start, stop: array.flat[start:stop].tobytes()


def _torch_reader(value: Any, large: bool) -> Callable[[int, int], Any]:
    import numpy
    import torch

    if value.layout is not torch.strided or (large and not value.is_contiguous()):
        raise ValueError("it has no bytes in a row")
    flat = value.detach().resolve_conj().resolve_neg().reshape(-1)
    # numpy() of what lies in a tensor's memory would keep resize_() from it from then on
    return lambda start, stop: numpy.from_dlpack(flat[start:stop].cpu().contiguous().view(torch.uint8))


def _mlx_reader(value: Any, large: bool) -> Callable[[int, int], bytes]:
    import mlx.core

    flat = value.reshape(-1)
    return lambda start, stop: bytes(memoryview(flat[start:stop].view(mlx.core.uint8)))


class PlainWalk:
    """Feeds plain data, and arrays in it, to a hash; of what is neither only the type counts."""

    def __init__(self, state: ContentHash) -> None:
        self._state = state
        self._items = 0
        self._rest = MOST_HASHED

    def feed(self, value: Any, depth: int = 0) -> None:
        self._items += 1
        kind = type(value)
        if self._items > _MOST_ITEMS or depth > _DEEPEST:
            self._state.sampled = True
            return
        self._state.feed(f"{kind.__name__}:".encode())
        if kind in (str, bytes):
            data = value[: self._rest].encode("utf-8", "surrogatepass") if kind is str else value[: self._rest]
            self._spend(len(value))
            self._state.feed(f"{len(value)}:".encode() + data)
        elif kind is int:
            self._state.feed(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        elif kind in (bool, float, complex, type(None)):
            self._state.feed(repr(value).encode())
        elif kind in (list, tuple):
            self._state.feed(f"{len(value)}:".encode())
            for item in value:
                self.feed(item, depth + 1)
        elif kind is dict:
            self._unordered([(key, value[key]) for key in value], depth)
        elif kind in (set, frozenset):
            self._unordered([(item, None) for item in value], depth)
        else:
            self._other(value)

    def _unordered(self, pairs: list[tuple[Any, Any]], depth: int) -> None:
        """Equal dicts and sets may have other orders: sorted by how their keys are written."""
        self._state.feed(f"{len(pairs)}:".encode())
        if all(type(key) in _SORTABLE for key, _ in pairs):
            pairs.sort(key=lambda pair: repr(pair[0]))
        else:
            self._state.sampled = True
        for key, item in pairs[:_MOST_ITEMS]:
            self.feed(key, depth + 1)
            self.feed(item, depth + 1)

    def _other(self, value: Any) -> None:
        if library_of(value) in ("numpy", "torch", "mlx"):
            feed_array(self._state, value, max(self._rest, _PIECE))
            self._spend(int(value.nbytes))
        else:
            self._state.sampled = True

    def _spend(self, size: int) -> None:
        self._rest -= size
        if self._rest < 0:
            self._rest, self._state.sampled = 0, True
