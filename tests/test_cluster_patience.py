"""Nobody waits long for a node that makes no progress, and a slow one is waited for.

Real kernels that are stopped, hold Python's lock or sleep, and agents that stand still or die.
"""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, kernel_pid, mend, node, run, running_cluster, shared_cluster, stopped
from tests.conftest import Agents, wait_until
from tests.training_cells import SETUP, commits, counted, unique_name

pytestmark = pytest.mark.timeout(180)

TRAIN = """
def train(name, steps=None, seconds=0.05, at={{}}, **options):
    "Until the file `enough` is there; `at`: step -> what is done then. Each node's steps, and its model at the end."
    model, enough = make_model({elements}), {enough!r}
    sync = nc.LocalSGD(model, every=2, name=name, **options)
    step = 0
    while (not os.path.exists(enough) if steps is None else step < steps):
        with torch.no_grad():
            model.weight[rank] -= 1.0  # how many of this node's steps are in the model, times its share
        at.get(step, lambda: None)()
        time.sleep(seconds)
        step += 1
        sync.step(loss=step)
    sync.finish()
    return step, state_hash(model.weight.detach().numpy(), model.weight.detach().numpy()[:0])
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=3) as cluster:
        yield cluster


@pytest.fixture
def began() -> float:
    """Before this, other tests have been told things."""
    return time.time()


@pytest.fixture
def trio(shared: Cluster, tmp_path: Path, began: float) -> Iterator[Cluster]:
    prepare = SETUP + TRAIN.format(elements=40_000, enough=str(tmp_path / "enough"))
    run(shared, f"{prepare}\nos.chdir({str(tmp_path)!r})")
    yield shared
    mend(shared)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Of the test's job."""
    return unique_name(request)


def told(cluster: Cluster, began: float = 0.0) -> list[str]:
    return [event.text for event in cluster.state().events if event.time >= began]


def without(cluster: Cluster, name: str, rounds: int, job: str = "model") -> Callable[[], bool]:
    """So many rounds went on without that node."""
    return lambda: sum(name not in counted(record) for record in commits(cluster, job)) >= rounds


def blamed(cluster: Cluster, *others: str, began: float = 0.0) -> list[str]:
    """What was said of the network, or of these nodes as if they were the reason."""
    wrong = ("cannot reach", "do not get through", *(f"{name!r} has made no progress" for name in others))
    return [text for text in told(cluster, began) if any(part in text for part in wrong)]


def test_rounds_go_on_without_a_stopped_kernel_which_is_named_and_brings_its_work_when_it_is_back(
    trio: Cluster, tmp_path: Path, name: str, began: float
) -> None:
    pid = kernel_pid(trio, "local-2")
    watcher = Watcher(trio.execute(f"print(*train({name!r}))"))
    wait_until(lambda: len(commits(trio, name)) >= 3, 60, "three rounds")
    with stopped(pid):
        wait_until(without(trio, "local-2", 3, name), 40, "rounds without the stopped node")
        shown = node(trio.state(), "local-2")
        assert shown.condition == "suspect"
        assert "no progress" in shown.reason
    last = len(commits(trio, name))
    wait_until(
        lambda: any("local-2" in counted(row) for row in commits(trio, name)[last:]), 60, "a round with it again"
    )
    (tmp_path / "enough").touch()
    assert watcher.wait_end().status == "ok"
    assert len({watcher.text(other).split()[-1] for other in ("local", "local-2", "local-3")}) == 1
    text = next(text for text in told(trio, began) if "has made no progress" in text)
    assert text.startswith("'local-2' has made no progress for 4 s (its process is stopped)"), text
    assert any("'local-2' makes progress again" in text for text in told(trio, began))
    assert not blamed(trio, "local", "local-3", began=began)
    seen = [(row["name"], row["contribution"]) for record in commits(trio, name) for row in record["members"]
            if row["name"] in counted(record)]  # fmt: skip
    assert len(seen) == len(set(seen))


