"""Values that travel: what comes back is what went, and nothing is made of what is no value."""

import collections
import datetime
import json
import subprocess
import sys

import mlx.core as mx
import numpy
import pandas
import pandas.testing
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notebook_cluster.values import encoding as values_module
from notebook_cluster.values.encoding import decode_value, describe, encode_value

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False) | st.datetimes() | st.dates() | st.timedeltas(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner)
    | st.lists(inner).map(tuple) | st.frozensets(st.integers() | st.text()),
    max_leaves=20,
)  # fmt: skip


def travelled(value):
    """What arrives on the other side: the description as JSON, the buffers as bytes that cannot be written to."""
    meta, buffers = encode_value(value)
    return decode_value(json.loads(json.dumps(meta)), [bytes(buffer) for buffer in buffers])


# ---- what goes comes back --------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plain)
def test_plain_data_comes_back_equal_and_of_the_same_type(value):
    arrived = travelled(value)
    assert arrived == value
    assert type(arrived) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        {1, 2}, bytearray(b"x"), range(3, 9, 2), collections.Counter("aab"), collections.deque([1, 2]),
        collections.OrderedDict(b=1, a=2), datetime.time(12, 30), 10**40, float("inf"), {"#": "part", "=": 0},
        datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC), {(1, "a"): {None: [()]}}, pandas.NaT,
        pandas.Timestamp("2024-01-01T12:00:00.000000001", tz="UTC"), pandas.Timedelta("1ns"),
    ],
)  # fmt: skip
def test_types_that_json_lacks_come_back(value):
    arrived = travelled([value])[0]
    assert type(arrived) is type(value)
    assert arrived == value or value is pandas.NaT


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(
        ["?", "i1", "u2", "<i4", ">i4", "i8", "f2", "f4", ">f8", "c8", "c16", "U3", "S5", "M8[D]", "M8[ns]", "m8[s]"]
    ),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
)
def test_numpy_arrays_keep_dtype_shape_and_bytes_and_can_be_changed(dtype, shape, fortran):
    raw = numpy.random.default_rng(1).integers(0, 2, [*shape, numpy.dtype(dtype).itemsize or 1], dtype="u1")
    array = numpy.ascontiguousarray(raw).view("u1").reshape(-1).tobytes()
    value = numpy.frombuffer(bytearray(array), numpy.dtype(dtype)).reshape(shape)
    value = numpy.asfortranarray(value) if fortran else value
    arrived = travelled(value)
    assert (arrived.dtype, arrived.shape, arrived.tobytes()) == (value.dtype, value.shape, value.tobytes())
    assert arrived.flags.writeable


@pytest.mark.parametrize("name", ["bool", "uint8", "int64", "float16", "bfloat16", "float32", "complex64",
                                  "float8_e4m3fn"])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3)])
def test_torch_tensors_keep_dtype_and_shape(name, shape):
    value = torch.ones(shape).to(getattr(torch, name))
    arrived = travelled(value)
    assert isinstance(arrived, torch.Tensor)
    assert (arrived.dtype, arrived.shape) == (value.dtype, value.shape)
    assert arrived.tolist() == value.tolist()


def test_a_parameter_and_a_transposed_view_arrive_as_plain_tensors():
    value = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)).t()
    arrived = travelled(value)
    assert not arrived.requires_grad
    assert torch.equal(arrived, value.detach())


@pytest.mark.parametrize("dtype", [mx.bool_, mx.int32, mx.float32, mx.bfloat16, mx.complex64])
def test_mlx_arrays_keep_dtype_and_shape(dtype):
    value = mx.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    arrived = travelled(value)
    assert isinstance(arrived, mx.array)
    assert (arrived.dtype, arrived.shape) == (value.dtype, value.shape)
    assert mx.array_equal(arrived, value).item()


def test_an_mlx_array_comes_as_numpy_where_mlx_is_not_installed(monkeypatch):
    meta, buffers = encode_value(mx.array([1.5, -2.0]).astype(mx.bfloat16))
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    arrived = decode_value(meta, buffers)
    assert isinstance(arrived, numpy.ndarray)
    assert (arrived.dtype, arrived.tolist()) == (numpy.dtype("float32"), [1.5, -2.0])


