"""pandas frames, series and indexes as buffers, column by column. Neither pickle nor Arrow.

Columns of numbers, dates and categories are the bytes of their numpy arrays; text and mixed columns are plain data.
Imported only when there is a pandas value.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy
import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore]

from notebook_cluster.values.arrays import Buffer, pack_array, unpack_array
from notebook_cluster.values.plain import pack_plain, unpack_plain

_MASKED = {
    **{f"{kind}{bits}": f"{kind}{bits}".lower() for kind in ("Int", "UInt") for bits in (8, 16, 32, 64)},
    "Float32": "float32", "Float64": "float64", "boolean": "bool",
}  # fmt: skip
"""Nullable dtype -> the numpy dtype of its numbers."""
_UNITS = ("s", "ms", "us", "ns")
_TIME_ZONE = re.compile(r"[A-Za-z0-9_+\-:]+(/[A-Za-z0-9_+\-]+){0,3}")
_FREQUENCY = re.compile(r"[0-9]{0,6}[A-Za-z]{1,6}(-[A-Z]{3})?")
_DEEPEST = 8

Take = Callable[[], Buffer]


def pack_frame(value: Any, buffers: list[Buffer]) -> dict[str, Any]:
    """The description of a DataFrame, Series, Index or Categorical; its bytes go to ``buffers``.

    Raises:
        TypeError: a column of a kind that does not travel; names it.
    """
    if type(value).__module__.partition(".")[0] != "pandas":
        base = next(kind.__name__ for kind in type(value).__mro__ if kind.__module__.partition(".")[0] == "pandas")
        raise TypeError(f"a {type(value).__qualname__} does not travel: send pandas.{base}(it)")
    if isinstance(value, pandas.Index):
        return {"kind": "index", "index": _pack_index(value, buffers)}
    if isinstance(value, pandas.Categorical):
        return {"kind": "series", "only": True, "column": _pack_column(value, "the categories", buffers)}
    if isinstance(value, pandas.Series):
        what = "the series" if value.name is None else f"series {value.name!r}"
        return {
            "kind": "series",
            "name": _pack_label(value.name, buffers),
            "column": _pack_column(value.array, what, buffers),
            "index": _pack_index(value.index, buffers),
        }
    columns = [
        _pack_column(value.iloc[:, place].array, f"column {value.columns[place]!r}", buffers)
        for place in range(value.shape[1])
    ]
    return {
        "kind": "dataframe",
        "columns": columns,
        "names": _pack_index(value.columns, buffers),
        "index": _pack_index(value.index, buffers),
    }


def unpack_frame(meta: dict[str, Any], take: Take) -> Any:
    """What :func:`pack_frame` took; ``take`` gives its buffers in order.

    Raises:
        ValueError: no such value.
    """
    if meta["kind"] == "index":
        return _unpack_index(meta["index"], take)
    if meta["kind"] == "series":
        if meta.get("only"):
            return _unpack_column(meta["column"], take)
        name = _unpack_label(meta["name"], take)
        values = _unpack_column(meta["column"], take)
        return pandas.Series(values, index=_unpack_index(meta["index"], take), name=name, copy=False)
    columns = [_unpack_column(column, take) for column in meta["columns"]]
    names, index = _unpack_index(meta["names"], take), _unpack_index(meta["index"], take)
    if len(names) != len(columns) or any(len(column) != len(index) for column in columns):
        raise ValueError("the columns of a frame differ in length")
    frame = pandas.DataFrame(dict(enumerate(columns)), index=index, copy=False)
    frame.columns = names
    return frame


def _pack_column(array: Any, what: str, buffers: list[Buffer], depth: int = 0) -> dict[str, Any]:
    """The description of one extension array; ``what`` names it in errors."""
    dtype = array.dtype
    if depth > _DEEPEST:
        raise TypeError(f"{what} is nested too deeply")
    if isinstance(dtype, pandas.CategoricalDtype):
        buffers.append(pack_array(array.codes.astype("int64"), "numpy")[1])
        categories = _pack_index(dtype.categories, buffers, depth + 1)
        return {"type": "category", "categories": categories, "ordered": bool(dtype.ordered)}
    if isinstance(dtype, pandas.DatetimeTZDtype):
        buffers.append(pack_array(array.asi8, "numpy")[1])
        return {"type": "zoned", "unit": dtype.unit, "zone": _zone_name(dtype, what)}
    if isinstance(dtype, pandas.PeriodDtype):
        buffers.append(pack_array(array.asi8, "numpy")[1])
        return {"type": "period", "frequency": str(dtype).removeprefix("period[").removesuffix("]")}
    if isinstance(dtype, pandas.IntervalDtype):
        sides = [_pack_index(side, buffers, depth + 1) for side in (array.left, array.right)]
        return {"type": "interval", "sides": sides, "closed": array.closed}
    if isinstance(dtype, pandas.StringDtype):
        missing = array.isna()
        values = [None if gone else str(text) for text, gone in zip(array, missing, strict=True)]
        buffers.append(_pack_objects(values, what))
        return {"type": "text", "missing": "NA" if dtype.na_value is pandas.NA else "nan"}
    if dtype.name in _MASKED:
        numbers = array.to_numpy(dtype=_MASKED[dtype.name], na_value=0)
        buffers += [pack_array(numbers, "numpy")[1], pack_array(array.isna(), "numpy")[1]]
        return {"type": "masked", "dtype": dtype.name}
    if isinstance(array, pandas.arrays.NumpyExtensionArray) and dtype.kind == "O":
        buffers.append(_pack_objects(list(array), what))
        return {"type": "object"}
    try:
        if not hasattr(dtype, "numpy_dtype") and dtype.kind not in "biufcmM":
            raise TypeError("no numpy dtype")
        if isinstance(dtype, pandas.SparseDtype | pandas.ArrowDtype):
            raise TypeError("not dense")
        meta, data = pack_array(array.to_numpy(), "numpy")
    except TypeError:
        way_out = "use .sparse.to_dense()" if isinstance(dtype, pandas.SparseDtype) else "convert it with .astype(...)"
        raise TypeError(f"{what} is of dtype {dtype}, which does not travel: {way_out}") from None
    buffers.append(data)
    return {"type": "numpy", "dtype": meta["dtype"], "shape": meta["shape"]}


def _pack_objects(values: list[Any], what: str) -> Buffer:
    try:
        return pack_plain([value.item() if _is_number(value) else value for value in values], lambda value: None)
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _is_number(value: Any) -> bool:
    """True for a numpy number: in a mixed column it travels as Python's."""
    return isinstance(value, numpy.bool_ | numpy.integer | numpy.floating)


