"""Plain Python data as JSON and back, with the types that JSON lacks: tuples, sets, bytes, dates.

What JSON lacks becomes ``{"#": type, "=": content}``; every dict does, so that keys keep their types.
"""

import base64
import collections
import datetime
import json
import sys
from collections.abc import Callable
from typing import Any

MOST_BYTES = 32 * 1024 * 1024
"""Of JSON text: as Python objects it takes up to thirty times as much memory."""
_DEEPEST = 100

Part = Callable[[Any], int | None]
"""Given a value that is not plain: the number under which it travels beside the JSON, or None when it cannot."""

_DICTS: dict[type, str] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.Counter: "Counter",
    collections.defaultdict: "dict",  # its factory is code
}
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset", collections.deque: "deque"}
_FROM_SEQUENCE: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque,
}  # fmt: skip
_FROM_DICT: dict[str, Callable[[Any], Any]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": lambda items: collections.Counter(dict(items)),
}  # fmt: skip
_DATES: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}


def pack_plain(value: Any, part: Part) -> bytes:
    """``value`` as JSON text.

    Raises:
        TypeError: something in it is not plain and ``part`` does not take it, it is nested too deeply or holds itself.
        ValueError: over 32 MiB of text.
    """
    try:
        text = json.dumps(_to_json(value, part, 0), separators=(",", ":")).encode()
    except RecursionError:
        raise TypeError("it is nested too deeply or holds itself") from None
    if len(text) > MOST_BYTES:
        raise ValueError(
            f"{len(text) / 1e6:,.0f} MB of plain data, at most {MOST_BYTES >> 20} MiB travel: make it a numpy array"
        )
    return text


def unpack_plain(text: bytes | bytearray | memoryview, part: Callable[[int], Any]) -> Any:
    """The value in ``text``; ``part`` gives those that travelled beside it.

    Raises:
        ValueError: no JSON, or not what :func:`pack_plain` writes.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes of plain data, at most {MOST_BYTES} are read")
    return _from_json(json.loads(bytes(text)), part)


def _to_json(value: Any, part: Part, depth: int) -> Any:
    if depth > _DEEPEST:
        raise TypeError(f"it is nested deeper than {_DEEPEST} levels or holds itself")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_to_json(item, part, depth + 1) for item in value]
    if kind in _DICTS:
        pairs = [[_to_json(key, part, depth + 1), _to_json(item, part, depth + 1)] for key, item in value.items()]
        return {"#": _DICTS[kind], "=": pairs}
    if kind in _SEQUENCES:
        return {"#": _SEQUENCES[kind], "=": [_to_json(item, part, depth + 1) for item in value]}
    scalar = _scalar(kind, value)
    if scalar is not None:
        return scalar
    number = part(value)
    if number is None:
        raise TypeError(_refusal(value, depth))
    return {"#": "part", "=": number}


def _scalar(kind: type, value: Any) -> Any:
    """Marked JSON of what is one value, or None."""
    if kind in (bytes, bytearray):
        return {"#": kind.__name__, "=": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"#": "complex", "=": [value.real, value.imag]}
    if kind is range:
        return {"#": "range", "=": [value.start, value.stop, value.step]}
    if kind is datetime.timedelta:
        return {"#": "timedelta", "=": [value.days, value.seconds, value.microseconds]}
    if kind in _DATES.values():
        return {"#": kind.__name__, "=": value.isoformat()}
    pandas = sys.modules.get("pandas")
    if pandas is not None:
        if value is getattr(pandas, "NA", None):
            return {"#": "NA", "=": None}
        if value is getattr(pandas, "NaT", None):
            return {"#": "NaT", "=": None}
        if kind is getattr(pandas, "Timestamp", None):
            return {"#": "Timestamp", "=": [value.isoformat(), value.unit]}
        if kind is getattr(pandas, "Timedelta", None):
            return {"#": "Timedelta", "=": [int(value.asm8.view("int64")), value.unit]}
    return None


def _refusal(value: Any, depth: int) -> str:
    kind = type(value).__qualname__
    inside = f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}" + (" inside it" if depth else "")
    hint = "send its .state_dict()" if callable(getattr(type(value), "state_dict", None)) else ""
    if not hint and callable(getattr(type(value), "to_pandas", None)):
        hint = "send its .to_pandas()"
    travels = "plain data, numpy arrays, torch tensors, MLX arrays and pandas frames travel"
    return f"{inside} does not travel ({travels})" + (f": {hint}" if hint else "")


def _from_json(value: Any, part: Callable[[int], Any]) -> Any:
    if isinstance(value, list):
        return [_from_json(item, part) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["#"], value["="]
    if kind in _FROM_DICT:
        return _FROM_DICT[kind]([(_from_json(key, part), _from_json(item, part)) for key, item in content])
    if kind in _FROM_SEQUENCE:
        return _FROM_SEQUENCE[kind](_from_json(item, part) for item in content)
    if kind == "part":
        return part(content)
    if kind in ("bytes", "bytearray"):
        data = base64.b64decode(content, validate=True)
        return bytearray(data) if kind == "bytearray" else data
    if kind == "complex":
        return complex(*content)
    if kind == "range":
        return range(*content)
    if kind == "timedelta":
        return datetime.timedelta(*content)
    if kind in _DATES:
        return _DATES[kind].fromisoformat(content)
    return _pandas_scalar(kind, content)


def _pandas_scalar(kind: str, content: Any) -> Any:
    if kind not in ("NA", "NaT", "Timestamp", "Timedelta"):
        raise ValueError(f"plain data of kind {str(kind)[:20]!r} is not known")
    import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]

    if kind in ("NA", "NaT"):
        return getattr(pandas, kind)
    stamp, unit = content
    if kind == "Timedelta":
        if unit not in ("s", "ms", "us", "ns"):
            raise ValueError("a unit of time is not known")
        import numpy

        return pandas.Timedelta(numpy.timedelta64(int(stamp), unit)).as_unit(unit)
    if not isinstance(stamp, str) or len(stamp) > 100:
        raise ValueError("a timestamp is not one")
    return pandas.Timestamp(stamp).as_unit(unit)