def test_numpy_scalars_stay_scalars():
    arrived = travelled({"loss": numpy.float32(0.5)})["loss"]
    assert (type(arrived), arrived) == (numpy.float32, 0.5)


def test_arrays_in_containers_come_back_in_their_places():
    state = torch.nn.Linear(2, 3).state_dict()
    arrived = travelled({"state": state, "curve": [numpy.arange(3), (mx.ones(2), "x")]})
    assert list(arrived["state"]) == ["weight", "bias"]
    assert torch.equal(arrived["state"]["bias"], state["bias"])
    assert arrived["curve"][0].tolist() == [0, 1, 2]
    assert arrived["curve"][1][0].tolist() == [1, 1]


def test_what_is_sent_is_what_the_value_was_then():
    array, tensor = numpy.zeros(3), torch.zeros(3)
    packed = encode_value([array, tensor])
    array[:], tensor[:] = 1, 1
    assert [item.tolist() for item in decode_value(*packed)] == [[0, 0, 0], [0, 0, 0]]


# ---- pandas ----------------------------------------------------------------------------------------------------------

COLUMNS = {
    "text": ["x", None, "y"],
    "number": [1, 2, 3],
    "half": numpy.array([1, 2, 3], "float16"),
    "complex": [1 + 2j, 2, 3],
    "category": pandas.Categorical(["u", "v", None], ordered=True),
    "numbered category": pandas.Categorical([3, 1, 3]),
    "date": pandas.to_datetime(["2024-01-01", None, "2025-01-01"]),
    "zoned": pandas.date_range("2024-03-31", periods=3, freq="h", tz="Europe/Berlin"),
    "duration": pandas.to_timedelta([1, 2, None], unit="s"),
    "nullable": pandas.array([1, None, 2**62 + 1], dtype="Int64"),
    "nullable float": pandas.array([1.5, None, 2], dtype="Float32"),
    "nullable bool": pandas.array([True, None, False], dtype="boolean"),
    "nullable text": pandas.array(["a", None, "c"], dtype="string"),
    "mixed": pandas.Series([1, "a", None], dtype=object),
    "period": pandas.period_range("2024-01", periods=3, freq="M"),
    "interval": pandas.interval_range(0, 3),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_keeps_dtype_and_values(name):
    frame = pandas.DataFrame({name: COLUMNS[name]})
    pandas.testing.assert_frame_equal(travelled(frame), frame)
    pandas.testing.assert_series_equal(travelled(frame[name]), frame[name])


@pytest.mark.parametrize(
    "index",
    [
        pandas.RangeIndex(5, 11, 2, name="step"),
        pandas.Index(["a", "b", "c"], name=("two", 1)),
        pandas.Index([1.5, 2.5, float("nan")]),
        pandas.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)], names=["x", None]),
        pandas.date_range("2024-01-01", periods=3, freq="D"),
        pandas.CategoricalIndex(["p", "q", "p"]),
    ],
    ids=str,
)
def test_an_index_comes_back_with_its_names(index):
    frame = pandas.DataFrame({"a": [1, 2, 3]}, index=index)
    pandas.testing.assert_frame_equal(travelled(frame), frame)
    pandas.testing.assert_frame_equal(travelled(frame.T), frame.T)
    pandas.testing.assert_index_equal(travelled(index), index)


@pytest.mark.parametrize(
    "frame",
    [
        pandas.DataFrame(),
        pandas.DataFrame(index=[1, 2]),
        pandas.DataFrame({"a": [1.0]}).iloc[:0],
        pandas.DataFrame([[1, 2]], columns=["same", "same"]),
        pandas.DataFrame({"a": [3, 1, 2]}).sort_values("a"),
    ],
    ids=["empty", "no columns", "no rows", "one name twice", "sorted"],
)
def test_frames_of_odd_shapes_come_back(frame):
    pandas.testing.assert_frame_equal(travelled(frame), frame)