def test_a_user_who_says_so_is_waited_with_for_longer(trio: Cluster, tmp_path: Path, name: str) -> None:
    pid = kernel_pid(trio, "local-2")
    watcher = Watcher(trio.execute(f"print(*train({name!r}, patience=60))"))
    wait_until(lambda: len(commits(trio, name)) >= 3, 60, "three rounds")
    with stopped(pid):
        before = len(commits(trio, name))
        time.sleep(8)  # longer than others are waited for
        assert len(commits(trio, name)) <= before + 1
    (tmp_path / "enough").touch()
    assert watcher.wait_end().status == "ok"
    assert all(len(counted(record)) == 3 for record in commits(trio, name)[:-1])


LOCKED = """
began = time.perf_counter()
sum(range(10_000_000))
once = time.perf_counter() - began

def hold_the_lock(seconds):
    sum(range(int(10_000_000 * seconds / once)))  # a loop in C: no other thread of Python's runs

slow = {{2: lambda: hold_the_lock(7.0)}} if rank == 0 else {{4: lambda: time.sleep(7.0)}} if rank == 1 else {{}}
print(*train({name!r}, 8, at=slow))
"""


def test_a_node_that_holds_pythons_lock_and_one_that_sleeps_are_waited_for(
    trio: Cluster, name: str, began: float
) -> None:
    run(trio, LOCKED.format(name=name))
    assert [len(counted(record)) for record in commits(trio, name)] == [3, 3, 3, 3]
    assert not [text for text in told(trio, began) if "no progress" in text]


REDUCE = """
import numpy as np
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
try:
    nc.all_reduce(np.ones(100_000, np.float32))
    print("reduced")
except nc.PeerLost as error:
    print("lost:", error)
"""


def test_a_collective_that_waits_for_a_stopped_node_raises_peer_lost(trio: Cluster, tmp_path: Path) -> None:
    pid = kernel_pid(trio, "local-2")
    watcher = Watcher(trio.execute(REDUCE, replay=False))
    wait_until(lambda: watcher.text().count("ready") == 3, 60, "all nodes")
    with stopped(pid):
        (tmp_path / "go").touch()
        for other in ("local", "local-3"):
            watcher.wait_for("lost: local-2 has made no progress for 4 s (its process is stopped)", other, 40)
    watcher.wait_end()
    said = run(trio, "import numpy as np\nprint(nc.all_reduce(np.ones(3, np.float32)))")
    assert set(said.values()) == {"[3. 3. 3.]\n"}


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_an_agent_that_stands_still_or_dies_is_left_out_before_it_is_lost(
    agents: Agents, work: Path, how: signal.Signals
) -> None:
    agents("mini")
    with running_cluster(local=2, peers=["all"]) as cluster:
        run(cluster, SETUP + TRAIN.format(elements=40_000, enough=str(work / "enough")))
        watcher = Watcher(cluster.execute("print(*train('model'))"))
        wait_until(lambda: len(commits(cluster)) >= 3, 60, "three rounds")
        process = psutil.Process(agents.pid("mini"))
        process.send_signal(how)
        wait_until(without(cluster, "mini", 2), 40, "rounds without mini")
        assert not any("is lost" in text for text in told(cluster)), told(cluster)
        text = next(text for text in told(cluster) if "has made no progress" in text)
        assert text.startswith("'mini' has made no progress for 4 s (nothing is heard from mini)"), text
        assert not blamed(cluster, "local", "local-2")
        if how == signal.SIGSTOP:
            process.send_signal(signal.SIGCONT)
            last = len(commits(cluster))
            wait_until(lambda: any("mini" in counted(row) for row in commits(cluster)[last:]), 60, "mini again")
        else:
            agents.processes.pop("mini").wait(30)
        (work / "enough").touch()
        ended = watcher.wait_end()
        assert {ended.results[name].status for name in ("local", "local-2")} == {"ok"}
