"""A model as one flat vector: order, ties, frozen parameters, buffers, dtypes, changes that are named."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster.training.node_part import PartError, pack, unpack
from notebook_cluster.training.torch_parameters import TorchParameters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.full((2, 2), -torch.inf))


def test_names_are_sorted_and_shapes_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    adapter = TorchParameters(model)
    assert [name for name, _, _ in adapter.layout.schema] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    vector = adapter.read()
    assert vector.dtype == np.float32
    for name, tensor in adapter.layout.tensors(vector).items():
        np.testing.assert_array_equal(tensor, model.get_parameter(name).detach().numpy())


def test_load_writes_in_place_and_read_returns_a_copy() -> None:
    model = nn.Linear(2, 3)
    adapter = TorchParameters(model)
    weight = model.weight
    before = adapter.read()
    vector = np.arange(9, dtype=np.float32)
    vector.setflags(write=False)
    adapter.load(vector)
    assert model.weight is weight
    np.testing.assert_array_equal(adapter.read(), vector)
    assert not np.array_equal(before, vector)
    assert adapter.layout.vector(adapter.layout.tensors(vector), "test").tolist() == vector.tolist()


def test_tied_parameters_count_once_and_constant_buffers_stay() -> None:
    adapter = TorchParameters(Tied())
    assert adapter.layout.schema == [("embedding.weight", [5, 3], "float32")]
    assert adapter.layout.buffers == 0


def test_frozen_parameters_are_not_sent() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    frozen = copy.deepcopy(model[0].state_dict())
    adapter = TorchParameters(model)
    assert adapter.layout.size == 4
    adapter.load(np.zeros(4, np.float32))
    assert torch.equal(model[0].weight, frozen["weight"])


def test_running_statistics_come_last_and_counters_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model(torch.randn(8, 2))
    adapter = TorchParameters(model)
    assert [name for name, _, _ in adapter.layout.schema][-2:] == ["1.running_mean", "1.running_var"]
    assert adapter.layout.buffers == 6
    adapter.load(np.full(adapter.layout.size, 2, np.float32))
    assert model[1].running_var.tolist() == [2.0, 2.0, 2.0]
    assert model[1].num_batches_tracked.item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 3).to(dtype)
    adapter = TorchParameters(model)
    adapter.load(np.full(9, 1.001, np.float32))
    assert model.weight.dtype == dtype
    assert adapter.exact == (dtype == torch.float64)
    np.testing.assert_array_equal(adapter.read(), torch.full((9,), 1.001).to(dtype).float().numpy())


def test_channels_last_keeps_its_layout_and_its_values() -> None:
    model = nn.Conv2d(2, 3, 2)
    plain = TorchParameters(model).read()
    model = model.to(memory_format=torch.channels_last)
    adapter = TorchParameters(model)
    np.testing.assert_array_equal(adapter.read(), plain)
    adapter.load(plain + 1)
    np.testing.assert_array_equal(adapter.read(), plain + 1)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.add_module("extra", nn.Linear(1, 1)), r"'extra\.bias' was added"),
        (lambda model: model[1].requires_grad_(False), r"'1\.bias' was removed \(or frozen\)"),
        (lambda model: model.half(), r"'0\.bias' was float32 3 when .* is float16 3 now"),
        (lambda model: model.__setitem__(1, nn.Linear(3, 2)), r"'1\.bias' was float32 1 when .* float32 2 now"),
    ],
)
def test_a_changed_model_is_named(change: object, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    adapter = TorchParameters(model)
    adapter.check()
    change(model)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        adapter.check()


def test_models_that_cannot_be_averaged_are_named() -> None:
    with pytest.raises(ValueError, match=r"'weight' has no shape yet: run one batch"):
        TorchParameters(nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'weight' is on the meta device"):
        TorchParameters(nn.Linear(2, 3, device="meta", bias=False))
    with pytest.raises(ValueError, match=r"'weight' is torch\.complex64"):
        TorchParameters(nn.Linear(2, 3, dtype=torch.complex64, bias=False))
    with pytest.raises(ValueError, match="ReLU has no trainable parameter"):
        TorchParameters(nn.ReLU())


def test_schema_hash_depends_on_names_shapes_dtypes_and_codec() -> None:
    layout = TorchParameters(nn.Linear(2, 3)).layout
    assert layout.hash("int8") == TorchParameters(nn.Linear(2, 3)).layout.hash("int8")
    others = [nn.Linear(3, 2), nn.Linear(2, 3).half(), nn.Sequential(nn.Linear(2, 3))]
    hashes = {TorchParameters(model).layout.hash("int8") for model in others} | {layout.hash("float32")}
    assert layout.hash("int8") not in hashes


def trained(optimizer_class: type[torch.optim.Optimizer]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.LBFGS]
)
def test_optimizer_state_survives(optimizer_class: type[torch.optim.Optimizer]) -> None:
    if optimizer_class is torch.optim.LBFGS:
        optimizer = torch.optim.LBFGS(nn.Linear(3, 2).parameters())
    else:
        _, optimizer = trained(optimizer_class)
    data = pack({"steps": 3}, optimizer)
    again = optimizer_class(nn.Linear(3, 2).parameters(), lr=0.5)  # type: ignore[call-arg]
    assert unpack(data, again) == {"steps": 3}
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict(), rtol=0, atol=0)


def test_counters_alone_need_no_optimizer() -> None:
    assert unpack(pack({"steps": 7}, None), None) == {"steps": 7}
    assert unpack(pack({"steps": 7}, trained(torch.optim.AdamW)[1]), None) == {"steps": 7}


def test_another_optimizer_or_damaged_bytes_are_refused() -> None:
    _, optimizer = trained(torch.optim.AdamW)
    data = pack({}, optimizer)
    with pytest.raises(PartError, match="AdamW, this one SGD: it starts afresh"):
        unpack(data, torch.optim.SGD(nn.Linear(3, 2).parameters()))
    with pytest.raises(PartError, match="does not fit"):
        unpack(data, torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
    for damaged in (b"", b"\xff" * 20, data[:12]):
        with pytest.raises(PartError):
            unpack(damaged, optimizer)
