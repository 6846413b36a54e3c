"""Contributions that are encoded with torch where the model is: the bytes of the host, and the same training.

The code is the same for every torch device, so where there is no GPU the processor stands for it; what only a GPU can
show is in the last test, which is skipped without one.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.codecs import NotFiniteError, Vector, WireFormat
from notebook_cluster.training import device_encoding
from notebook_cluster.training.device_encoding import DeviceEncoder, on_host
from notebook_cluster.training.fragments import Fragments
from notebook_cluster.training.gradients import Gradients
from notebook_cluster.training.replica import Replica
from notebook_cluster.training.torch_parameters import TorchParameters
from tests.cluster_in_process import Cluster, Node
from tests.test_training import assert_equal_models, batch, flat, loss_of, train
from tests.test_training_replica import apply
from tests.test_training_sparse import wide

CODECS = ["int8", "int4", "fp16", "topk", "sparse"]
SIZES = [
    (1, 0),
    (63, 0),
    (256, 0),
    (257, 0),
    (511, 3),
    (4096, 0),
    (4097, 0),
    (4096 + 70, 5),
    (3 * 4096 + 255, 1),
    (0, 7),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where models are, which encodes."""
    monkeypatch.setattr(device_encoding, "KINDS", ("cuda", "cpu"))
    return "cuda" if torch.cuda.is_available() else "cpu"


def host_bytes(wire: WireFormat, values: Vector) -> tuple[bytes, Vector]:
    """What the host sends, and what is left."""
    encoded = bytes(wire.encode(values))
    return encoded, values - wire.decode(encoded)


def values_of(size: int, kind: str, seed: int = 0) -> Vector:
    random = np.random.default_rng(seed)
    values = random.standard_normal(size).astype(np.float32)
    match kind:
        case "tiny":
            values *= np.float32(1e-38)
        case "huge":
            values *= np.float32(1e37)
        case "wild":
            values *= (10.0 ** random.uniform(-44, 37, size)).astype(np.float32)
        case "few":
            values[random.random(size) < 0.5] = 0
        case "halves":
            # magnitudes that lie between two codes, and the largest that sets the scale
            values = (random.permutation(size) % 509).astype(np.float32) / np.float32(2)
            values += np.arange(size, dtype=np.float32) * np.float32(1e-4)
    return values


@pytest.mark.parametrize("kind", ["noise", "tiny", "huge", "wild", "few", "halves"])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("parameters", "buffers"), SIZES)
def test_the_bytes_and_what_is_left_are_those_of_the_host(
    codec: str, parameters: int, buffers: int, kind: str, device: str
) -> None:
    wire = WireFormat(codec, parameters, buffers)
    values = values_of(parameters + buffers, kind)
    expected, left = host_bytes(wire, values)
    work = torch.from_numpy(values.copy()).to(device)
    assert bytes(device_encoding.encode(wire, work)) == expected
    np.testing.assert_array_equal(on_host(work), left)


@pytest.mark.parametrize("codec", ["topk", "sparse"])
def test_of_equal_magnitudes_the_first_are_kept(codec: str, device: str) -> None:
    wire = WireFormat(codec, 4 * 4096)
    values = np.where(np.arange(4 * 4096) % 3, np.float32(1), np.float32(-1)).astype(np.float32)
    values[:4096] = 0
    values[4096:8192:60] = 3  # more than are kept
    values[8192:12288:100] = 3  # fewer
    expected, left = host_bytes(wire, values)
    work = torch.from_numpy(values.copy()).to(device)
    assert bytes(device_encoding.encode(wire, work)) == expected
    np.testing.assert_array_equal(on_host(work), left)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096 + 300, -1])
@pytest.mark.parametrize("codec", CODECS)
def test_what_is_not_finite_is_found(codec: str, place: int, bad: float, device: str) -> None:
    values = values_of(4096 + 301 + 2, "noise")
    values[place] = bad
    with pytest.raises(NotFiniteError):
        device_encoding.encode(WireFormat(codec, 4096 + 301, 2), torch.from_numpy(values).to(device))


