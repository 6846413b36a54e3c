"""What a node has started ends with it, whatever it did to get away; what others have started stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from notebook_cluster.client import Cluster
from tests.cluster import is_running, kernel_pid, kill, run, running_cluster
from tests.conftest import Agents, wait_until

SLEEP = f"[{sys.executable!r}, '-c', 'import time; time.sleep(600)']"
DOUBLE = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
open({file!r}, "w").write(str(os.getpid()))
for descriptor in range(3):
    os.close(descriptor)
os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)"], {environment})
"""
HOW = {
    "a session of its own": f"subprocess.Popen({SLEEP}, start_new_session=True)",
    "setsid and nohup": "subprocess.run('setsid nohup sleep 600 >/dev/null 2>&1 &', shell=True)",
    "a double fork": "subprocess.run([sys.executable, '-c', double_fork], start_new_session=True)",
    "a double fork without its environment": "subprocess.run([sys.executable, '-c', double_fork_bare])",
    "a daemon that starts others": (
        "subprocess.Popen([sys.executable, '-c', 'import os, subprocess, time; os.setsid(); "
        'subprocess.Popen(["sleep", "600"], env={}, start_new_session=True); time.sleep(600)\'], env={})'
    ),
}


def start(cluster: Cluster, name: str, how: str) -> set[int]:
    """Start a program on node ``name``; the ids of all processes that came about."""
    before = set(psutil.pids())
    source = f"""
import os, subprocess, sys
double_fork = {DOUBLE.format(file="pid-kept", environment="os.environ")!r}
double_fork_bare = {DOUBLE.format(file="pid-bare", environment="{}")!r}
{HOW[how]}
"""
    run(cluster, source, (name,), replay=False)
    wanted = 2 if "others" in how else 1
    mine = lambda: {pid for pid in set(psutil.pids()) - before if _sleeps(pid)}  # noqa: E731
    wait_until(lambda: len(mine()) >= wanted, what=f"programs started with {how}")
    return mine()


def _sleeps(pid: int) -> bool:
    """Whether it is one that stays; shells and first forks have the words of what they start in their own."""
    try:
        words = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    if words == ["sleep", "600"] or words[-1:] == ["import time; time.sleep(600)"]:
        return True
    return "".join(words[2:3]).startswith("import os, subprocess, time; os.setsid()")


@pytest.fixture
def bystander() -> Iterator[int]:
    """What the user of the machine has started otherwise."""
    with subprocess.Popen(["sleep", "60000"], start_new_session=True) as process:
        yield process.pid
        assert process.poll() is None
        process.kill()


@pytest.fixture
def ended() -> Iterator[set[int]]:
    """Process ids that are killed at the end, for tests that fail."""
    pids: set[int] = set()
    yield pids
    for pid in pids:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", HOW)
def test_the_programs_of_a_node_end_with_its_removal_restart_and_death(
    how: str, work: Path, bystander: int, ended: set[int]
) -> None:
    with running_cluster(local=2) as cluster:
        others = start(cluster, "local", how)
        ended |= others
        removed = start(cluster, "local-2", how)
        ended |= removed
        cluster.remove("local-2")
        if "without its environment" not in how:  # which of both nodes has started it cannot be told
            wait_until(lambda: not any(map(is_running, removed)), what=f"{how}: the end of {removed}")
        assert all(map(is_running, others))
        cluster.restart("local", replay=False)
        wait_until(lambda: not any(map(is_running, others | removed)), what=f"{how}: the end of {others}, {removed}")
        killed = start(cluster, "local", how)
        ended |= killed
        kill(kernel_pid(cluster, "local"))
        wait_until(lambda: not any(map(is_running, killed)), what=f"{how}: the end of {killed}")


def test_the_programs_of_all_nodes_end_with_the_cluster_and_with_sharing(
    work: Path, agents: Agents, bystander: int, ended: set[int]
) -> None:
    agents("mini")
    with running_cluster(local=1) as cluster:
        cluster.add("mini")
        local = {pid for how in HOW for pid in start(cluster, "local", how)}
        shared = {pid for how in HOW for pid in start(cluster, "mini", how)}
        ended |= local | shared
        agents.end("mini")
        assert not any(map(is_running, shared))
        assert all(map(is_running, local))
        cluster.stop()
        wait_until(lambda: not any(map(is_running, local)), what=f"the end of {local}")


def test_a_killed_agent_takes_along_what_has_kept_its_environment(
    work: Path, agents: Agents, bystander: int, ended: set[int]
) -> None:
    agents("mini")
    with running_cluster(local=0) as cluster:
        cluster.add("mini")
        started = start(cluster, "mini", "a double fork") | start(cluster, "mini", "setsid and nohup")
        ended |= started
        agents.end("mini", signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, started)), what=f"the end of {started}")


def test_programs_that_have_ended_leave_no_zombies(work: Path) -> None:
    with running_cluster(local=1) as cluster:
        run(cluster, "import subprocess; subprocess.run('for i in 1 2 3; do setsid true & done', shell=True)")
        # The agent looks every few seconds; until then the system keeps them.
        agent = psutil.Process(kernel_pid(cluster, "local")).parent()
        assert agent is not None

        def zombies() -> list[psutil.Process]:
            found = []
            for child in agent.children():
                with suppress(psutil.NoSuchProcess):  # ended since they were listed
                    if child.status() == psutil.STATUS_ZOMBIE:
                        found.append(child)
            return found

        wait_until(lambda: not zombies(), what="the end of all zombies")
