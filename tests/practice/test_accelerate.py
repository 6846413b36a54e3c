"""Accelerate's Accelerator with ``nc.sync_every``, on two nodes."""

from collections.abc import Iterator

import numpy as np
import pytest

from notebook_cluster.client import Cluster
from tests.cluster import mend, run, shared_cluster
from tests.practice.loops import ON_NODES, expected, facts_of
from tests.practice.recipes import recipe

pytest.importorskip("accelerate")

MADE = """
from accelerate import Accelerator
def mine(**more):
    return nc.shard(torch.utils.data.DataLoader(Examples(48), batch_size=4), **more)
def train(accelerator, model, optimizer, batches):
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=2) as cluster:
        run(cluster, ON_NODES + MADE)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    mend(shared)


def test_an_accelerator_trains_one_model_with_the_steps_that_its_optimizer_makes(cluster: Cluster) -> None:
    source = """
seen.clear()
accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), Model()
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
sync = nc.sync_every(2, model, optimizer, fresh=True)
train(accelerator, model, optimizer, mine(epochs=2))
sync.finish()
say(seen=seen, theta=flat(model), round=sync.round, processes=accelerator.num_processes)
"""
    facts = facts_of(run(cluster, source))
    wanted = expected(
        {name: said["seen"] for name, said in sorted(facts.items())}, count=48, every=2, lr=0.1, accumulate=2
    )
    for said in facts.values():
        np.testing.assert_allclose(np.array(said["theta"], np.float32), wanted, rtol=0, atol=2e-6)
        assert (said["round"], said["processes"], len(said["seen"])) == (3, 1, 12)
    assert facts["local"]["theta"] == facts["local-2"]["theta"]


def test_what_accelerate_saved_goes_on_with_a_checkpoint_of_the_sync_object(cluster: Cluster) -> None:
    source = """
def begin(**settings):
    accelerator, model = Accelerator(cpu=True), Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return accelerator, model, optimizer, settings
halves = [list(mine(shuffle=False))[:3], list(mine(shuffle=False))[3:]]
accelerator, model, optimizer, _ = begin()
sync = nc.sync_every(3, model, optimizer, fresh=True, name="whole")
for half in halves:
    train(accelerator, model, optimizer, half)
sync.finish()
whole = flat(model)
accelerator, model, optimizer, _ = begin()
sync = nc.sync_every(3, model, optimizer, fresh=True, name="halves")
train(accelerator, model, optimizer, halves[0])
accelerator.save_state(f"state-{nc.node()}")
sync.checkpoint("halves")
sync.finish()
"""
    run(cluster, source)
    resumed = """
accelerator, model, optimizer, _ = begin()
accelerator.load_state(f"state-{nc.node()}")
sync = nc.sync_every(3, model, optimizer, resume="halves", name="halves")
train(accelerator, model, optimizer, halves[1])
sync.finish()
say(same=flat(model) == whole, theta=flat(model))
"""
    facts = facts_of(run(cluster, resumed))
    assert facts["local"]["theta"] == facts["local-2"]["theta"]
    assert all(said["same"] for said in facts.values())


def test_the_recipe_runs(cluster: Cluster) -> None:
    run(
        cluster,
        "torch.manual_seed(rank); model = torch.nn.Linear(8, 1); loss_function = torch.nn.functional.mse_loss\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "pairs = torch.utils.data.TensorDataset(torch.randn(6400, 8), torch.randn(6400, 1))\n"
        "train_loader = torch.utils.data.DataLoader(pairs, batch_size=64)",
    )
    run(cluster, recipe("Accelerate").removeprefix("%%on_all\n"))
    facts = facts_of(run(cluster, "say(theta=flat(model))"))
    assert facts["local"]["theta"] == facts["local-2"]["theta"]
    (job,) = [row for row in cluster.state().jobs if row.name == "model"]
    assert job.round == 1  # 50 batches a node and epoch, two for each step
