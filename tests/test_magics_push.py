"""%push: what arrives on a node is what was sent."""

import math

import numpy
import pytest
import torch

from notebook_cluster.magics import push
from notebook_cluster.magics.errors import UsageError


def pushed(value, name="value"):
    """Run the cells of ``%push`` as a node would."""
    namespace = {}
    for source in push.push_sources(name, value):
        exec(source, namespace)
    return namespace[name]


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 10**30, 2.5, math.inf, "text with 'quotes' \n and ü", b"\x00\xff", 1 + 2j,
        [1, [2.0, "x"]], (1, (2,)), {1, 2}, frozenset({"a"}), [],
        {"a": {1: (None,)}, (1, 2): b"k"}, {"#": "=", "=": "#"},
    ],
)  # fmt: skip
def test_plain_data_arrives_equal_and_of_the_same_type(value):
    arrived = pushed(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_nan_arrives():
    assert math.isnan(pushed(math.nan))


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
        numpy.arange(6.0).reshape(2, 3).T,
        numpy.zeros((0, 4), numpy.float32),
        numpy.array(3.0),
        numpy.array(["a", "bcd"]),
        numpy.array([1, 2], ">i4"),
        numpy.array(["2024-01-01"], "datetime64[D]"),
    ],
)
def test_numpy_arrays_arrive_with_dtype_and_shape_and_can_be_changed(array):
    arrived = pushed(array)
    assert isinstance(arrived, numpy.ndarray)
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    numpy.testing.assert_array_equal(arrived, array)
    assert arrived.flags.writeable


def test_a_numpy_scalar_stays_one():
    arrived = pushed(numpy.float64(0.1))
    assert type(arrived) is numpy.float64
    assert arrived == 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)])
def test_torch_tensors_arrive_bit_for_bit(dtype, shape):
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    arrived = pushed(tensor)
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(arrived, tensor)


def test_a_parameter_arrives_as_a_tensor():
    assert torch.equal(pushed(torch.nn.Parameter(torch.ones(2))), torch.ones(2))


def test_a_large_array_travels_in_pieces_below_the_message_limit():
    array = numpy.arange(2_000_000, dtype=numpy.int32)
    sources = list(push.push_sources("x", array))
    assert len(sources) == 4
    assert max(map(len, sources)) < 8 * 1024 * 1024 / 1.5
    numpy.testing.assert_array_equal(pushed(array), array)


class Net:
    pass


loop: list = []
loop.append(loop)


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (Net(), "Net is not plain data"),
        ({"net": Net()}, "Net is not plain data"),
        (numpy.array([Net()]), "object"),
        (loop, "nested too deeply or holds itself"),
        (torch.eye(2).to_sparse(), "to_dense()"),
        (numpy.zeros(9_000_000), "72 MB"),
        (torch.zeros(17_000_000), "68 MB"),
        ("x" * 68_000_000, "68 MB"),
    ],
)
def test_what_cannot_be_pushed_is_named_with_the_way_out(value, part):
    with pytest.raises(UsageError) as caught:
        list(push.push_sources("model", value))
    assert part in str(caught.value)
    assert "'model'" in str(caught.value)


def test_missing_pieces_are_noticed():
    sources = list(push.push_sources("x", bytes(4_000_000)))
    with pytest.raises(ValueError, match="push the variable again"):
        exec(sources[-1], {})
