"""What is in a node's namespace, as rows of a table: small, and computed within a given time.

Values are only looked at: of classes that the user wrote no method is called, except that a module lists its
parameters.
"""

import fnmatch
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from notebook_cluster.protocol.interaction import MOST_VARIABLES, Variable
from notebook_cluster.values.content_hash import MOST_HASHED, ContentHash, PlainWalk, content_hash, feed_array
from notebook_cluster.values.encoding import ARRAY_WORDS, dtype_name, library_of, pandas_bytes

_MOST_VALUE = 40
"""Characters of a value that is shown whole."""
_BEGINNING = 20
"""Characters that are shown of a longer one."""
_MOST_BITS = 2000
"""Of an integer that is written out."""
_LEAST_SHARE = 4096
_SHELL_NAMES = frozenset(("In", "Out", "exit", "quit", "get_ipython", "open"))
_NOT_DATA = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_Row = tuple[Variable, Callable[[ContentHash], None] | None]
"""A row without its hash, and what gives the hash."""


def describe_namespace(
    ip: Any, pattern: str = "", *, everything: bool = False, seconds: float = 1.5
) -> tuple[list[Variable], int]:
    """Rows for the variables of the user of shell ``ip``, by name, and how many more there are than a table takes.

    Without ``everything`` none for modules, functions and classes. After ``seconds`` the rows have no hash any more.
    """
    deadline = time.monotonic() + seconds
    nothing = object()
    hidden = ip.user_ns_hidden
    chosen = [
        (name, value)
        for name, value in list(ip.user_ns.items())
        if isinstance(name, str) and not name.startswith("_") and name not in _SHELL_NAMES
        if value is not hidden.get(name, nothing) and (everything or not isinstance(value, _NOT_DATA))
        if not pattern or fnmatch.fnmatchcase(name, pattern)
    ]
    chosen.sort(key=lambda item: item[0])
    rows = [_row(name, value) for name, value in chosen[:MOST_VARIABLES]]
    hashes: dict[str, str] = {}
    # Small ones first: one large model must not take the time of all the others.
    for row, feed in sorted(rows, key=lambda item: item[0].bytes or 0):
        if feed is not None:
            hashes[row.name] = content_hash(deadline, feed)
    return [replace(row, hash=hashes.get(row.name, "")) for row, _ in rows], len(chosen) - len(rows)


def _row(name: str, value: Any) -> _Row:
    """Without shape, size and hash where they cannot be told."""
    try:
        library = library_of(value)
        if library in ARRAY_WORDS:
            return _array(name, value, library)
        if library == "pandas":
            return _frame(name, value)
        tensors = _tensors(value)
        if tensors is not None:
            return _module(name, value, tensors)
        return _plain(name, value)
    except Exception:
        # A tensor on a device that is gone, a module that is not finished: it is there all the same.
        return Variable(name=name, kind=type(value).__name__), None


def _array(name: str, value: Any, library: str) -> _Row:
    word = "parameter" if library == "torch" and type(value).__name__ == "Parameter" else ARRAY_WORDS[library]
    single = library == "numpy" and value.ndim == 0
    row = Variable(
        name=name,
        kind=f"{dtype_name(value)} {'number' if single else word}",
        shape="" if single else str(list(value.shape)),
        device=str(value.device) if library == "torch" else "",
        bytes=int(value.nbytes),
        value=f"{value.item()!r}"[:_MOST_VALUE] if single and value.dtype.kind in "biufc" else "",
    )
    return row, lambda state: feed_array(state, value)


def _frame(name: str, value: Any) -> _Row:
    pandas: Any = sys.modules["pandas"]
    kind, size = type(value).__name__, pandas_bytes(value)

    def feed(state: ContentHash) -> None:
        columns = [str(column) for column in getattr(value, "columns", ())]
        state.feed(f"{kind}{value.shape}{columns}".encode())
        step = size // MOST_HASHED + 1
        state.sampled = step > 1
        part = value.iloc[::step] if hasattr(value, "iloc") else value[::step]
        state.feed(pandas.util.hash_pandas_object(part, index=True).to_numpy().tobytes())

    return Variable(name=name, kind=kind, shape=str(list(value.shape)), bytes=size), feed


def _tensors(value: Any) -> list[tuple[str, Any]] | None:
    """The parameters and buffers of a torch or MLX module, in order; None for anything else."""
    if _is_module(value, "torch.nn"):
        return [*value.named_parameters(), *value.named_buffers()]
    if _is_module(value, "mlx.nn"):
        from mlx.utils import tree_flatten

        return list(tree_flatten(value.parameters()))
    return None


def _is_module(value: object, library: str) -> bool:
    # The library may be there and unfinished, while another thread imports it.
    return isinstance(value, getattr(sys.modules.get(library), "Module", ()))


def _module(name: str, value: Any, tensors: list[tuple[str, Any]]) -> _Row:
    size = sum(int(tensor.nbytes) for _, tensor in tensors)
    # Parameters only, where buffers are told from them.
    counted = value.parameters() if hasattr(value, "named_buffers") else [tensor for _, tensor in tensors]
    count = sum(int(tensor.numel() if hasattr(tensor, "numel") else tensor.size) for tensor in counted)

    def feed(state: ContentHash) -> None:
        for key, tensor in tensors:
            state.feed(key.encode())
            share = int(tensor.nbytes) * MOST_HASHED // size if size > MOST_HASHED else MOST_HASHED
            feed_array(state, tensor, max(share, _LEAST_SHARE))

    row = Variable(
        name=name,
        kind=type(value).__name__,
        shape=f"{count:,} parameter{'' if count == 1 else 's'}",
        device=", ".join(sorted({str(tensor.device) for _, tensor in tensors if hasattr(tensor, "device")})),
        bytes=size,
    )
    return row, feed


def _plain(name: str, value: Any) -> _Row:
    kind = type(value)

    def feed(state: ContentHash) -> None:
        PlainWalk(state).feed(value)

    if value is None:
        return Variable(name=name, kind="None"), None
    if kind in (list, tuple, dict, set, frozenset):
        shape = f"{len(value):,} item{'' if len(value) == 1 else 's'}"
    elif kind in (str, bytes):
        shape = f"{len(value):,} {'characters' if kind is str else 'bytes'}"
    elif kind in (bool, int, float, complex):
        shape = ""
    else:
        return Variable(name=name, kind=kind.__qualname__), None
    shown, size = _written(value), sys.getsizeof(value)
    if shown and len(shown) <= _MOST_VALUE:
        # What is shown whole needs no hash beside it.
        return Variable(name=name, kind=kind.__name__, bytes=size, value=shown), None
    shown = f"{shown[:_BEGINNING]}…" if shown else ""
    return Variable(name=name, kind=kind.__name__, shape=shape, bytes=size, value=shown), feed


def _written(value: Any) -> str:
    """A number, a truth value, or a text and a little more of it than is shown; empty for containers."""
    if isinstance(value, str | bytes):
        return repr(value[: _MOST_VALUE + 1])
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"{value >> (value.bit_length() - _MOST_BITS)}"  # not its digits, but too long to be shown whole
    return repr(value) if isinstance(value, int | float | complex) else ""
