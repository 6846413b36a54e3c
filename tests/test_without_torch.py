"""On machines without torch all works that does not compute with it."""

import os
import sys
from collections.abc import Iterator

import numpy
import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.collectives.values import from_wire
from tests.cluster import run, shared_cluster

MISSING = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
MLX = """
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optimizers
mx.random.seed(0)
model = nn.Linear(4, 1)
optimizer = optimizers.SGD(0.1)
step = nn.value_and_grad(model, lambda model, x: (model(x) ** 2).mean())
sync = nc.DiLoCo(model, every=2)
for x in nc.shard([mx.ones((4,)) * number for number in range(16)], batch_size=2):
    loss, gradients = step(model, mx.stack(list(x)))
    optimizer.update(model, gradients)
    sync.step(loss=loss.item(), samples=2)
sync.finish()
print(sync.round, sorted(nc.load_checkpoint(sync.checkpoint("kept"))))
"""
CHECKPOINT = """
import pathlib, numpy
from notebook_cluster.checkpoints import Contents, Part, save
tensors = {"w": numpy.ones(3, numpy.float32)}
if rank == 0:
    contents = Contents("model", 5, "ab" * 16, tensors, tensors, [Part("desk", 0, b"")], {})
    save(pathlib.Path("checkpoints"), "theirs", contents)
nc.barrier()
try:
    nc.load_checkpoint("theirs")
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Of two nodes in whose environment there is no torch."""
    folder = tmp_path_factory.mktemp("environment")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(MISSING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
        with shared_cluster(local=2) as cluster:
            yield cluster


def test_cells_collectives_and_what_nc_says_work(cluster: Cluster) -> None:
    said = run(
        cluster,
        "import numpy\nprint(nc.all_reduce(numpy.full(2, rank + 1.0)), nc.mean_metrics(x=rank)['x'], device)\n"
        "try:\n    import torch\nexcept ImportError as error:\n    print(error)",
    )
    assert set(said.values()) == {"[3. 3.] 0.5 cpu\nNo module named 'torch'\n"}


def test_mlx_trains_and_keeps_its_model(cluster: Cluster) -> None:
    pytest.importorskip("mlx")
    assert set(run(cluster, MLX).values()) == {"2 ['bias', 'weight']\n"}


def test_what_needs_torch_says_so(cluster: Cluster) -> None:
    for said in run(cluster, CHECKPOINT).values():
        assert said.startswith("CheckpointError ")
        assert "is of a model of torch, which cannot be loaded here (No module named 'torch'): pip install it" in said
    ended, _ = cluster.run("nc.torch_distributed()")
    assert {result.error_value.partition(" on ")[0] for result in ended.results.values()} == {"torch is not installed"}


def test_a_tensor_that_comes_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(
            ValueError, match=r"a torch tensor has come, and this node has no torch .*: install it there"
        ):
            from_wire("torch", "float32", (2,), numpy.zeros(2, numpy.float32))
