"""Nodes that compute unlike hold the same bits after every round: real kernels, torch and MLX, each strategy and codec.

One node is plain. One has torch, numpy and OpenBLAS as on an old processor, one sets numbers near zero to zero and
computes on two threads, one has its model in MLX. Part of the model is of subnormal numbers.
"""

import json
import platform

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import run, running_cluster
from tests.training_cells import commits, job

pytest.importorskip("mlx.core", reason="one of the nodes has its model in MLX")
pytestmark = [
    pytest.mark.usefixtures("work"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the old processor is an x86-64 one"),
]

PLAIN, OLD, FLUSHING, MLX = NAMES = ("local", "local-2", "local-3", "local-4")

SET_UP = """
import hashlib, json, os, time
if rank == 1:  # read when torch, numpy and OpenBLAS are loaded
    os.environ.update(
        ATEN_CPU_CAPABILITY="default", OPENBLAS_CORETYPE="Nehalem", NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX512_ICL"
    )
import numpy as np, torch
from torch import nn
from notebook_cluster.training.models.mlx_parameters import MlxParameters
from notebook_cluster.training.models.torch_parameters import TorchParameters
torch.set_num_threads(2 if rank == 2 else 1)
torch.set_flush_denormal(rank == 2)
if rank == 3:
    import mlx.core as mx, mlx.nn, mlx.optimizers

USUAL, TINY = 20 * 100 + 100 + 100 * 5 + 5, 3000

class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 100), nn.Linear(100, 5)
        self.tiny = nn.Parameter(torch.zeros(TINY))

    def forward(self, x):
        return self.second(self.first(x).tanh()) + 0 * self.tiny.sum()

def make_model():
    "The same model in torch and in MLX; where all begin is said by rank 0."
    torch.manual_seed(rank)
    if rank < 3:
        model = TorchModel()
    else:
        class MlxModel(mlx.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = mlx.nn.Linear(20, 100), mlx.nn.Linear(100, 5)
                self.tiny = mx.zeros(TINY)

            def __call__(self, x):
                return self.second(mx.tanh(self.first(x))) + 0 * self.tiny.sum()
        model = MlxModel()
    parameters = MlxParameters(model) if rank == 3 else TorchParameters(model)
    parameters.load(draw(7 if rank == 0 else 8 + rank))
    return model, parameters

def draw(seed):
    "Numbers for all parameters; those of `tiny`, the last ones, are subnormal."
    found = 0.1 * np.random.default_rng(seed).standard_normal(USUAL + TINY, dtype=np.float32)
    found[USUAL:] *= np.float32(1e-38)
    return found

def batch(step):
    x = np.random.default_rng([rank, step]).standard_normal((16, 20), dtype=np.float32)
    return x, np.tanh(x[:, :5])

def train(make, steps, gradients=False, seconds=0.0):
    "Round -> hash of the state and of the global model after it; hash of the model at the end."
    model, parameters = make_model()
    if rank < 3:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = mlx.optimizers.AdamW(learning_rate=0.01, bias_correction=True)
        optimizer.init(model.trainable_parameters())
        loss_and_grad = mlx.nn.value_and_grad(model, lambda model, x, y: ((model(x) - y) ** 2).mean())
    sync, hashes = make(model, optimizer), {}
    for step in range(steps):
        x, y = batch(step)
        if rank < 3:
            optimizer.zero_grad()
            loss = ((model(torch.from_numpy(x)) - torch.from_numpy(y)) ** 2).mean()
            loss.backward()
            given = {}
        else:
            loss, grads = loss_and_grad(model, mx.array(x), mx.array(y))
            given = {"grads": grads} if gradients else {}
        if not gradients:
            optimizer.step() if rank < 3 else optimizer.update(model, grads)
            parameters.load(parameters.read() + draw([rank, step]) * (np.arange(USUAL + TINY) >= USUAL))
        time.sleep(seconds)
        if done := sync.step(loss=loss, samples=16 + rank, **given):
            with sync.global_model():
                hashes[done.round] = [done.state_hash, hash_of(parameters)]
    sync.finish()
    return hashes, hash_of(parameters)

def hash_of(parameters):
    return hashlib.sha256(parameters.read().tobytes()).hexdigest()
"""

WHAT_THEY_ARE = """
from threadpoolctl import threadpool_info
print(json.dumps({
    "torch": torch.backends.cpu.get_cpu_capability(),
    "blas": [row["architecture"] for row in threadpool_info() if row["internal_api"] == "openblas"],
    "flushes": (torch.tensor([1e-39]) * 0.5).item() == 0,
    "threads": torch.get_num_threads(),
    "mlx": type(make_model()[0]).__mro__[1].__module__.startswith("mlx"),
}))
"""

SPARSE = ("topk-8", "randomk-8")
CODECS = ("float32", "fp16", "bf16", "int8", "int4", "e3m0", *SPARSE)
CHOSEN = {codec: f"codec={codec!r}" + (", outer_momentum=0.0" if codec in SPARSE else "") for codec in CODECS}
ROUNDS = {
    "averaging": "nc.LocalSGD(model, every=3",
    **{codec: f"nc.DiLoCo(model, every=3, {chosen}" for codec, chosen in CHOSEN.items()},
    **{f"{codec}-overlap": f"nc.DiLoCo(model, every=3, overlap=2, {chosen}" for codec, chosen in CHOSEN.items()},
    **{
        f"{codec}-streaming": f"nc.DiLoCo(model, every=6, fragments={2 if codec in SPARSE else 3}, overlap=1, {chosen}"
        for codec, chosen in CHOSEN.items()
    },
    "mix": "nc.DiLoCo(model, every=3, overlap=1, mix=0.5",
    "quorum": "nc.DiLoCo(model, every=3, quorum=2, grace=0.1",
    "sparse": "nc.SparseLoCo(model, every=3",
    "sparse-overlap": "nc.SparseLoCo(model, every=3, overlap=1",
}
"""Name of the job -> the strategy, which gets the model."""
GRADIENTS = {
    "momenta": "nc.DeMo(model, lr=0.003",
    **{f"server-{codec}": f"nc.DataParallel(model, optimizer, mode='server', codec={codec!r}" for codec in CODECS},
}
"""The same of those that take gradients and leave all nodes with the same bits after every step."""


@pytest.mark.proof
def test_unlike_nodes_hold_the_same_bits_after_every_round_with_every_strategy_and_codec() -> None:
    with running_cluster(local=4) as cluster:
        run(cluster, SET_UP)
        are = {name: json.loads(said) for name, said in run(cluster, WHAT_THEY_ARE).items()}
        assert (are[OLD]["torch"], set(are[OLD]["blas"])) == ("DEFAULT", {"Nehalem"})
        assert [are[name]["flushes"] for name in NAMES] == [False, False, True, False]
        assert [are[name]["threads"] for name in NAMES] == [1, 1, 2, 1]
        assert [are[name]["mlx"] for name in NAMES] == [False, False, False, True]
        for name, start in (ROUNDS | GRADIENTS).items():
            found = trained(cluster, name, start, steps=12, gradients=name in GRADIENTS)
            committed = {row["commit"]["round"]: row["commit"]["state_hash"] for row in commits(cluster, name)}
            assert len(committed) >= 4, name
            models: dict[str, str] = {}
            for node, (rounds, _) in found.items():
                assert rounds, f"{name}: {node}"
                for number, (state, model) in rounds.items():
                    same = (state, model) == (committed[int(number)], models.setdefault(number, model))
                    assert same, f"{name}: {node} after round {number}"
            assert len({model for _, model in found.values()}) == 1, f"{name}: the models differ at the end"
            assert job(cluster, name).hash_mismatches == 0, name


def trained(
    cluster: Cluster, name: str, start: str, steps: int, gradients: bool
) -> dict[str, tuple[dict[str, list[str]], str]]:
    """What each node's ``train`` returns."""
    seconds = "0.02 if rank == 1 else 0.0" if name == "quorum" else "0.0"
    said = run(
        cluster,
        f"print(json.dumps(train(lambda model, optimizer: {start}, name={name!r}), {steps}, {gradients}, {seconds})))",
    )
    assert set(said) == set(NAMES)
    return {node: tuple(json.loads(text.splitlines()[-1])) for node, text in said.items()}
