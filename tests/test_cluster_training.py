"""Training on a real cluster: what kills, restarts and Stop do to rounds, against the numpy reference."""

from pathlib import Path

import numpy as np
import pytest

from tests.cluster import Watcher, kernel_pid, kill, node, run, running_cluster
from tests.conftest import wait_until
from tests.training_cells import SETUP, commits, counted, job, replay, wait_for_commit

ELEMENTS = 120_000
"""More than a block of slices per node, and several chunks on the mesh."""


@pytest.fixture(autouse=True)
def work(jupyter_dirs: Path, no_processes_left: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in a folder of its own, which its nodes share, and leaves no process."""
    folder = jupyter_dirs / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


ROUNDS = """
model = make_model({elements}, seed=rank)
sync = nc.DiLoCo(model, every=2)
keep("theta", model, 0)
{hook}
for step in range(8):
    work(model, step)
    if step % 2:
        keep("local", model, sync.round + 1)
    if sync.step(loss=step, samples=rank + 1):
        keep("theta", model, sync.round)
sync.finish()
"""


@pytest.mark.parametrize("victim", ["local", "local-3"])
@pytest.mark.parametrize(
    ("hook", "left_out"),
    [("'receive', rounds.Seal, 2", True), ("'send', rounds.Prepared, 2", True), ("'receive', rounds.Commit, 2", False)],
    ids=["sealed", "preparing", "committed"],
)
def test_sigkill_in_the_middle_of_a_round_leaves_the_survivors_on_the_reference(
    work: Path, hook: str, left_out: bool, victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_cluster(local=3) as cluster:
        run(cluster, SETUP)
        hook = f"if nc.node() == {victim!r}: when({hook}, die)"
        ended, _ = cluster.run(ROUNDS.format(elements=ELEMENTS, hook=hook))
        assert "SIGKILL" in ended.results[victim].reason
        survivors = sorted({"local", "local-2", "local-3"} - {victim})
        assert all(ended.results[name].status == "ok" for name in survivors)
        records = commits(cluster)
        assert [record["commit"]["round"] for record in records] == [1, 2, 3, 4]
        assert (victim not in counted(records[1])) == left_out
        assert sorted(counted(records[2])) == survivors
        for number, theta in enumerate(replay(work, records), 1):
            for name in survivors:
                np.testing.assert_array_equal(np.load(work / f"theta-{number}-{name}.npy"), theta)
        assert job(cluster).hash_mismatches == 0
        seconds = records[1 if left_out else 2]["time"] - float((work / "killed").read_text())
        with capsys.disabled():
            print(f"\n[{victim} killed: the survivors' COMMIT {seconds:.2f} s later]", end=" ")
