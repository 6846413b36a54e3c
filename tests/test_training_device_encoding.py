"""Contributions that are encoded with torch where the model is: on one node the same as on the host.

The code is the same for every torch device, so where there is no GPU the processor stands for it; what only a GPU can
show is in the last test, which is skipped without one.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster.codecs import Vector, WireFormat
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.loop import encoding
from notebook_cluster.training.loop.encoding import DeviceEncoder
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models.torch_parameters import TorchParameters
from tests.test_codecs_torch import CODECS, values_of
from tests.test_training_replica import apply
from tests.test_training_sparse import wide

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
            replica.keep_local()
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

    def round(self, number: int) -> None:
        self.work(number)
        self.send()
        self.commit(number)


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
        monkeypatch.setattr(encoding, "KINDS", kinds)
        pair.work(round)
        pair.send()
        assert isinstance(pair.replicas[1]._sent.feedback, torch.Tensor) == bool(kinds)
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
        pair.round(round)
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
    pair.round(1)
    asked: list[int] = []

    def out_of_memory(wire: WireFormat, work: torch.Tensor) -> None:
        asked.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(encoding, "encode_tensor", out_of_memory)
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
    pair.round(1)
    monkeypatch.setattr(encoding, "_has_room", lambda device, elements: False)
    pair.work(2)
    pair.send()
    assert not isinstance(pair.replicas[1]._sent.feedback, torch.Tensor)
    assert pair.parameters[1]._loaded is None


@pytest.mark.parametrize("codec", ["float32", "bf16", "e3m0"])
def test_codecs_without_a_form_for_it_are_encoded_on_the_host(codec: str, device: str) -> None:
    pair = Pair(device, codec, 1, torch.float32)
    pair.work(1)
    pair.send()
    assert not isinstance(pair.replicas[1]._sent.feedback, torch.Tensor)


# ---- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("codec", ["int8", "sparse", "topk", "randomk"])
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
