"""Rounds over real meshes whose links are slow or break: how much is sent, and that nothing of it is missing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.mesh import JobFrame, MeshHeader
from notebook_cluster.rounds.member import machine as member
from notebook_cluster.rounds.member.state import MemberSettings
from tests import oracle
from tests.cluster_in_process import Cluster, Node
from tests.mesh_nodes import MeshNode, mesh_nodes
from tests.mesh_relay import Wire, far_roster, wire_to

WIDTH = 400
MODEL_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
RATE = 160_000.0
"""Bytes a second of each connection: a chunk takes 0.4 s, in which the members of these tests ask twice."""


class MeshCluster(Cluster):
    """The frames of rounds go over real meshes, each way through a wire."""

    def __init__(self, meshes: list[MeshNode], directory: Path) -> None:
        super().__init__([mesh.name for mesh in meshes], directory)
        self._meshes = {mesh.name: mesh.mesh for mesh in meshes}
        for mesh in meshes:
            mesh.mesh.on_frame = partial(self._take, mesh.name)

    def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
        self._meshes[sender.name].send(receiver, header, payload)

    def _take(self, receiver: str, sender: str, header: MeshHeader, payload: memoryview) -> None:
        assert isinstance(header, JobFrame)
        self.nodes[receiver].deliver_frame(sender, header, bytes(payload))


@contextmanager
def cluster_on_wires(names: str, directory: Path) -> Iterator[tuple[MeshCluster, list[MeshNode], dict[str, Wire]]]:
    """A cluster, its meshes, and node -> the wire that leads to it."""
    with ExitStack() as stack:
        meshes = stack.enter_context(mesh_nodes(*names, peers=list(names)))
        wires = {mesh.name: stack.enter_context(wire_to(mesh.mesh.port)) for mesh in meshes}
        cluster = stack.enter_context(MeshCluster(meshes, directory))
        roster = far_roster(meshes, {name: wire.port for name, wire in wires.items()}, 2)
        for mesh in meshes:
            mesh.mesh.set_roster(roster)
        yield cluster, meshes, wires


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that ask often, and are never so slow that they are left out."""
    settings = partial(MemberSettings, want_after=0.2, stalled_after=600.0, chunk_bytes=64 * 1024)
    monkeypatch.setattr(member, "MemberSettings", settings)


def one_round(node: Node) -> tuple[int, "np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    """(the committed round, the parameters after it)."""
    model = nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    sync = nc.DiLoCo(model, every=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.linspace(0.0, 1.0 + node.rank(), parameter.numel()).view_as(parameter)
    sync.step(0.0)
    sync.finish()
    return sync.round, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_slow_link_carries_each_byte_once(tmp_path: Path, names: str) -> None:
    """Nodes that see nothing come for a while ask again; what is on its way is not sent a second time."""
    with cluster_on_wires(names, tmp_path) as (cluster, meshes, wires):
        for wire in wires.values():
            wire.slow_down(RATE)
        results = cluster.run(one_round)
        sent = sum(mesh.mesh.bytes_sent for mesh in meshes)
    rounds, models = zip(*results.values(), strict=True)
    assert set(rounds) == {1}
    assert all(np.array_equal(model, models[0]) for model in models)
    # to the owners of the slices and back: 2 (M - 1) / M of the model from each of M nodes
    payload = 2 * (len(names) - 1) * MODEL_BYTES
    assert payload <= sent < 1.2 * payload


def test_what_a_broken_link_took_with_it_is_sent_again(tmp_path: Path) -> None:
    with cluster_on_wires("ab", tmp_path) as (cluster, meshes, wires):
        for wire in wires.values():
            wire.slow_down(RATE, cut_after=150_000)
        results = cluster.run(one_round)
        sent = [mesh.mesh.bytes_sent for mesh in meshes]
    rounds, models = zip(*results.values(), strict=True)
    assert set(rounds) == {1}
    assert np.array_equal(*models)
    # each wire broke while there was more of the first slice in its queues
    assert min(sent) > MODEL_BYTES + 64 * 1024


def large_round(node: Node) -> tuple[list[str], "np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    """One round of a model whose owners have two slices each; the parameters after it."""
    model = nn.Linear(1100, 1000)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    sync = nc.DiLoCo(model, every=1, outer_lr=0.6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.linspace(0.0, 1.0 + node.rank(), parameter.numel()).view_as(parameter)
    sync.step(0.0)
    sync.finish()
    return list(sync.members), torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


@pytest.mark.parametrize("cut_after", [None, 1_000_000])
def test_slices_of_a_large_model_make_one_mean_whatever_breaks(tmp_path: Path, cut_after: int | None) -> None:
    with cluster_on_wires("ab", tmp_path) as (cluster, meshes, wires):
        for wire in wires.values():
            wire.slow_down(20e6, cut_after=cut_after)
        results = cluster.run(large_round)
        sent = sum(mesh.mesh.bytes_sent for mesh in meshes)
        (seal,) = [record["seal"] for record in cluster.records if record["kind"] == "seal"]
    assert [piece["owner"] for piece in seal["slices"]] == ["a", "a", "b", "b"]
    start = np.full(1_101_000, 0.5, np.float32)
    steps = [torch.cat([torch.linspace(0.0, 1.0 + rank, size) for size in (1_100_000, 1000)]) for rank in (0, 1)]
    work = [start - (start + done.numpy()) for done in steps]
    theta, _ = oracle.diloco(start, np.zeros_like(start), oracle.mean(work, [0.5, 0.5]), 0.6, 0.9, nesterov=True)
    for members, model in results.values():
        assert members == ["a", "b"]
        assert np.array_equal(model, theta)
    # to the owners and back, and where a wire broke what was in its queues once more
    assert sent < 1.1 * 2 * start.nbytes * (1 if cut_after is None else 2)