def test_a_frame_that_arrived_can_be_changed():
    arrived = travelled(pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]}))
    arrived.loc[0, "a"] = 7
    arrived["a"] += 1
    assert arrived["a"].tolist() == [8, 3]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (pandas.DataFrame({"a": [1], "s": pandas.arrays.SparseArray([0])}), ["column 's'", "Sparse", "to_dense"]),
        (pandas.DataFrame({"o": [object()]}), ["column 'o'", "object inside it"]),
        (pandas.DataFrame({"d": [{"k": torch.ones(2)}]}), ["column 'd'", "Tensor inside it"]),
        (type("Geo", (pandas.DataFrame,), {})({"a": [1]}), ["Geo", "pandas.DataFrame(it)"]),
    ],
)
def test_a_frame_that_does_not_travel_is_refused_with_its_column(value, words):
    with pytest.raises(TypeError) as caught:
        encode_value(value)
    assert all(word in str(caught.value) for word in words), caught.value


# ---- what does not travel --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), ["an object does not travel"]),
        ([print], ["builtin_function_or_method inside it"]),
        (torch.nn.Linear(1, 1), ["Linear", ".state_dict()"]),
        (numpy.array([object()]), ["array of object", ".tolist()"]),
        (numpy.zeros(2, [("a", "f4")]), ["array of", ".tolist()"]),
        (numpy.ma.array([1, 2]), ["masked array", ".filled"]),
        (numpy.longdouble(1), ["long double", "float64"]),
        (torch.eye(2).to_sparse(), ["sparse", ".to_dense()"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_travel_is_refused_by_its_type_with_a_way_out(value, words):
    with pytest.raises(TypeError) as caught:
        encode_value(value)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_quantized_tensor_is_refused_with_a_way_out():
    with pytest.raises(TypeError, match=r"quantized.*dequantize"):
        encode_value(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))


def test_a_value_that_holds_itself_is_refused():
    loop = []
    loop.append(loop)
    with pytest.raises(TypeError, match="holds itself"):
        encode_value(loop)


def test_a_value_over_the_limit_is_refused_before_it_is_copied(monkeypatch):
    monkeypatch.setattr(values_module, "MOST_VALUE_BYTES", 1000)
    copied = []
    monkeypatch.setattr(values_module, "pack_array", lambda *args: copied.append(args))
    with pytest.raises(ValueError, match="at most"):
        encode_value([numpy.zeros(1000)])
    assert not copied


def test_plain_data_over_its_limit_is_refused(monkeypatch):
    monkeypatch.setattr("notebook_cluster.values.plain.MOST_BYTES", 100)
    with pytest.raises(ValueError, match="make it a numpy array"):
        encode_value(list(range(1000)))


# ---- what comes from a hostile node ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "buffers"),
    [
        ({}, []),
        ({"kind": "pickle"}, [b"x"]),
        ({"kind": "plain"}, []),
        ({"kind": "plain"}, [b"{"]),
        ({"kind": "plain"}, [b"1", b"2"]),
        ({"kind": "plain"}, [b'{"#": "eval", "=": "1"}']),
        ({"kind": "plain"}, [b'{"#": "set", "=": [[1]]}']),
        ({"kind": "plain"}, [b'{"#": "part", "=": -1}']),
        ({"kind": "plain"}, [b"[" * 100_000]),
        ({"kind": "plain", "parts": [{"kind": "plain"}]}, [b"1"]),
        ({"kind": "numpy", "dtype": "|O", "shape": [1]}, [b"12345678"]),
        ({"kind": "numpy", "dtype": "<f4,<f4", "shape": [1]}, [b"12345678"]),
        ({"kind": "numpy", "dtype": "V8", "shape": [1]}, [b"12345678"]),
        ({"kind": "numpy", "dtype": "<f8", "shape": [2]}, [b"12345678"]),
        ({"kind": "numpy", "dtype": "<f8", "shape": [-1]}, [b"12345678"]),
        ({"kind": "numpy", "dtype": "<f8", "shape": [1.0]}, [b"12345678"]),
        ({"kind": "numpy", "dtype": "<f8", "shape": [1 << 40, 1 << 40]}, [b""]),
        ({"kind": "numpy", "dtype": "<U0", "shape": [1 << 30]}, [b""]),
        ({"kind": "numpy", "dtype": "<f8", "shape": [1] * 70}, [b"12345678"]),
        ({"kind": "numpy", "dtype": {}, "shape": []}, [b""]),
        ({"kind": "torch", "dtype": "load", "shape": []}, [b"1"]),
        ({"kind": "torch", "dtype": "float32", "shape": [1]}, [b"123"]),
        ({"kind": "mlx", "dtype": "float32", "shape": [1 << 60]}, [b""]),
        ({"kind": "dataframe"}, []),
        ({"kind": "series", "only": True, "column": {"type": "zoned", "unit": "ns", "zone": "../../etc/passwd"}},
         [b"12345678"]),
        ({"kind": "series", "only": True, "column": {"type": "period", "frequency": "__import__"}}, [b"12345678"]),
        ({"kind": "series", "only": True, "column": {"type": "text", "missing": "nan"}}, [b'[{"#": "x", "=": 0}]']),
        ({"kind": "index", "index": {"type": "range", "range": ["0", 1, 1], "name": {}}}, [b"[null]"]),
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused_in_one_line(meta, buffers):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        decode_value(meta, buffers)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["kind", "dtype", "shape", "parts", "columns", "names", "index", "type", "column", "name",
                         "levels", "range", "unit", "zone", "codes", "categories", "sides", "closed", "ordered"]),
        inner | st.sampled_from(["numpy", "torch", "plain", "dataframe", "series", "index", "category", "multi",
                                 "object", "text", "masked", "values", "<f8", "float32", "Int64", "nan"]),
        max_size=6),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=6), json_values) | json_values, st.lists(st.binary(max_size=40), max_size=4))
