"""``nc.sync_every``: any loop with a torch optimizer, on two nodes."""

from collections.abc import Iterator

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import mend, run, shared_cluster, text_of
from tests.practice.loops import ON_NODES, assert_expected, trained
from tests.practice.recipes import recipe

pytest.importorskip("torch")

LOOP = """
def by_somebody_else(model, optimizer, batches, accumulate=1, scale=1.0):
    seen.clear()
    for at, batch in enumerate(batches):
        (model(**batch)["loss"] / accumulate).backward()
        if (at + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
def mine(count=40, **more):
    return nc.shard(torch.utils.data.DataLoader(Examples(count), batch_size=4), **more)
def a_model():
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=2) as cluster:
        run(cluster, ON_NODES + LOOP)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    mend(shared)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_of_somebody_else_trains_one_model_and_what_was_not_stepped_does_not_count(
    cluster: Cluster, accumulate: int
) -> None:
    facts = trained(
        cluster,
        f"""
model, optimizer = a_model()
sync = nc.sync_every(3, model, optimizer, fresh=True)
by_somebody_else(model, optimizer, mine(48, epochs=2), {accumulate})
sync.finish()
say(seen=seen, theta=flat(model), round=sync.round)
""",
    )
    assert_expected(facts, count=48, every=3, lr=0.1, accumulate=accumulate)
    assert {said["round"] for said in facts.values()} == {4 // accumulate}


def test_strategy_and_settings_are_those_that_were_asked_for(cluster: Cluster) -> None:
    facts = trained(
        cluster,
        """
model, optimizer = a_model()
sync = nc.sync_every(2, model, optimizer, strategy=nc.LocalSGD, name="averaged", samples=4)
by_somebody_else(model, optimizer, mine())
sync.finish()
say(seen=seen, theta=flat(model), kind=type(sync).__name__)
""",
    )
    assert_expected(facts, count=40, every=2, lr=0.1, momentum=0.0)
    assert facts["local"]["kind"] == "LocalSGD"


def test_the_hook_goes_on_in_a_later_cell_and_is_replaced_where_it_is_asked_for_again(cluster: Cluster) -> None:
    run(
        cluster,
        "model, optimizer = a_model()\nsync = nc.sync_every(2, model, optimizer, name='later', fresh=True)\n"
        "by_somebody_else(model, optimizer, mine())",
    )
    first = trained(cluster, "say(theta=flat(model), round=sync.round)")
    assert first["local"]["round"] == 3  # the last one at the end of the cell
    run(cluster, "by_somebody_else(model, optimizer, mine())")
    assert trained(cluster, "say(theta=flat(model), round=sync.round)")["local"]["round"] == 6
    again = trained(
        cluster,
        "before = sync; sync = nc.sync_every(5, model, optimizer, name='other')\n"
        "by_somebody_else(model, optimizer, mine()); sync.finish()\n"
        "say(theta=flat(model), round=sync.round, before=before.unfinished)",
    )
    assert again["local"]["round"] == 1
    assert again["local"]["before"] is False


def test_what_cannot_be_hooked_is_named(cluster: Cluster) -> None:
    ended, outputs = cluster.run("nc.sync_every(5, Model(), object())")
    assert {result.error_name for result in ended.results.values()} == {"TypeError"}, text_of(outputs)
    text = ended.results["local"].error_value
    assert text.startswith("optimizer=object has no hook after its steps: pass a torch.optim optimizer, or make")
    ended, _ = cluster.run("model, optimizer = a_model(); nc.sync_every(5, model, optimizer, strategy=nc.DeMo)")
    assert "strategy=DeMo: use nc.DiLoCo" in ended.results["local-2"].error_value


def test_the_recipe_runs(cluster: Cluster) -> None:
    run(
        cluster,
        "torch.manual_seed(rank); model = torch.nn.Linear(8, 1); loss_function = torch.nn.functional.mse_loss\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "train_set = torch.utils.data.TensorDataset(torch.randn(6400, 8), torch.randn(6400, 1))",
    )
    run(cluster, recipe("Any loop").removeprefix("%%on_all\n"))
    trained(cluster, "say(theta=flat(model))")
    (job,) = [row for row in cluster.state().jobs if row.name == "model"]
    assert job.round >= 2
