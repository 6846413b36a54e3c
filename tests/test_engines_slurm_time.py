"""What Slurm itself ends: the time of a host is over, or its node goes down."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.widgets import render_text
from tests.cluster import Watcher, running_cluster
from tests.conftest import shared_folders, wait_until
from tests.engines.running import Slurm, ask, no_slurm, slurm

pytestmark = pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "there is one")
TRAIN = """
import time, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
sync = nc.DiLoCo(model, every=2)
print('begun', flush=True)
while True:
    time.sleep(0.02)
    loss = model(torch.ones(2, 4)).pow(2).mean()
    loss.backward()
    sync.step(loss=loss, samples=2)
"""


@pytest.fixture(name="root", scope="module")
def folders() -> Iterator[Path]:
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        (root / "work").mkdir()
        patch.chdir(root / "work")
        yield root


@pytest.fixture(name="engine", scope="module")
def running_engine(root: Path) -> Iterator[Slurm]:
    with slurm(2) as engine:
        yield engine


def members(state: ClusterView) -> list[str]:
    return sorted(state.jobs[0].members) if state.jobs else []


def until_members(cluster: Cluster, *wanted: str) -> int:
    """Wait until these train together; the round."""

    def look(state: ClusterView) -> int:
        return state.jobs[0].round if members(state) == list(wanted) and state.jobs[0].round else 0

    try:
        return cluster.wait_until(look, 120)
    except TimeoutError:
        pytest.fail(f"not {wanted}: {render_text(cluster.state())}")


@pytest.mark.proof
def test_a_host_leaves_with_a_checkpoint_before_its_time_is_over(root: Path, engine: Slurm) -> None:
    with running_cluster("brief", local=1, on="slurm", hosts=1, address="127.0.0.1", time="1") as cluster:
        (job,) = engine.jobs()
        watcher = Watcher(cluster.execute(TRAIN))
        until_members(cluster, "local", "n1")
        round = until_members(cluster, "local")
        cluster.wait_until(lambda state: state.jobs[0].round > round, 60)  # the other one goes on
        wait_until(lambda: job not in engine.jobs(), what=lambda: str(engine.jobs()))
        said = lambda: ask("scontrol", "show", "job", job)  # noqa: E731
        wait_until(lambda: "JobState=COMPLETED" in said(), what=said)  # COMPLETING before
        kept = [path for path in root.glob("**/model-kept/**/manifest.json") if "agents/n1" in str(path)]
        assert kept, list(root.glob("**/model-kept"))
        cluster.interrupt()
        watcher.wait_end()


def test_a_host_whose_node_goes_down_comes_back_on_another_one(engine: Slurm) -> None:
    with running_cluster("steady", on="slurm", hosts=1, address="127.0.0.1", time="5") as cluster:

        def there() -> set[str]:
            return {node.name for node in cluster.state().nodes if node.condition == "ok"}

        wait_until(lambda: len(there()) == 1, what=lambda: render_text(cluster.state()))
        (down,), (job,) = there(), engine.jobs()
        ask("scontrol", "update", f"NodeName={down}", "State=DOWN", "Reason=test")
        try:
            wait_until(lambda: not there(), what=lambda: render_text(cluster.state()))
            wait_until(lambda: engine.jobs().get(job) == "PENDING", what=lambda: str(engine.jobs()))
            ask("scontrol", "update", f"JobId={job}", "StartTime=now")
            other = {"n1", "n2"} - {down}
            wait_until(lambda: there() == other, what=lambda: render_text(cluster.state()))
            assert cluster.run("pass")[0].status == "ok"
        finally:
            ask("scontrol", "update", f"NodeName={down}", "State=RESUME")