# ---- one node's part -------------------------------------------------------------------------------------------


class Pair:
    """A node that encodes on the host and one that does it where the model is; both do and get the same."""

    def __init__(self, device: str, codec: str, fragments: int, dtype: torch.dtype, **arguments: Any) -> None:
        models = [wide().to(dtype) for _ in range(2)]
        models[1].to(device)
        self.parameters = [TorchParameters(model) for model in models]
        size = self.parameters[0].layout.size
        self.encoder = DeviceEncoder(self.parameters[1])
        self.replicas = [
            Replica(parameters, Fragments(codec, size, 0, fragments), encoder=encoder, **arguments)
            for parameters, encoder in zip(self.parameters, (None, self.encoder), strict=True)
        ]
        theta = self.parameters[0].read()
        self.each(lambda replica: replica.start(0, theta, np.zeros_like(theta), "0"))

    def each(self, do: Any) -> list[Any]:
        results = [do(replica) for replica in self.replicas]
        first, second = (parameters.read() for parameters in self.parameters)
        np.testing.assert_array_equal(first, second)
        return results

    def work(self, seed: int) -> None:
        change = values_of(self.replicas[0].theta.size, "noise", seed) * np.float32(0.01)

        def step(replica: Replica) -> None:
            replica.parameters.load(replica.parameters.read() + change)
            replica.count(2.0)

        self.each(step)

    def send(self) -> None:
        host, there = self.each(lambda replica: replica.contribution(finishing=False))
        assert bytes(host.encoded) == bytes(there.encoded)
        assert there.norm == pytest.approx(host.norm)
        assert (host.samples, host.steps, host.fragment, host.more, host.finite) == (
            there.samples, there.steps, there.fragment, there.more, there.finite,
        )  # fmt: skip

    def theta(self, seed: int) -> Vector:
        theta = self.replicas[0].theta
        return theta + values_of(theta.size, "noise", seed) * np.float32(0.02)

    def commit(self, round: int) -> None:
        theta = self.theta(round)
        self.each(lambda replica: apply(replica, round, theta, theta, str(round)))


