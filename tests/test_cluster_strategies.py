"""The strategies on real kernels: equal states after every round, nodes of unlike speed, a step that loses a node."""

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import run, running_cluster
from tests.training_cells import SETUP, job

pytestmark = pytest.mark.usefixtures("work")

NAMES = ("local", "local-2", "local-3")

SETUP_MORE = """
def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 200), nn.Tanh(), nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 5))

def loss_of(model, seed, size=16):
    x = torch.randn(size, 20, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x[:, :5].tanh()).square().mean()

def flat(model):
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()]).numpy()

def digest(model):
    return state_hash(flat(model), np.empty(0, np.float32))

def loop(sync, model, steps, seconds=0.0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, 100 * step + rank)
        loss.backward()
        optimizer.step()
        time.sleep(seconds)
        if done := sync.step(loss=loss, samples=16):
            hashes.append(done.state_hash)
    sync.finish()

hashes = []
"""


def said_by_all(cluster: Cluster, source: str) -> str:
    """What every node printed, which must be the same."""
    said = run(cluster, source)
    assert set(said) == set(NAMES)
    assert len(set(said.values())) == 1, said
    return said["local"]


def test_every_strategy_leaves_all_nodes_with_one_state_after_every_round() -> None:
    with running_cluster(local=3) as cluster:
        run(cluster, SETUP + SETUP_MORE)
        for name, made in {
            "streaming": "nc.DiLoCo(model, every=6, name='streaming', fragments=3, overlap=2)",
            "sparse": "nc.SparseLoCo(model, every=3, name='sparse', overlap=1)",
            "quorum": "nc.DiLoCo(model, every=4, name='quorum', quorum=2, grace=0.2, codec='int8')",
        }.items():
            said = said_by_all(
                cluster,
                f"""
hashes.clear()
model = network(rank)
before = loss_of(network(0), 1, 256).item()
loop({made}, model, 20, seconds=0.02 if {name!r} == "quorum" and rank == 2 else 0.0)
assert loss_of(model, 1, 256).item() < before
print(digest(model))
""",
            )
            assert len(said.split()) == 1
            view = job(cluster, name)
            assert view.round >= 5
            assert view.hash_mismatches == 0
        # gradients: one state at every step, and one step where one machine would have taken it
        said = said_by_all(
            cluster,
            """
model = network(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sync = nc.DataParallel(model, optimizer, name="parallel", resend=6)
for step in range(10):
    loss_of(model, 100 * step + rank).backward()
    sync.step(samples=16)
    print(digest(model))
alone = network(0)
optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
for step in range(10):
    optimizer.zero_grad()
    (sum(loss_of(alone, 100 * step + other) for other in range(3)) / 3).backward()
    optimizer.step()
assert np.abs(flat(alone) - flat(model)).max() < 1e-5
""",
        )
        assert len(set(said.split())) == 10
        assert job(cluster, "parallel").round == 11
        # momenta: a step of all without an optimizer
        said = said_by_all(
            cluster,
            """
model = network(rank)
before = loss_of(network(0), 1, 256).item()
sync = nc.DeMo(model, lr=0.003, name="momenta")
for step in range(20):
    loss_of(model, 100 * step + rank).backward()
    print(sync.step(samples=16).state_hash, digest(model))
assert loss_of(model, 1, 256).item() < before
""",
        )
        assert len(set(said.splitlines())) == 20
        view = job(cluster, "momenta")
        assert (view.round, view.hash_mismatches) == (20, 0)


def test_a_step_that_loses_a_node_is_taken_by_the_others() -> None:
    with running_cluster(local=3) as cluster:
        run(cluster, SETUP + SETUP_MORE)
        ended, _ = cluster.run("""
model = network(rank)
sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.003))
if rank == 1:
    when("send", rounds.Prepared, 4, die)
for step in range(9):
    loss_of(model, 100 * step + rank).backward()
    sync.step(samples=16)
sync.finish()
""")
        assert "SIGKILL" in ended.results["local-2"].reason
        ends = run(cluster, "print(digest(model))", ("local", "local-3"))
        assert ends["local"] == ends["local-3"]
        assert (job(cluster).round, job(cluster).hash_mismatches) == (9, 0)
