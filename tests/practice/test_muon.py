"""MuLoCo: Muon as each node's own optimiser, with AdamW for what is no hidden matrix, and DiLoCo's outer steps."""

import numpy as np
import pytest
import torch

from tests import oracle
from tests.cluster import run, running_cluster
from tests.practice.loops import ON_NODES, trained
from tests.practice.recipes import recipe

COUNT, BATCH, EVERY, OUTER_LR = 2560, 64, 30, 0.3
NET = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
        self.last = torch.nn.Linear(16, 1)
    def forward(self, x):
        return self.last(self.layers(self.first(x)))
def examples():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(2560, 8, generator=generator), torch.randn(2560, 1, generator=generator)
"""
MINE = """
torch.manual_seed(rank)  # the model of rank 0 is what all begin with
model, train_set = Net(), torch.utils.data.TensorDataset(*examples())
places = {value: at for at, value in enumerate(examples()[1].flatten().tolist())}
def loss_function(found, y):
    seen.append([places[value] for value in y.flatten().tolist()])
    return torch.nn.functional.mse_loss(found, y)
"""


@pytest.mark.usefixtures("work")
def test_the_recipe_trains_as_muon_and_the_outer_steps_say() -> None:
    with running_cluster("lesson", local=2) as cluster:
        run(cluster, ON_NODES + NET + MINE)
        run(cluster, recipe("Muon in each node"))
        facts = trained(cluster, "say(seen=seen, theta=flat(model), round=sync.round, muon=len(muon.state))")
    seen = {name: said["seen"] for name, said in sorted(facts.items())}
    assert {len(batches) for batches in seen.values()} == {2 * COUNT // BATCH // 2}
    assert {(said["round"], said["muon"]) for said in facts.values()} == {(2, 2)}
    np.testing.assert_allclose(
        np.array(facts["local"]["theta"], np.float32), _expected(list(seen.values())), rtol=0, atol=2e-5
    )


def _expected(seen: list[list[list[int]]]) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The parameters after what each node has ``seen``, in torch and tests.oracle alone."""
    made: dict[str, object] = {"torch": torch}
    exec(NET, made)
    x, y = made["examples"]()  # type: ignore[operator]
    torch.manual_seed(0)
    nets = [made["Net"]() for _ in seen]  # type: ignore[operator]
    theta = _vector(nets[0])
    optimizers = [_optimizers(net) for net in nets]
    outer = np.zeros_like(theta)
    for begin in range(0, len(seen[0]), EVERY):
        for net, own, batches in zip(nets, optimizers, seen, strict=True):
            torch.nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), net.parameters())
            for batch in batches[begin : begin + EVERY]:
                net.zero_grad()
                torch.nn.functional.mse_loss(net(x[batch]), y[batch]).backward()
                for optimizer in own:
                    optimizer.step()
        mean = oracle.mean([theta - _vector(net) for net in nets], [0.5, 0.5])
        theta, outer = oracle.diloco(theta, outer, mean, OUTER_LR, 0.9, nesterov=True)
    return theta


def _optimizers(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
    hidden = [net.layers[0].weight, net.layers[2].weight]  # type: ignore[index, union-attr]
    rest = [weight for weight in net.parameters() if all(weight is not one for one in hidden)]
    muon = torch.optim.Muon(hidden, lr=12e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")  # type: ignore[list-item]
    return [muon, torch.optim.AdamW(rest, lr=12e-3)]


def _vector(net: torch.nn.Module) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy().copy()
