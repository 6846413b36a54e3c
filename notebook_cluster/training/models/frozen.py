"""What a model has beside what it trains: a hash of each frozen parameter, by which nodes see that theirs are equal.

Only trainable parameters travel. An adapter that is averaged over nodes with unlike bases fits none of them, and its
loss looks as usual. So a sync object says at its registration what its base is. All bytes of the tensors themselves are
hashed, not the files they were loaded from: a file knows nothing of what was merged, cast or written since, and memory
is read faster than a disk. A tensor that is as it was keeps its hash, also for the next sync object.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from notebook_cluster.protocol.runs import FrozenRow

MOST_ROWS = 4096
"""Of a model with more frozen tensors, those of one module have a hash together."""

PIECE = 16 << 20
"""Bytes that are read at a time: a Stop comes between two, and what is copied for it takes no more memory."""


@dataclass(frozen=True)
class FrozenTensor:
    """One frozen parameter. ``pieces`` gives its bytes in the order of its elements; None: they cannot be read here.
    ``mark``: what is another after every change; None: nothing tells a change."""

    name: str
    shape: list[int]
    dtype: str
    tensor: Any
    mark: tuple[Any, ...] | None
    pieces: Callable[[], Iterator[Any]] | None


_known: dict[int, tuple[Any, tuple[Any, ...], str]] = {}
"""id of a tensor that lives -> (weak reference to it, its mark, its hash)."""


def frozen_rows(tensors: Iterable[FrozenTensor], most: int = MOST_ROWS) -> list[FrozenRow]:
    """(name, shape, dtype, xxh3-128) of each, sorted; the hash is empty where the tensor cannot be read."""
    rows = sorted((one.name, one.shape, one.dtype, _hash(one)) for one in tensors)
    return rows if len(rows) <= most else _together(rows, most)


def unread(rows: list[FrozenRow]) -> str:
    """``'a.weight' and 3 more``: those whose content nobody compares; empty: there are none."""
    names = [name for name, _, _, hash in rows if not hash]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}" if names else ""


def frozen_name(framework: str, rows: list[FrozenRow]) -> str:
    """``torch:`` and one hash of all rows; empty where there are none, or some could not be read."""
    hash = _of_all(rows) if rows else ""
    return f"{framework}:{hash}" if hash else ""


def _hash(one: FrozenTensor) -> str:
    if one.pieces is None:
        return ""
    key, mark = id(one.tensor), one.mark
    known = _known.get(key)
    if known is not None and mark is not None and known[0]() is one.tensor and known[1] == mark:
        return known[2]
    state = xxhash.xxh3_128()
    try:
        for piece in one.pieces():
            state.update(piece)
    except (RuntimeError, TypeError, ValueError):  # a kind of tensor that has no bytes in a row
        return ""
    hash = str(state.hexdigest())
    if mark is not None:
        _known[key] = weakref.ref(one.tensor, lambda _: _known.pop(key, None)), mark, hash
    return hash


def _together(rows: list[FrozenRow], most: int) -> list[FrozenRow]:
    """At most so many rows: one for all tensors below the same modules, with as many parts of their names as fit."""
    for depth in range(max(row[0].count(".") for row in rows), 0, -1):
        modules: dict[str, list[FrozenRow]] = {}
        for row in rows:
            modules.setdefault(".".join(row[0].split(".")[:depth]), []).append(row)
        if len(modules) <= most:
            break
    else:
        modules = {"": rows}
    return [(name, [len(below)], "tensors", _of_all(below)) for name, below in sorted(modules.items())]


def _of_all(rows: list[FrozenRow]) -> str:
    """One hash of what they say; empty where one of them cannot be read."""
    return "" if any(not row[3] for row in rows) else str(xxhash.xxh3_128_hexdigest(repr(rows).encode()))