def test_nonsense_is_a_value_error_or_a_value(meta, buffers):
    try:
        decode_value(meta, buffers)
    except ValueError:
        pass


def mutations(value):
    meta, buffers = encode_value(value)
    text = json.dumps(meta)
    return st.tuples(
        st.integers(0, len(text) - 1), st.sampled_from('0129"[]{},:-xN'), st.integers(0, max(len(buffers) - 1, 0)),
        st.integers(-9, 9),
    ).map(lambda change: (meta_with(text, change[0], change[1]), cut(buffers, change[2], change[3])))  # fmt: skip


def meta_with(text, place, letter):
    try:
        return json.loads(text[:place] + letter + text[place + 1 :])
    except json.JSONDecodeError:
        return json.loads(text)


def cut(buffers, number, by):
    changed = [bytes(buffer) for buffer in buffers]
    changed[number] = changed[number][:by] if by < 0 else changed[number] + b"\xff" * by
    return changed


FRAME = pandas.DataFrame({name: COLUMNS[name] for name in ("text", "number", "category", "zoned", "nullable")})


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mutations(FRAME) | mutations({"w": torch.ones(3), "n": [numpy.arange(4)]}))
def test_a_damaged_value_is_a_value_error_or_a_value(packed):
    try:
        decode_value(*packed)
    except ValueError:
        pass


# ---- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(2, 3), "float32 2x3 tensor"),
        (torch.tensor(1), "int64 tensor"),
        (numpy.zeros((2, 3)), "float64 2x3 array"),
        (numpy.float32(1), "float32 number"),
        (mx.ones((2,)), "float32 2 MLX array"),
        (pandas.DataFrame({"a": [1, 2]}), "DataFrame 2x1"),
        (pandas.Series([1, 2]), "Series 2"),
        ({"a": 1}, "dict of 1"),
        (0.5, "float"),
        (None, "NoneType"),
    ],
    ids=str,
)
def test_values_are_described_in_a_few_words(value, text):
    assert describe(value) == text


def test_no_library_is_imported_before_a_value_of_its_kind_is_there():
    code = (
        "import sys; from notebook_cluster.values.encoding import decode_value, encode_value; "
        "decode_value(*encode_value({'a': [1, (2,)]})); "
        "print([name for name in ('numpy', 'torch', 'pandas', 'mlx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
