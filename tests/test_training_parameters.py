"""A model as one flat vector: order, ties, frozen parameters, buffers, dtypes, changes that are named."""

import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster.codecs import Vector
from notebook_cluster.training.checkpointing.optimizer_bytes import OptimizerBytesError, pack, unpack
from notebook_cluster.training.models.parameters import Parameters
from notebook_cluster.training.models.torch_frozen import buffers_to_compare
from notebook_cluster.training.models.torch_parameters import TorchParameters
from notebook_cluster.values.content_hash import content_hash, feed_array

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e5m2")


def awkward_values(size: int) -> Vector:
    """Of every magnitude, with halves between two neighbours in a smaller dtype, and the largest and smallest."""
    generator = np.random.default_rng(1)
    vector = (generator.standard_normal(size) * 10.0 ** generator.integers(-45, 38, size)).astype(np.float32)
    vector[::3] = (vector[::3].view(np.uint32) & np.uint32(0xFFFF8000)).view(np.float32)
    vector[1::7] = generator.standard_normal(vector[1::7].size)
    vector[[2, size // 2]] = np.finfo(np.float32).max, -np.finfo(np.float32).tiny / 64
    return vector


def held_as_it_is_read(adapter: Parameters, ranges: list[tuple[int, int]]) -> Vector:
    """Load awkward values, which the model cannot hold as they are, and return them: what it holds of them was known
    before, in whole, at the end and in these ranges."""
    vector = awkward_values(adapter.layout.size)
    vector.flags.writeable = False
    parts = adapter.as_held(vector)
    adapter.load(vector)
    whole = adapter.read()
    assert not np.array_equal(whole, vector)
    for start, stop in [(0, whole.size), (whole.size - 3, whole.size), (whole.size, whole.size), *ranges]:
        np.testing.assert_array_equal(parts(slice(start, stop)), whole[start:stop])
    return vector


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


def test_what_a_model_holds_of_a_vector_is_known_without_loading_it() -> None:
    model = nn.ParameterList([torch.zeros(300, dtype=getattr(torch, name)) for name in DTYPES])
    adapter = TorchParameters(model)
    vector = held_as_it_is_read(adapter, [(5, 30), (290, 310), (250, 1100), (7, 7)])
    np.testing.assert_array_equal(adapter.held_on_device(vector), adapter.read())


def test_a_model_of_float32_holds_the_vector_itself() -> None:
    adapter = TorchParameters(nn.Linear(2, 3))
    vector = awkward_values(9)
    assert np.shares_memory(adapter.as_held(vector)(slice(2, 5)), vector)
    assert adapter.held_on_device(vector).data_ptr() == vector.ctypes.data


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
    with pytest.raises(OptimizerBytesError, match="AdamW, this one SGD: it starts afresh"):
        unpack(data, torch.optim.SGD(nn.Linear(3, 2).parameters()))
    with pytest.raises(OptimizerBytesError, match="does not fit"):
        unpack(data, torch.optim.AdamW([nn.Parameter(torch.zeros(2))]))
    for damaged in (b"", b"\xff" * 20, data[:12]):
        with pytest.raises(OptimizerBytesError):
            unpack(damaged, optimizer)


class Inner(nn.Module):
    """A user's own submodules with the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._orig_mod = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(self.module(x))


OWN_NAMES = ["_orig_mod.bias", "_orig_mod.weight", "module.bias", "module.weight"]


def names(model: nn.Module) -> list[str]:
    return sorted(name for name, _, _ in TorchParameters(model).layout.schema)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_users_own_submodules_keep_their_names_whatever_they_are_called(alone: None) -> None:
    ddp, compiled = nn.parallel.DistributedDataParallel, torch.compile
    for wrap in (lambda m: m, ddp, compiled, lambda m: compiled(ddp(m)), lambda m: ddp(compiled(m)), nn.DataParallel):
        assert names(wrap(Inner())) == OWN_NAMES
    part = Inner()
    part.module = compiled(part.module)  # type: ignore[assignment]
    assert names(part) == OWN_NAMES


def test_fsdp_that_shards_nothing_has_the_names_of_the_model(alone: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    model = Inner()
    model.module = FullyShardedDataParallel(  # type: ignore[assignment]
        model.module, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    whole = FullyShardedDataParallel(
        model, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    assert names(whole) == OWN_NAMES


def test_a_dtensor_is_refused_by_name(alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"parameter '0.weight' is a DTensor, of which each node has only a part"):
        TorchParameters(model)


def test_peft_is_known_by_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    class BaseTuner(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    class PeftModel(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.base_model = BaseTuner(model)

    class Own(PeftModel):
        """Not PEFT's: only called alike."""

    assert names(Own(nn.Linear(1, 1))) == ["base_model.model.bias", "base_model.model.weight"]
    for home, kind in (("peft.peft_model", PeftModel), ("peft.tuners.tuners_utils", BaseTuner)):
        module = ModuleType(home)
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, home, module)
    assert names(PeftModel(Inner())) == OWN_NAMES


def test_tensors_that_were_compared_may_still_be_resized() -> None:
    model = nn.Linear(2, 3)
    model.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
    model.register_buffer("scales", torch.zeros(1000, 1000))
    compared = {one.name: one for one in buffers_to_compare(model)}
    assert {name: sum(piece.size for piece in one.pieces()) for name, one in compared.items() if one.pieces} == {
        "seen": 32, "scales": 4_000_000,
    }  # fmt: skip
    assert content_hash(time.monotonic() + 60, lambda state: feed_array(state, model.seen))
    assert model.seen.resize_(8).shape == (8,)
    assert model.scales.resize_(1000, 1001).shape == (1000, 1001)


def test_two_tensors_that_would_be_called_alike_keep_their_own_names() -> None:
    model = nn.DataParallel(nn.Linear(2, 3))
    model.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    assert names(model) == ["bias", "module.bias", "weight"]
    vector = TorchParameters(model).read()
    assert vector.shape == (1 + 3 + 6,)


def test_a_checkpoint_with_the_names_of_before_is_read(alone: None) -> None:
    plain = TorchParameters(Inner())
    former = {name.replace("_orig_mod.", ""): value for name, value in plain.layout.tensors(plain.read()).items()}
    np.testing.assert_array_equal(plain.layout.vector(former, "checkpoint"), plain.read())
    wrapped = TorchParameters(nn.parallel.DistributedDataParallel(nn.Linear(2, 3)))
    tensors = wrapped.layout.tensors(wrapped.read())
    assert list(tensors) == ["bias", "weight"]
    former = {f"module.{name}": value for name, value in tensors.items()}
    np.testing.assert_array_equal(wrapped.layout.vector(former, "checkpoint"), wrapped.read())
    with pytest.raises(ValueError, match=r"checkpoint has 'module.other', which this model has not"):
        wrapped.layout.vector(former | {"module.other": former["module.bias"]}, "checkpoint")
