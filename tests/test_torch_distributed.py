"""``nc.torch_distributed()`` on a real cluster: DDP code as people have it, in ``%%on_all`` cells."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import run, running_cluster, text_of

pytest.importorskip("torch")

DDP = """
import torch
from torch.nn.parallel import DistributedDataParallel
import torch.distributed as dist
nc.torch_distributed("gloo")
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
print(dist.get_rank(), dist.get_world_size(), weights.numpy().tobytes().hex())
"""


@pytest.fixture
def cluster(work: Path) -> Iterator[Cluster]:
    with running_cluster(local=2) as cluster:
        yield cluster


def test_ddp_runs_and_ends_with_the_cell(cluster: Cluster) -> None:
    said = {name: text.split() for name, text in run(cluster, DDP).items()}
    assert [said[name][:2] for name in ("local", "local-2")] == [["0", "2"], ["1", "2"]]
    assert said["local"][2] == said["local-2"][2]
    assert len(said["local"][2]) == 36 * 8

    ended = run(cluster, "print(dist.is_initialized(), 'GLOO_SOCKET_IFNAME' in __import__('os').environ)")
    assert set(ended.values()) == {"False False\n"}

    # The next cell sets a new one up, also after a cell that failed.
    failed, _ = cluster.run("nc.torch_distributed(); nc.torch_distributed(); 1 / 0")
    assert failed.status == "error"
    again = run(cluster, "nc.torch_distributed(); t = torch.ones(2) * rank; dist.all_reduce(t); print(t.tolist())")
    assert set(again.values()) == {"[1.0, 1.0]\n"}
    assert set(run(cluster, "nc.torch_distributed(); print(dist.get_world_size())", ("local-2",)).values()) == {"1\n"}

    for source, text in (
        (
            "nc.torch_distributed('nccl')",
            "'local' computes on cpu, and nccl needs a CUDA GPU on every node: use 'gloo'",
        ),
        ("nc.torch_distributed('mpi')", "backend='mpi' is unknown: use 'gloo' or 'nccl'"),
        ("nc.torch_distributed(timeout=0)", "timeout=0 must be more than 0 seconds"),
        (
            "nc.torch_distributed(timeout=10 + rank)",
            "'local' wants gloo with timeout=10, 'local-2' wants gloo with timeout=11: they must be equal on all nodes",
        ),
    ):
        failed, outputs = cluster.run(source)
        assert [failed.results[name].status for name in ("local", "local-2")] == ["error"] * 2
        for name in ("local", "local-2"):
            assert text in text_of(outputs, name), source


def test_a_node_that_is_killed_in_a_ddp_step_ends_the_cell_of_the_others(cluster: Cluster) -> None:
    failed, outputs = cluster.run(
        """
import os, signal, torch, torch.distributed as dist
nc.torch_distributed(timeout=20)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(10))
"""
    )
    assert failed.status == "error"
    assert "SIGKILL" in failed.results["local-2"].reason
    assert failed.results["local"].status == "error"
    assert "RuntimeError" in text_of(outputs, "local") or "DistBackendError" in text_of(outputs, "local")
    said = run(cluster, "print(dist.is_initialized())", ("local",))
    assert said == {"local": "False\n"}
