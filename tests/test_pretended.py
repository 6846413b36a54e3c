"""``%cluster start --fake``: machines that are played on this one, of which one is slow and one dies."""

import re

import psutil
import pytest

from notebook_cluster.launchers import LaunchError
from notebook_cluster.launchers.pretended import PretendedMachine, machines
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.node_commands import launch_options
from notebook_cluster.magics.parsing import parse_cluster
from tests.cluster import kernel_pid
from tests.conftest import wait_until
from tests.shared_notebook import shared_notebook

WORK = """%%on mini,desk -o took
import time
def work():
    began, used, total = time.perf_counter(), time.process_time(), 0
    for number in range(3_000_000):
        total += number
    return (time.perf_counter() - began) / (time.process_time() - used)
sorted(work() for _ in range(7))[3]"""
TRAIN = """%%on_all --async
import time, torch
model = torch.nn.Linear(4, 1)
sync = nc.LocalSGD(model, every=2, name="class")
while True:
    time.sleep(0.02)
    sync.step(loss=1.0)"""


def held(seen: list[tuple[str, str]]) -> list[str]:
    return [desk for _, desk in seen if desk == psutil.STATUS_STOPPED]


@pytest.mark.proof
def test_a_slow_machine_is_slow_and_one_that_dies_is_gone_while_others_go_on() -> None:
    with shared_notebook("--fake 3 --slow desk=4 --kill air@20s") as notebook, notebook.attach() as cluster:
        assert {node.name for node in cluster.state().nodes} == {"mini", "desk", "air"}
        assert {node.peer for node in cluster.state().nodes} == {"mini", "desk", "air"}
        mini, desk = (psutil.Process(kernel_pid(cluster, name)) for name in ("mini", "desk"))
        cell = notebook.start(WORK)
        seen: list[tuple[str, str]] = []
        wait_until(lambda: seen.append((mini.status(), desk.status())) or len(held(seen)) >= 3, 60, lambda: str(seen))
        assert not [one for one, _ in seen if one == psutil.STATUS_STOPPED]
        notebook.kernel.until(cell)
        # They share processors with all else that runs: what is slow is held for three quarters of the time.
        assert float(notebook.value("took['desk']")) > 2.5
        notebook.works(TRAIN)
        wait_until(lambda: any(job.round > 2 for job in cluster.state().jobs), 90, "the rounds to begin")
        wait_until(lambda: "it died, as was asked" in str(cluster.state()), 90, lambda: str(cluster.state()))
        rounds = cluster.state().jobs[0].round
        wait_until(lambda: cluster.state().jobs[0].round > rounds + 2, 60, lambda: str(cluster.state()))
        assert "air" not in {node.name for node in cluster.state().nodes if node.condition == "ok"}
        notebook.works("%cluster stop")


def test_what_was_typed_becomes_machines() -> None:
    call = parse_cluster("start --fake 4 --slow desk=4,mini=1.5 --kill mini@60s")
    assert call is not None
    assert launch_options(call) == {"on": "fake:mini*1.5@60,desk*4,air,attic"}
    assert machines("mini*1.5@60,desk*4,air") == [
        PretendedMachine("mini", 1.5, 60.0), PretendedMachine("desk", 4.0, 0.0), PretendedMachine("air", 1.0, 0.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--slow desk=4", "--slow and --kill are for machines of --fake N"),
        ("--fake 2 --slow attic=4", "--slow attic=4: the machines are mini, desk"),
        ("--fake 2 --slow desk", "--slow desk=: write --slow desk=4"),
        ("--fake 2 --kill desk@soon", "--kill desk@soon: write --kill desk@60s"),
        ("--fake 2 --on slurm --hosts 2", "leave --on out"),
        ("--fake 17", "--fake takes a whole number from 1 to 16"),
    ],
)
def test_what_does_not_fit_is_said(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        launch_options(parse_cluster(f"start {line}"))  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["", "mini,mini", "a b", "mini*0.5", "mini*40", "mini@x", "-x"])
def test_odd_machines_are_refused(where: str) -> None:
    with pytest.raises(LaunchError, match="--on fake:"):
        machines(where)
