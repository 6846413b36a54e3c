"""Keeps the value of a cell's last expression for a view that asked for it, without changing what is shown.

IPython hands the value to its display hook, also when a ``;`` hides it; a thin hook in front of that one keeps it while
the cell's request asks for it (:data:`VALUE_KEY`). After the cell the kernel evaluates the request's user expressions,
which is when :func:`packed` turns the value into bytes.
"""

import base64
import reprlib
from collections.abc import Mapping
from typing import Any

from notebook_cluster.protocol.interaction import MOST_PACKED_BYTES, MOST_VALUE_BYTES, VALUE_KEY, VALUE_MIME
from notebook_cluster.values.encoding import describe, encode_value, library_of, pandas_bytes

_MOST_COUNTED = 100_000
"""Parts of a value that are looked at before its bytes are made."""
_short = reprlib.Repr()
_short.maxother = _short.maxstring = _short.maxlong = 200
_keeper: "_Keeper | None" = None


class _Keeper:
    """A display hook in front of the shell's own."""

    def __init__(self, shell: Any) -> None:
        self._trap = shell.display_trap
        self._hook = self._trap.hook
        self.wanted = False
        self.value: object = None
        self._trap.hook = self

    def __call__(self, value: object = None) -> None:
        if self.wanted:
            self.value = value
        self._hook(value)

    def remove(self) -> None:
        self._trap.hook = self._hook


class _Packed:
    """What IPython formats as the answer to the user expression."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def __repr__(self) -> str:
        return ""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        return {VALUE_MIME: self._answer}


def install(shell: Any) -> None:
    """Put the hook in front of the display hook of ``shell``."""
    global _keeper
    if _keeper is None:
        _keeper = _Keeper(shell)


def uninstall() -> None:
    """Take the hook away."""
    global _keeper
    if _keeper is not None:
        _keeper.remove()
        _keeper = None


def begin_cell(parent: Mapping[str, Any]) -> None:
    """A cell begins, whose request is ``parent``: forget the value before, keep the next when it is asked for."""
    if _keeper is not None:
        expressions = (parent.get("content") or {}).get("user_expressions") or {}
        _keeper.wanted, _keeper.value = VALUE_KEY in expressions, None


def packed() -> _Packed:
    """The kept value as an answer with bytes, or with the reason why it stays here; it is forgotten."""
    value: object = None
    if _keeper is not None:
        value, _keeper.value, _keeper.wanted = _keeper.value, None, False
    return _Packed(pack(value))


def pack(value: object) -> dict[str, Any]:
    """JSON of ``value``: ``{"meta", "buffers"}``, or ``{"kind", "text", "reason"}`` when it cannot travel."""
    reason = ""
    try:
        size = _least_size(value)
        if size <= MOST_VALUE_BYTES:
            meta, buffers = encode_value(value)
            texts = [base64.b64encode(buffer).decode("ascii") for buffer in buffers]
            size = sum(map(len, texts)) * 3 // 4
            if size <= MOST_VALUE_BYTES and len(str(meta)) < (MOST_PACKED_BYTES - MOST_VALUE_BYTES) // 4:
                return {"meta": meta, "buffers": texts}
        reason = f"{size / 1e6:,.1f} MB, a cell's value may have {MOST_VALUE_BYTES >> 20} MiB: %pull fetches a variable"
    except (TypeError, ValueError) as error:
        reason = str(error)
    except Exception as error:  # of a library, or of the value's own methods
        reason = f"{type(error).__name__}: {error}"
    return {"kind": describe(value)[:100], "text": _short.repr(value)[:300], "reason": reason[:500]}


def _least_size(value: object) -> int:
    """Bytes that ``value`` has at least, without copying anything."""
    size = 0
    waiting, counted = [value], 0
    while waiting and counted < _MOST_COUNTED and size <= MOST_VALUE_BYTES:
        part = waiting.pop()
        counted += 1
        library = library_of(part)
        if library == "pandas":
            size += pandas_bytes(part)
        elif library:
            size += int(getattr(part, "nbytes", 0))
        elif isinstance(part, str | bytes | bytearray):
            size += len(part)
        elif isinstance(part, list | tuple | set | frozenset):
            size += 2 * len(part)
            waiting += list(part)[: _MOST_COUNTED - counted]
        elif isinstance(part, dict):
            size += 4 * len(part)
            waiting += list(part.values())[: _MOST_COUNTED - counted]
    return size