@pytest.mark.parametrize("mix", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("codec", CODECS)
def test_everything_that_can_happen_to_a_contribution_leads_to_the_same_model(
    codec: str, fragments: int, dtype: torch.dtype, mix: float | None, device: str
) -> None:
    pair = Pair(device, codec, fragments, dtype, mix=mix, beta=0.95)
    for round in (1, 2, 3):
        pair.work(round)
        pair.send()
        if round != 2:
            pair.work(10 + round)  # training went on meanwhile
        pair.commit(round)
    pair.work(20)
    pair.send()
    rebased = pair.theta(30)
    pair.each(lambda replica: replica.rebase(4, rebased, rebased, "4"))
    pair.work(21)
    pair.commit(5)
    pair.work(22)
    pair.send()
    pair.each(lambda replica: replica.release())
    pair.send()
    pair.each(lambda replica: replica.discard())
    pair.work(23)
    pair.send()
    pair.commit(6)
    pair.work(24)
    pair.send()
    assert isinstance(pair.replicas[1]._sent.local, torch.Tensor)  # it was not the host that encoded here


def test_a_diverged_model_is_told_and_its_state_is_as_the_host_leaves_it(device: str) -> None:
    pair = Pair(device, "int8", 1, torch.float32)
    pair.work(1)
    for parameters in pair.parameters:
        values = parameters.read()
        values[5] = np.nan
        parameters.load(values)
    boundaries = [replica.contribution(finishing=False) for replica in pair.replicas]
    assert [boundary.finite for boundary in boundaries] == [False, False]
    pair.each(lambda replica: replica.discard())
    pair.work(2)
    pair.send()


def test_the_model_may_move_and_error_feedback_moves_along(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(device, "int4", 1, torch.float32)
    for round, kinds in enumerate([("cuda", "cpu"), (), ("cuda", "cpu"), ()], start=1):
        monkeypatch.setattr(device_encoding, "KINDS", kinds)
        pair.work(round)
        pair.send()
        assert isinstance(pair.replicas[1]._sent.local, torch.Tensor if kinds else np.ndarray)
        pair.commit(round)


def test_what_the_model_was_loaded_with_is_not_copied_there_again(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(device, "int8", 1, torch.float32)
    copied: list[Vector] = []
    original = TorchParameters.on_device

    def on_device(self: TorchParameters, vector: Vector) -> Any:
        if self._loaded is None or self._loaded[0] is not vector:
            copied.append(vector)
        return original(self, vector)

    monkeypatch.setattr(TorchParameters, "on_device", on_device)
    for round in (1, 2, 3):
        pair.work(round)
        pair.send()
        pair.commit(round)
    # ``work`` loads other values, as no training loop does
    assert len(copied) == 3
    for parameters in pair.parameters:
        parameters.load(pair.replicas[0].theta)
    model = pair.parameters[1].model
    reference = pair.replicas[1].theta
    pair.parameters[1].load(reference)
    with torch.no_grad():
        next(iter(model.parameters())).add_(0.5)
    pair.replicas[1].count(1.0)
    pair.replicas[1].contribution(finishing=False)
    assert len(copied) == 3


def test_where_it_fails_the_host_goes_on_and_says_so(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(device, "int8", 1, torch.float32)
    pair.work(1)
    pair.send()
    pair.commit(1)
    asked: list[int] = []

    def out_of_memory(wire: WireFormat, work: torch.Tensor) -> None:
        asked.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_encoding, "encode", out_of_memory)
    pair.work(2)
    with pytest.warns(
        RuntimeWarning, match="encoded on the host from now on, because .* could not: CUDA out of memory"
    ):
        pair.send()
    pair.commit(2)
    pair.work(3)
    pair.send()
    assert len(asked) == 1


def test_where_there_is_no_room_the_host_encodes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(device, "int8", 1, torch.float32)
    pair.work(1)
    pair.send()
    pair.commit(1)
    monkeypatch.setattr(device_encoding, "_has_room", lambda device, elements: False)
    pair.work(2)
    pair.send()
    assert isinstance(pair.replicas[1]._sent.local, np.ndarray)
    assert pair.parameters[1]._loaded is None


@pytest.mark.parametrize("codec", ["float32", "bf16", "e3m0"])
def test_codecs_without_a_form_for_it_are_encoded_on_the_host(codec: str, device: str) -> None:
    pair = Pair(device, codec, 1, torch.float32)
    pair.work(1)
    pair.send()
    assert isinstance(pair.replicas[1]._sent.local, np.ndarray)


# ---- a cluster -------------------------------------------------------------------------------------------------


def normalised(seed: int) -> nn.Module:
    """With running statistics, which travel behind the parameters."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 70), nn.Tanh(), nn.Linear(70, 3)
    )
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


def trained(
    where: str, used: dict[str, int], strategy: str, arguments: dict[str, Any], device: str, folder: Path
) -> Vector:
    """The model that two nodes train; ``where`` they encode: here (on the host), there, or one each."""

    def cell(node: Node) -> nn.Module:
        parallel = strategy == "DataParallel"
        model = (normalised if parallel else wide)(node.rank()).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = nc.DataParallel(model, optimizer, **arguments) if parallel else getattr(nc, strategy)(model, **arguments)
        encoder = sync._replica._encoder
        original = encoder._encoded

        def encoded(*words: Any) -> Any:
            found = original(*words) if where == "there" or (where == "mixed" and node.rank()) else None
            used[where] = used.get(where, 0) + (found is not None)
            return found

        encoder._encoded = encoded
        for step in range(10):
            features, labels = (part.to(device) for part in batch(step + 100 * node.rank()))
            if parallel:
                loss_of(model, (features, labels)).backward()
                sync.step(samples=8)
            else:
                sync.step(train(model, optimizer, (features, labels)))
        sync.finish()
        return model.cpu()

    with Cluster(["a", "b"], folder / where) as cluster:
        found = cluster.run(cell)
    assert_equal_models(found)
    return flat(found["a"])


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("DiLoCo", {"every": 3, "codec": "int8"}),
        ("DiLoCo", {"every": 3, "codec": "int4", "fragments": 2, "overlap": 1}),
        ("SparseLoCo", {"every": 3}),
        ("SparseLoCo", {"every": 3, "overlap": 2}),
        ("DataParallel", {"codec": "int8", "resend": 4}),
        ("DataParallel", {"codec": "int4", "accumulate": 3}),
        ("DataParallel", {"codec": "int8", "mode": "server"}),
    ],
)
def test_nodes_that_encode_here_and_there_train_one_model(
    strategy: str, arguments: dict[str, Any], device: str, tmp_path: Path
) -> None:
    used: dict[str, int] = {}
    here, there, mixed = (
        trained(where, used, strategy, arguments, device, tmp_path) for where in ("here", "there", "mixed")
    )
    assert used["here"] == 0
    assert used["there"] >= 6
    assert used["mixed"] >= 3
    np.testing.assert_array_equal(there, here)
    np.testing.assert_array_equal(mixed, here)


def test_diverged_gradients_are_told_and_error_feedback_goes_on_where_it_is(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder's place changes between rounds."""
    replicas = []
    for place in ("cpu", device):
        model = normalised(0).to(place)
        parameters = TorchParameters(model)
        layout = parameters.layout
        replica = Gradients(
            parameters,
            Fragments("int4", layout.size - layout.buffers, layout.buffers, gradients=True),
            torch.optim.SGD(model.parameters(), lr=0.1),
            scale_lr=False,
            is_lowest=lambda: False,
            restore=lambda: None,
        )
        theta = parameters.read()
        replica.start(0, theta, np.zeros_like(theta), "0")
        replicas.append(replica)
    replicas[0]._encoder = None
    for round, kinds in enumerate([("cuda", "cpu"), (), ("cuda", "cpu"), ("cuda", "cpu")], start=1):
        monkeypatch.setattr(device_encoding, "KINDS", kinds)
        for replica in replicas:
            for index, tensor in enumerate(replica.parameters.model.parameters()):
                values = values_of(tensor.numel(), "noise", 100 * round + index).reshape(tensor.shape)
                tensor.grad = torch.from_numpy(values).to(tensor.device)
                if round == 3 and index == 0:
                    tensor.grad[0, 0] = torch.nan
            replica.count(2.0)
            replica.count(2.0)
        host, there = (replica.contribution(finishing=False) for replica in replicas)
        assert host.finite == there.finite == (round != 3)
        assert bytes(host.encoded) == bytes(there.encoded)
        assert isinstance(replicas[1]._next_error, torch.Tensor if kinds and round != 3 else np.ndarray)
        if round == 3:
            for replica in replicas:
                replica.discard()
            continue
        mean = values_of(replicas[0].theta.size, "noise", round)
        for replica in replicas:
            apply(replica, round, replica.theta, mean, str(round))
        np.testing.assert_array_equal(*(replica.parameters.read() for replica in replicas))


# ---- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("codec", ["int8", "sparse"])
def test_a_gpu_encodes_without_being_asked_and_keeps_no_more_than_is_said(codec: str) -> None:
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList([torch.randn(1 << 22, generator=generator) for _ in range(8)]).cuda()
    parameters = TorchParameters(model)
    size = parameters.layout.size
    replica = Replica(parameters, Fragments(codec, size), encoder=DeviceEncoder(parameters))
    theta = parameters.read()
    replica.start(0, theta, np.zeros_like(theta), "0")
    before = torch.cuda.memory_allocated()
    for round in range(1, 4):
        with torch.no_grad():
            for tensor in model:
                tensor.add_(0.01 * torch.randn_like(tensor))
        replica.count(1.0)
        torch.cuda.reset_peak_memory_stats()
        replica.contribution(finishing=False)
        assert isinstance(replica._sent.local, torch.Tensor)
        assert torch.cuda.max_memory_allocated() - before <= 6 * 4 * size
        apply(replica, round, theta, theta, str(round))
        assert torch.cuda.memory_allocated() - before <= 2.1 * 4 * size
