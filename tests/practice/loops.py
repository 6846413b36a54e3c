"""What the tests of training loops share: a small model and numbered examples for the nodes, what a node says of its
training, and what must come of it, in torch and tests.oracle alone."""

import json
from typing import Any

import numpy as np
import torch

from notebook_cluster.client import Cluster
from tests import oracle
from tests.cluster import run

Vector = np.ndarray[Any, np.dtype[np.float32]]

ON_NODES = """
import json, torch
seen = []  # numbers of the examples in each batch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(rank)  # the model of rank 0 is what all begin with
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    def forward(self, x, labels, number):
        if self.training:
            seen.append(number.tolist())
        return {"loss": torch.nn.functional.mse_loss(self.inner(x), labels)}
class Examples(torch.utils.data.Dataset):
    def __init__(self, count, seed=1):
        generator = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(count, 8, generator=generator), torch.randn(count, 1, generator=generator)
    def __len__(self):
        return len(self.x)
    def __getitem__(self, at):
        return {"x": self.x[at], "labels": self.y[at], "number": torch.tensor(at)}
def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
def say(**facts):
    print("FACTS" + json.dumps(facts) + "END")
"""
"""Run once on the nodes of a test."""

EXAMPLES = 1
"""Seed of the examples."""


def facts_of(said: dict[str, str]) -> dict[str, Any]:
    """Node -> what it said with ``say(...)``, the last time."""
    return {name: json.loads(text.rpartition("FACTS")[2].partition("END")[0]) for name, text in said.items()}


def trained(cluster: Cluster, source: str) -> dict[str, Any]:
    """What the nodes say after ``source``, which trains a model; it must be the same on all of them."""
    facts = facts_of(run(cluster, source))
    assert facts["local"]["theta"] == facts["local-2"]["theta"]
    return facts


def assert_expected(facts: dict[str, Any], **training: Any) -> None:
    """The model is what comes of the batches that the nodes have seen; ``training`` as for :func:`expected`."""
    wanted = expected({name: said["seen"] for name, said in sorted(facts.items())}, **training)
    np.testing.assert_allclose(np.array(facts["local"]["theta"], np.float32), wanted, rtol=0, atol=2e-6)


def examples(batches: list[list[int]]) -> list[int]:
    """The numbers in ``batches``, in their order."""
    return [number for batch in batches for number in batch]


def model() -> torch.nn.Module:
    """As rank 0 makes it."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def expected(
    seen: dict[str, list[list[int]]], *, count: int, every: int, lr: float, accumulate: int = 1, momentum: float = 0.9
) -> Vector:
    """The parameters after plain SGD on the batches that each node has ``seen`` of ``count`` examples, and DiLoCo's
    outer step after every ``every`` steps and at the end; with ``momentum=0`` Local SGD's."""
    generator = torch.Generator().manual_seed(EXAMPLES)
    x, y = torch.randn(count, 8, generator=generator), torch.randn(count, 1, generator=generator)
    steps = {
        name: [batches[at : at + accumulate] for at in range(0, len(batches), accumulate)]
        for name, batches in seen.items()
    }
    theta = _vector(model())
    outer = np.zeros_like(theta)
    for begin in range(0, max(map(len, steps.values())), every):
        work = {name: taken[begin : begin + every] for name, taken in steps.items() if taken[begin : begin + every]}
        counts = {name: sum(len(batch) for step in taken for batch in step) for name, taken in work.items()}
        ends = [_trained(theta, taken, x, y, lr) for taken in work.values()]
        total = sum(counts.values())
        mean = oracle.mean([theta - end for end in ends], [number / total for number in counts.values()])
        rate = (0.6 if len(work) > 1 else 0.4) if momentum else 1.0
        theta, outer = oracle.diloco(theta, outer, mean, rate, momentum, nesterov=True)
    return theta


def _trained(theta: Vector, steps: list[list[list[int]]], x: torch.Tensor, y: torch.Tensor, lr: float) -> Vector:
    trained = model()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), trained.parameters())
    optimizer = torch.optim.SGD(trained.parameters(), lr=lr)
    for batches in steps:
        optimizer.zero_grad()
        for batch in batches:
            (torch.nn.functional.mse_loss(trained(x[batch]), y[batch]) / len(batches)).backward()
        optimizer.step()
    return _vector(trained)


def _vector(of: torch.nn.Module) -> Vector:
    return torch.nn.utils.parameters_to_vector(of.parameters()).detach().numpy().copy()