def _zone_name(dtype: Any, what: str) -> str:
    name = str(dtype.tz)
    if not _TIME_ZONE.fullmatch(name):
        raise TypeError(f"{what} has time zone {name!r}, which has no name: use .dt.tz_convert('UTC')")
    return name


def _pack_label(label: Any, buffers: list[Buffer]) -> dict[str, Any]:
    """The name of a series or an index."""
    buffers.append(_pack_objects([label], f"the name {label!r}"))
    return {}


def _unpack_label(meta: Any, take: Take) -> Any:
    (label,) = unpack_plain(take(), _no_part)
    hash(label)
    return label


def _pack_index(index: Any, buffers: list[Buffer], depth: int = 0) -> dict[str, Any]:
    if isinstance(index, pandas.MultiIndex):
        names = [_pack_label(name, buffers) for name in index.names]
        levels = [_pack_index(level, buffers, depth + 1) for level in index.levels]
        buffers += [pack_array(codes.astype("int64"), "numpy")[1] for codes in index.codes]
        return {"type": "multi", "names": names, "levels": levels}
    meta: dict[str, Any] = {"name": _pack_label(index.name, buffers)}
    if isinstance(index, pandas.RangeIndex):
        return meta | {"type": "range", "range": [index.start, index.stop, index.step]}
    frequency = getattr(index, "freqstr", None) if isinstance(index, pandas.DatetimeIndex) else None
    meta |= {"type": "values", "column": _pack_column(index.array, "the index", buffers, depth)}
    return meta | {"frequency": frequency} if frequency and _FREQUENCY.fullmatch(frequency) else meta


