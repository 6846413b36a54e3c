"""The machine of the coordinator is gone, and its owner goes on elsewhere with what the other machines keep."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.client.requests import add_request
from notebook_cluster.journal.reading import recover
from tests.cluster import end, is_running, kernel_pid, kill, run, running_cluster, stopped, text_of
from tests.conftest import Agents, wait_until
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import error_of
from tests.strangers import Strangers
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


def words(text: str, after: str) -> list[str]:
    """What stands behind ``after``."""
    return text.partition(after)[2].replace(",", " ").split()


def agent_pid(cluster: Cluster) -> int:
    """Of the coordinator's own agent."""
    pid = recover(Path(cluster.connection.file.run_log)).state.peers["local"].pid
    assert pid is not None
    return pid


def lose_machine(cluster: Cluster) -> None:
    """Its coordinator, its own agent and its runtime folder are gone at once."""
    agent = agent_pid(cluster)
    kill(cluster.connection.file.pid)
    kill(agent)
    wait_until(lambda: not is_running(agent), 30, "the end of the agent there")
    cluster.close()
    shutil.rmtree(Path(cluster.connection.file.run_log).parent)


@pytest.fixture
def other_machine(jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``with other_machine():`` what is started has the identity of this user and whom it trusts, and nothing else."""

    @contextmanager
    def there() -> Iterator[Path]:
        root, own = jupyter_dirs / "other", jupyter_dirs / "data" / "notebook_cluster"
        folder = root / "data" / "notebook_cluster"
        for part in (folder, root / "run"):
            part.mkdir(parents=True, mode=0o700, exist_ok=True)
        for file in ("identity.json", "trusted_peers.json"):
            shutil.copy(own / file, folder / file)
        with monkeypatch.context() as patch:
            patch.setenv("JUPYTER_DATA_DIR", str(root / "data"))
            patch.setenv("JUPYTER_RUNTIME_DIR", str(root / "run"))
            yield root

    return there


@contextmanager
def taken_over(name: str, lines: list[str], **options: Any) -> Iterator[Cluster]:
    """``lines`` are what its owner is told."""
    cluster = Cluster.take_over(name, on_progress=lines.append, **options)
    try:
        yield cluster
    finally:
        end(cluster)
        cluster.close()


def test_another_machine_of_the_owner_goes_on_with_other_nodes(
    strangers: Strangers, work: Path, other_machine: Any
) -> None:
    mini, desk, air = strangers("mini"), strangers("desk"), strangers("air")
    first = Cluster.start("digits", local=1)
    for peer in (mini, desk, air):
        first.add(peer.name, code=peer.code)
    first.remove(air.name)
    there = kernel_pid(first, mini.name)
    run(first, SETUP)
    first.execute(CELL.format(steps=100_000, pause=0.02))
    wait_for_commit(first, lambda record: record["commit"]["round"] >= 3, "round 3")

    with other_machine() as root:
        notebook = NotebookKernel(root)
        notebook.works("%load_ext notebook_cluster")
        refused = error_of(notebook, "%cluster take-over digits")
        assert "cluster 'digits' still runs: " in refused
        assert "%cluster attach digits goes on with it" in refused
        assert is_running(there)
    last = commits(first)[-1]["commit"]["round"]
    wait_for_commit(first, lambda record: record["commit"]["round"] > last, "the next round")

    last = commits(first)[-1]["commit"]["round"]
    desk.end()  # its nodes are no more
    wait_for_commit(first, lambda record: record["commit"]["round"] > last, "a round without it")
    last = commits(first)[-1]["commit"]["round"]
    lose_machine(first)
    gone = time.time()

    with other_machine():
        told = notebook.works("%cluster take-over digits --no-panel")
        assert f"{mini.name}: ended 1 node of the cluster before, after a checkpoint" in told
        assert not is_running(there)
        round = int(words(told, "took over training 'model' after round ")[0])
        assert last <= round <= last + 3
        assert f", which {mini.name} kept " in told
        notebook.works("%%on_all\n" + SETUP)
        shown = notebook.works("%%on_all\n" + CELL.format(steps=4, pause=0))
        with Cluster.attach("digits") as cluster:
            assert {row.name for row in cluster.state().nodes} == {"local", mini.name, air.name}
            records = commits(cluster)
            print(f"from the kill to the next COMMIT: {records[0]['time'] - gone:.1f} s")
            rounds = [record["commit"]["round"] for record in records]
            # More of them where a machine was so late that the others went on, and its work came in a later one.
            assert rounds == list(range(round + 1, round + 1 + len(rounds)))
            assert len(rounds) >= 2
            assert len(records[0]["commit"]["members"]) == 3
            assert shown.count(f"begins {round} ") == shown.count("begins "), shown
            # whoever was there goes on with what it had beside the model, others begin that afresh
            assert f"begins {round} 0" in shown
            assert int(words(shown.partition(f"[{mini.name}")[2], f"begins {round} ")[0]) >= 2 * last
            texts = run(
                cluster, "print(sync.round, state_hash(model.weight.detach().numpy(), np.zeros(0, np.float32)))"
            )
            assert len(set(texts.values())) == 1, texts
            # in the same kernels it goes on from where it is, not from where the cluster began
            again = run(cluster, CELL.format(steps=2, pause=0))
            assert {words(text, "begins ")[0] for text in again.values()} == {str(rounds[-1])}
            end(cluster)
        notebook.close()


@pytest.mark.proof
def test_where_the_coordinator_alone_was_killed_its_own_machine_goes_on_too(
    jupyter_dirs: Path, agents: Agents, work: Path
) -> None:
    agents("mini", "slow")
    first = Cluster.start("digits", local=1, peers=["mini"])
    pids = [kernel_pid(first, node) for node in ("local", "mini")]
    agent = agent_pid(first)
    run(first, SETUP)
    assert "ends 3" in run(first, CELL.format(steps=6, pause=0))["local"]
    kill(first.connection.file.pid)
    first.close()

    lines: list[str] = []
    with stopped(agents.pid("slow")), taken_over("digits", lines, peers=["slow", "mini"]) as cluster:
        told = "\n".join(lines)
        assert "slow" in told.partition(": it goes on without it")[0]
        assert "this machine: ended 1 node of the cluster before, after a checkpoint" in told
        assert "mini: ended 1 node of the cluster before, after a checkpoint" in told
        wait_until(lambda: not any(map(is_running, [agent, *pids])), 30, "the end of what was left")
        assert "took over training 'model' after round 3, which " in told
        assert {row.name for row in cluster.state().nodes} == {"local", "mini"}
        run(cluster, SETUP)
        texts = run(cluster, CELL.format(steps=2, pause=0))
        assert {words(text, "begins ")[0] for text in texts.values()} == {"3"}
        assert len({words(text, "ends ")[1] for text in texts.values()}) == 1
        # where the cluster has a state of the job, who joins later takes that
        cluster.add("local")
        run(cluster, SETUP)
        ended, outputs = cluster.run(CELL.format(steps=2, pause=0))
        assert ended.status == "ok", text_of(outputs)
        assert words(text_of(outputs, "local-2"), "begins ")[:2] == ["4", "0"]


@pytest.mark.proof
def test_a_coordinator_that_slept_meanwhile_ends_and_nothing_that_it_sends_is_obeyed(
    strangers: Strangers, work: Path, other_machine: Any
) -> None:
    mini = strangers("mini")
    first = Cluster.start("digits", local=1)
    first.add(mini.name, code=mini.code)
    local, asleep = kernel_pid(first, "local"), first.connection.file.pid
    run(first, SETUP)
    assert "ends 3" in run(first, CELL.format(steps=6, pause=0))["local"]
    lines: list[str] = []
    with ExitStack() as stack:
        with stopped(asleep):
            stack.enter_context(other_machine())
            cluster = stack.enter_context(taken_over("digits", lines, local=0))
            there = kernel_pid(cluster, mini.name)
            asked = first.connection.request(add_request(mini.name, 1, ""), list[str])
        wait_until(lambda: first.connection.closed is not None, 60, "the end of the one that slept")
        assert f"{mini.name} follows another coordinator of cluster 'digits', which its owner started on " in str(
            first.connection.closed
        )
        wait_until(lambda: not is_running(asleep) and not is_running(local), 60, "the end of what it had")
        assert isinstance(asked.exception(60), ClusterError)
        first.close()
        run(cluster, SETUP)
        assert words(run(cluster, CELL.format(steps=2, pause=0))[mini.name], "begins ")[0] == "3"
        assert kernel_pid(cluster, mini.name) == there
        assert mini.output.count(f"started node {mini.name}") == 2


OLD = """
from notebook_cluster import protocol
from notebook_cluster.protocol import wire
protocol.PROTOCOL_VERSION = wire.PROTOCOL_VERSION = wire.PROTOCOL_VERSION - 1
"""


def test_machines_that_cannot_help_are_named_each_with_its_reason(
    jupyter_dirs: Path, agents: Agents, work: Path
) -> None:
    (work / "sitecustomize.py").write_text(OLD)
    agents("old", environment={"PYTHONPATH": str(work)})
    agents("mini")
    torn = jupyter_dirs / "agents" / "mini" / "work" / "digits" / "checkpoints" / "model-kept" / "round-000012"
    torn.mkdir(parents=True)
    (torn / "manifest.json").write_text("{")
    with pytest.raises(ClusterError) as refused:
        Cluster.take_over("digits", local=0, peers=["mini", "old", "nobody"])
    told = str(refused.value)
    assert told.startswith("nothing is kept of a cluster 'digits': asked local, mini; "), told
    assert "peer 'old' speaks protocol " in told
    assert "upgrade notebook-cluster on 'old': it goes on without it" in told
    assert f"mini: {torn / 'manifest.json'} is not readable" in told
    assert "'nobody'" in told
    assert told.endswith("each keeps its part when its coordinator is gone for 20 s")


def test_nothing_is_kept_anywhere(agents: Agents, work: Path) -> None:
    agents("mini")
    with pytest.raises(
        ClusterError, match=r"nothing is kept of a cluster 'digits': asked local, mini\. Check the name"
    ):
        Cluster.take_over("digits", peers=["mini"])
    with pytest.raises(ClusterError, match=r"cluster name '\.\./x' is not usable"):
        Cluster.take_over("../x")


STAYS = r"The journal of the cluster before is as it was: %cluster start digits goes on with it$"


def test_one_that_cannot_be_leaves_what_a_killed_coordinator_has_left(
    jupyter_dirs: Path, agents: Agents, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTEBOOK_CLUSTER_KEEP_RUNS", "0")
    agents("mini")
    first = Cluster.start("digits", local=1, peers=["mini"])
    pids = {node: kernel_pid(first, node) for node in ("local", "mini")}
    run(first, "value = rank + 40")
    kill(first.connection.file.pid)
    first.close()
    with pytest.raises(ClusterError, match=f"no machine could go on with cluster 'digits': .*{STAYS}"):
        Cluster.take_over("digits", local=0, peers=[])
    with pytest.raises(ClusterError, match=f"nothing is kept of a cluster 'digits': asked local, mini.*{STAYS}"):
        Cluster.take_over("digits", peers=["mini"])
    with running_cluster("digits") as again:
        assert again.attached
        again.wait_until(lambda state: [row.condition for row in state.nodes] == ["ok", "ok"])
        assert {node: kernel_pid(again, node) for node in pids} == pids
        assert run(again, "print(value)") == {"local": "40\n", "mini": "41\n"}


def test_a_training_that_cannot_be_kept_stays_where_it_is(jupyter_dirs: Path, work: Path) -> None:
    first = Cluster.start("digits", local=1)
    pid = kernel_pid(first, "local")
    run(first, SETUP)
    assert "ends 3" in run(first, CELL.format(steps=6, pause=0))["local"]
    kill(first.connection.file.pid)
    first.close()
    (work / "checkpoints").write_text("in the way")
    why = "kept no checkpoint: .* Not a directory: make room or use another folder: left out"
    with pytest.raises(ClusterError, match=rf"nothing is kept of a cluster 'digits': .*{why}.*{STAYS}"):
        Cluster.take_over("digits", peers=[])
    with running_cluster("digits") as again:
        again.wait_until(lambda state: [row.condition for row in state.nodes] == ["ok"])
        assert kernel_pid(again, "local") == pid
        assert run(again, "print(sync.round)") == {"local": "3\n"}
