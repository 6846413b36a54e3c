"""Values that go from notebook to nodes and back: a small description and raw bytes. Never a pickle.

Plain data (:mod:`.plain`), numpy arrays, torch tensors and MLX arrays (:mod:`.arrays`), pandas frames,
series and indexes (:mod:`.frames`), and lists, tuples and dicts of all these. No library is imported before a
value of its kind is there.

A description is JSON. What comes from another process is checked before anything is made of it: kinds and dtypes
against lists, sizes against the bytes that came, and no library is asked to evaluate a text.
"""

import sys
from collections.abc import Sequence
from typing import Any

from notebook_cluster.protocol.transfers import MOST_VALUE_BYTES
from notebook_cluster.values.arrays import Buffer, pack_array, unpack_array
from notebook_cluster.values.plain import pack_plain, unpack_plain

_ARRAYS = ("numpy", "scalar", "torch", "mlx")
_FRAMES = ("dataframe", "series", "index")
_MOST_BUFFERS = 100_000
ARRAY_WORDS = {"numpy": "array", "torch": "tensor", "mlx": "MLX array"}
"""What people call the arrays of each library."""


def encode_value(value: object) -> tuple[dict[str, Any], list[Buffer]]:
    """``value`` as (description, buffers); the buffers are a copy, later changes of the value do not reach them.

    Raises:
        TypeError: it, or something in it, does not travel. One line that names the type and often the way out.
        ValueError: over 1 GiB, or too much plain data; seen before anything large is copied.
    """
    buffers: list[Buffer] = []
    return _encode(value, buffers, _Budget()), buffers


def decode_value(meta: dict[str, Any], buffers: Sequence[Buffer]) -> object:
    """The value that :func:`encode_value` took. ``meta`` and ``buffers`` may come from an untrusted node.

    Raises:
        ValueError: they do not make a value, or a library for it is not installed here.
    """
    rest = _Rest(buffers)
    try:
        value = _decode(meta, rest)
        if rest.count:
            raise ValueError(f"{rest.count} of its buffers belong to nothing")
    except ValueError:
        raise
    except ImportError as error:
        name = error.name or "a library for it"
        raise ValueError(f"{name} is not installed here: pip install {name}") from None
    except MemoryError:
        raise ValueError("there is not enough memory for it here") from None
    except Exception as error:
        # Libraries answer nonsense with errors of many kinds.
        raise ValueError(f"its description is not readable ({type(error).__name__}: {error})") from None
    return value


def describe(value: object) -> str:
    """What a value is, in a few words: ``float32 3x4 tensor``, ``DataFrame 100x4``, ``dict of 3``, ``float``."""
    library = library_of(value)
    if library == "pandas":
        shape = getattr(value, "shape", ())
        return f"{type(value).__name__} {'x'.join(map(str, shape))}".rstrip()
    if library:
        dtype, word = dtype_name(value), ARRAY_WORDS[library]
        shape = "x".join(map(str, getattr(value, "shape", ())))
        return f"{dtype} {shape} {word}" if shape else f"{dtype} {word if library != 'numpy' else 'number'}"
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def dtype_name(value: Any) -> str:
    """``float32``, whichever library the array is of."""
    return str(value.dtype).rpartition(".")[2]


def pandas_bytes(value: Any) -> int:
    """Bytes that a pandas value says to have, without what its objects hold."""
    measured = value.memory_usage()
    return int(measured.sum() if hasattr(measured, "sum") else measured)


def library_of(value: object) -> str:
    """``numpy``, ``torch``, ``mlx``, ``pandas`` or empty, without importing any of them."""
    numpy, torch, mlx = (sys.modules.get(name) for name in ("numpy", "torch", "mlx.core"))
    # A module may be there and unfinished, while another thread imports it.
    if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
        return "torch"
    if mlx is not None and isinstance(value, getattr(mlx, "array", ())):
        return "mlx"
    pandas = sys.modules.get("pandas")
    kinds = tuple(getattr(pandas, name, ()) for name in ("DataFrame", "Series", "Index", "Categorical"))
    if pandas is not None and isinstance(value, kinds):
        return "pandas"
    if numpy is not None and isinstance(value, (getattr(numpy, "ndarray", ()), getattr(numpy, "generic", ()))):
        return "numpy"
    return ""


class _Budget:
    """Bytes of arrays so far."""

    def __init__(self) -> None:
        self._spent = 0

    def spend(self, value: Any, library: str) -> None:
        """``value`` is about to be copied. ValueError when that is too much."""
        if library == "torch" and str(value.layout) != "torch.strided":
            return  # refused later, and its size means something else
        self._spent += pandas_bytes(value) if library == "pandas" else int(value.nbytes)
        if self._spent > MOST_VALUE_BYTES:
            raise ValueError(f"it has {self._spent / 1e6:,.0f} MB, at most {MOST_VALUE_BYTES >> 30} GiB travels")


def _encode(value: object, buffers: list[Buffer], budget: _Budget) -> dict[str, Any]:
    if len(buffers) > _MOST_BUFFERS:
        raise ValueError(f"it holds more than {_MOST_BUFFERS:,} arrays: stack them")
    library = library_of(value)
    if library:
        budget.spend(value, library)
    if library == "pandas":
        from notebook_cluster.values.frames import pack_frame

        return pack_frame(value, buffers)
    if library:
        meta, data = pack_array(value, library)
        buffers.append(data)
        return meta
    place = len(buffers)
    buffers.append(b"")
    parts: list[dict[str, Any]] = []

    def part(inner: object) -> int | None:
        if not library_of(inner):
            return None
        parts.append(_encode(inner, buffers, budget))
        return len(parts) - 1

    buffers[place] = pack_plain(value, part)
    return {"kind": "plain", "parts": parts} if parts else {"kind": "plain"}


def _decode(meta: dict[str, Any], rest: "_Rest") -> Any:
    kind = meta["kind"]
    if kind in _ARRAYS:
        return unpack_array(meta, rest.take())
    if kind in _FRAMES:
        from notebook_cluster.values.frames import unpack_frame

        return unpack_frame(meta, rest.take)
    if kind != "plain":
        raise ValueError(f"values of kind {str(kind)[:20]!r} are not known")
    text = rest.take()
    parts = [_decode(part, rest) for part in meta.get("parts", [])]
    return unpack_plain(text, _Numbered(parts))


class _Numbered:
    """The parts beside plain data; a number that is none is refused, negative ones too."""

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def __call__(self, number: int) -> Any:
        if type(number) is not int or not 0 <= number < len(self._parts):
            raise ValueError("a part of it is missing")
        return self._parts[number]


class _Rest:
    """Buffers that are not used yet, in order."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self._next = 0

    @property
    def count(self) -> int:
        return len(self._buffers) - self._next

    def take(self) -> Buffer:
        if not self.count:
            raise ValueError("some of its bytes are missing")
        self._next += 1
        return self._buffers[self._next - 1]