def _unpack_index(meta: dict[str, Any], take: Take, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise ValueError("an index is nested too deeply")
    if meta["type"] == "multi":
        names = [_unpack_label(name, take) for name in meta["names"]]
        levels = [_unpack_index(level, take, depth + 1) for level in meta["levels"]]
        codes = [_numbers(take()) for _ in levels]
        return pandas.MultiIndex(levels=levels, codes=codes, names=names, verify_integrity=True)
    name = _unpack_label(meta["name"], take)
    if meta["type"] == "range":
        return pandas.RangeIndex(*map(_whole, meta["range"]), name=name)
    values = _unpack_column(meta["column"], take, depth)
    index = pandas.Index(values, name=name, dtype=values.dtype, copy=False)
    frequency = meta.get("frequency")
    if isinstance(frequency, str) and _FREQUENCY.fullmatch(frequency) and isinstance(index, pandas.DatetimeIndex):
        index.freq = frequency
    return index


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise ValueError("a range is not one of whole numbers")
    return number


def _numbers(data: Buffer) -> Any:
    return unpack_array({"kind": "numpy", "dtype": "<i8", "shape": [len(data) // 8]}, data)


def _unpack_column(meta: dict[str, Any], take: Take, depth: int = 0) -> Any:
    kind = meta["type"]
    if kind == "numpy":
        return unpack_array({"kind": "numpy", "dtype": meta["dtype"], "shape": meta["shape"]}, take())
    if kind == "object":
        values = unpack_plain(take(), _no_part)
        array = numpy.empty(len(values), dtype=object)
        for place, value in enumerate(values):
            array[place] = value
        return array
    if kind == "text":
        return pandas.array(unpack_plain(take(), _no_part), dtype=_text_dtype(meta["missing"]))
    if kind == "masked":
        name = meta["dtype"]
        numbers = take()
        dtype = numpy.dtype(_MASKED[name])
        shape = [len(numbers) // dtype.itemsize]
        values = unpack_array({"kind": "numpy", "dtype": dtype.str, "shape": shape}, numbers)
        mask = unpack_array({"kind": "numpy", "dtype": "|b1", "shape": shape}, take())
        masked = pandas.array(values, dtype=name)
        masked[mask] = pandas.NA
        return masked
    if kind == "category":
        codes = _numbers(take())
        categories = _unpack_index(meta["categories"], take, depth + 1)
        return pandas.Categorical.from_codes(codes, categories=categories, ordered=bool(meta["ordered"]))
    return _unpack_dates(meta, take, depth)


def _unpack_dates(meta: dict[str, Any], take: Take, depth: int) -> Any:
    kind = meta["type"]
    if kind == "zoned" and meta["unit"] in _UNITS and _TIME_ZONE.fullmatch(meta["zone"]):
        moments = _numbers(take()).view(f"<M8[{meta['unit']}]")
        return pandas.DatetimeIndex(moments).tz_localize("UTC").tz_convert(meta["zone"]).array
    if kind == "period" and _FREQUENCY.fullmatch(meta["frequency"]):
        return pandas.PeriodIndex.from_ordinals(_numbers(take()), freq=meta["frequency"]).array
    if kind == "interval" and meta["closed"] in ("left", "right", "both", "neither"):
        left, right = (_unpack_index(side, take, depth + 1) for side in meta["sides"])
        return pandas.arrays.IntervalArray.from_arrays(left, right, closed=meta["closed"])
    raise ValueError("a column of a frame is of no known kind")


def _text_dtype(missing: str) -> Any:
    """pandas' own text: with NaN for what is missing since pandas 3, with NA before."""
    if missing == "NA":
        return pandas.StringDtype()
    try:
        return pandas.StringDtype(na_value=numpy.nan)
    except TypeError:
        return pandas.StringDtype()


def _no_part(number: Any) -> Any:
    raise ValueError("plain data in a frame has no parts")
