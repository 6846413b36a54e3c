"""Nodes that join a training on a real cluster: a slow transfer of the state, and many joins, hold nobody up."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, run, running_cluster
from tests.conftest import wait_until
from tests.training_cells import SETUP, commits, counted, job, logged, wait_for_commit

pytestmark = pytest.mark.usefixtures("work")

HOLD_BACK = """
from notebook_cluster.protocol.mesh import JobFrame

if nc.node() == "local-3":  # what comes of the state waits until the test says so
    mesh = current_runtime()._mesh
    take, held = mesh.on_frame, []

    def hold(sender, header, payload):
        is_state = isinstance(header, JobFrame) and header.kind in ("state", "sent")
        if is_state and (held or not os.path.exists("enough-held")):
            held.append((sender, header, payload))
            pathlib.Path("held").touch()
        else:
            take(sender, header, payload)

    def let_go(now):
        while held and os.path.exists("enough-held"):
            take(*held.pop(0))

    mesh.on_frame = hold
    mesh._loop.every(0.05, let_go)
"""

UNTIL = """
model = make_model(50_000, seed=rank)
sync = nc.DiLoCo(model, every=2, codec={codec!r})
print("begins", sync.round, state_hash(model.weight.detach().numpy(), sync._replica.momentum), flush=True)
step = 0
while not os.path.exists("enough"):
    work(model, step)
    time.sleep({seconds})
    step += 1
    sync.step(loss=step)
sync.finish()
print("ends", sync.round, state_hash(model.weight.detach().numpy(), sync._replica.momentum))
"""


def attempts(cluster: Cluster) -> Counter[int]:
    """Round -> how often it was tried, from the journal."""
    return Counter(record["seal"]["round"] for record in logged(cluster, "seal"))


def check(cluster: Cluster, watcher: Watcher, joined: list[str]) -> list[dict[str, Any]]:
    """The cell ends well on all nodes; every round was tried once; who joined began with a committed state and all end
    with one. Returns the COMMIT records."""
    Path("enough").touch()
    ended = watcher.wait_end(120)
    assert {name: result.status for name, result in ended.results.items()} == dict.fromkeys(ended.results, "ok")
    assert set(joined) < set(ended.results)
    records = commits(cluster)
    committed = {record["commit"]["round"]: record["commit"]["state_hash"] for record in records}
    assert attempts(cluster) == dict.fromkeys(committed, 1)
    for name in joined:
        number, state = watcher.text(name).rpartition("begins ")[2].split()[:2]
        assert committed[int(number)] == state, name
    ends = {watcher.text(name).rpartition("ends ")[2] for name in ended.results}
    assert ends == {f"{len(records)} {committed[len(records)]}\n"}
    assert job(cluster).hash_mismatches == 0
    return records


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_a_joiner_whose_transfer_lasts_five_rounds_joins_with_an_equal_hash(work: Path, codec: str) -> None:
    """With int8 the means of what it missed are shorter than the whole state."""
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        run(cluster, HOLD_BACK)
        watcher = Watcher(cluster.execute(UNTIL.format(codec=codec, seconds=0.02)))
        wait_until(lambda: len(commits(cluster)) >= 1, 60, "a round")
        assert cluster.add("local", 1) == ["local-3"]
        wait_until(lambda: (work / "held").exists(), 60, "a piece of the state")
        before = len(commits(cluster))
        wait_until(lambda: len(commits(cluster)) >= before + 5, 60, "five rounds")
        (work / "enough-held").touch()
        wait_for_commit(cluster, lambda record: "local-3" in counted(record), "a round with local-3")
        records = check(cluster, watcher, ["local-3"])
        first = next(number for number, record in enumerate(records) if "local-3" in counted(record))
        assert first >= before + 5


@pytest.mark.proof
def test_ten_nodes_that_join_abort_nothing() -> None:
    with running_cluster(local=2) as cluster:
        run(cluster, SETUP)
        watcher = Watcher(cluster.execute(UNTIL.format(codec="float32", seconds=0.1)))
        wait_until(lambda: len(commits(cluster)) >= 1, 60, "a round")
        joined = [name for _ in range(5) for name in cluster.add("local", 2)]
        assert len(set(joined)) == 10
        wait_until(lambda: set(joined) <= set(counted(commits(cluster)[-1])), 240, "a round with all twelve")
        check(cluster, watcher, joined)
