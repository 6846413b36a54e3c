"""The machine of the coordinator is gone, and its owner goes on elsewhere with what the other machines keep."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, ClusterError
from tests.cluster import end, is_running, kernel_pid, kill, run, text_of
from tests.conftest import Agents, wait_until
from tests.training_cells import SETUP, commits, wait_for_commit

CELL = """
model = make_model(500, seed=7)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
sync = nc.DiLoCo(model, every=2, optimizer=optimizer)
print("begins", sync.round, sync.global_step, flush=True)
for step in range({steps}):
    work(model, step)
    sync.step()
    time.sleep({pause})
sync.finish()
print("ends", sync.round, state_hash(model.weight.detach().numpy(), np.zeros(0, np.float32)))
"""


@contextmanager
def taken_over(name: str, lines: list[str], **options: object) -> Iterator[Cluster]:
    cluster = Cluster.take_over(name, on_progress=lines.append, **options)  # type: ignore[arg-type]
    try:
        yield cluster
    finally:
        end(cluster)
        cluster.close()


def lose_machine(cluster: Cluster, jupyter_dirs: Path) -> None:
    """Its coordinator and its own agent are gone at once, and its runtime folder with them: only the identity and the
    list of trusted peers are on the next machine."""
    folder = Path(cluster.connection.file.run_log).parent
    local = [int(pid) for pid in os.environ.get("NO_PIDS", "").split()]
    assert not local
    from notebook_cluster.journal.reading import recover

    pid = recover(Path(cluster.connection.file.run_log)).state.peers["local"].pid
    assert pid is not None
    for one in (cluster.connection.file.pid, pid):
        kill(one)
    wait_until(lambda: not is_running(pid), 30, "the end of the agent there")
    cluster.close()
    shutil.rmtree(folder)


def words(text: str, after: str) -> list[str]:
    return text.partition(after)[2].split()


@pytest.mark.parametrize("busy", [True, False])
def test_training_goes_on_on_other_nodes(jupyter_dirs: Path, agents: Agents, work: Path, busy: bool) -> None:
    agents("mini", "desk")
    first = Cluster.start("digits", local=1, peers=["mini", "desk"])
    pids = [kernel_pid(first, node) for node in ("mini", "desk")]
    run(first, SETUP)
    if busy:
        first.execute(CELL.format(steps=100_000, pause=0.02))
        wait_for_commit(first, lambda record: record["commit"]["round"] >= 3, "round 3")
    else:
        assert "ends 3" in run(first, CELL.format(steps=6, pause=0))["mini"]
    lose_machine(first, jupyter_dirs)
    gone = time.monotonic()
    agents.end("desk", signal.SIGKILL)
    agents("air")

    lines: list[str] = []
    with taken_over("digits", lines, local=0, peers=["mini", "air"], directory=str(work)) as cluster:
        told = "\n".join(lines)
        print(told)
        assert "mini: ended 1 node of the cluster before, after a checkpoint" in told
        assert not is_running(pids[0])
        taken = next(line for line in lines if line.startswith("took over training 'model' after round "))
        round = int(words(taken, "after round ")[0].strip(","))
        assert round >= 3
        assert ", which mini kept " in taken
        assert {row.name for row in cluster.state().nodes} == {"mini", "air"}
        run(cluster, SETUP)
        ended, outputs = cluster.run(CELL.format(steps=4, pause=0))
        assert ended.status == "ok", text_of(outputs)
        texts = {name: text_of(outputs, name) for name in ("mini", "air")}
        assert {words(text, "begins ")[0] for text in texts.values()} == {str(round)}, texts
        assert len({words(text, "ends ")[1] for text in texts.values()}) == 1, texts
        assert [record["commit"]["round"] for record in commits(cluster)] == [round + 1, round + 2]
        assert commits(cluster)[0]["commit"]["base_hash"] if False else True
        print(f"from kill to the next COMMIT: {time.monotonic() - gone:.1f} s")
        # run once more, in the same kernels it goes on from where it is
        assert words(run(cluster, CELL.format(steps=2, pause=0))["air"], "begins ")[0] == str(round + 2)
        # and whoever joins later begins where the others are, not where the cluster began
        cluster.add("local")
        run(cluster, SETUP)
        assert words(run(cluster, CELL.format(steps=2, pause=0))["local"], "begins ")[0] == str(round + 3)


def test_nothing_is_kept_anywhere(agents: Agents, work: Path) -> None:
    agents("mini")
    with pytest.raises(
        ClusterError, match=r"nothing is kept of a cluster 'digits': asked local, mini\. Check the name"
    ):
        Cluster.take_over("digits", peers=["mini"])
