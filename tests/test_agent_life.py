"""How an agent ends, and that its kernels always end with it."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from notebook_cluster.protocol import peer as p
from notebook_cluster.security import same_user_keys
from tests.agent_client import AgentClient, PrivateAgent
from tests.cluster import is_running
from tests.conftest import Agents
from tests.in_loop import in_loop

pytestmark = pytest.mark.usefixtures("no_processes_left")

WORKER = "import subprocess\nchild = subprocess.Popen(['sleep', '300'])\nprint('child', child.pid, flush=True)"


async def start_with_child(client: AgentClient) -> list[int]:
    """A node that started a process of its own: both process ids."""
    started = await client.start_node()
    request = client.execute(WORKER)
    await client.printed(request, "child")
    return [started.pid, int(client.text(request).split()[1])]


@in_loop
async def test_kernels_and_what_they_started_end_when_the_agent_is_killed(
    jupyter_dirs: Path, wait_until: Callable[..., Any]
) -> None:
    with PrivateAgent(jupyter_dirs / "cluster") as agent:
        async with AgentClient(agent.ready) as client:
            pids = await start_with_child(client)
            request = client.execute("import time\nprint('busy')\ntime.sleep(300)")
            await client.printed(request, "busy")
            agent.process.kill()
            await client.until(lambda: not any(map(is_running, pids)), "the kernel and its child to end")


def test_kernels_say_agent_ended_when_it_is_terminated(jupyter_dirs: Path) -> None:
    async def scenario() -> None:
        with PrivateAgent(jupyter_dirs / "cluster") as agent:
            async with AgentClient(agent.ready) as client:
                pids = await start_with_child(client)
                agent.process.terminate()
                assert "SIGTERM" in (await client.receive(p.Farewell)).reason
                ended = await client.receive(p.NodeEnded)
                assert (ended.asked, ended.reason) == (False, "agent ended")
                await client.until(lambda: agent.process.poll() is not None, "the agent to end")
                assert agent.process.returncode == 0
                assert not any(map(is_running, pids))

    in_loop(scenario)()
    assert same_user_keys("agent") == {}


def test_socket_folder_is_removed_also_after_a_kill(jupyter_dirs: Path, wait_until: Callable[..., Any]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with PrivateAgent(jupyter_dirs / "cluster") as agent:
            shell = psutil.Process(agent.process.pid).children()[0]
            folder = Path(shell.cmdline()[-1])
            assert folder.is_dir()
            agent.process.send_signal(how)
            wait_until(lambda path=folder: not path.exists(), 60, f"{folder} to be removed")


def test_kernels_end_when_the_coordinator_is_silent_for_longer_than_the_lease(
    jupyter_dirs: Path, wait_until: Callable[..., Any]
) -> None:
    with PrivateAgent(jupyter_dirs / "cluster", "--lease", "1") as agent:
        pids: list[int] = []

        async def scenario() -> None:
            async with AgentClient(agent.ready) as client:
                pids.extend(await start_with_child(client))

        in_loop(scenario)()
        wait_until(lambda: not any(map(is_running, pids)), 60, "the kernels to end")
        assert agent.process.wait(30) == 0
        assert "silent" in agent.log() or "no word" in agent.log()


def test_private_agent_without_any_coordinator_ends_after_its_lease(jupyter_dirs: Path) -> None:
    with PrivateAgent(jupyter_dirs / "cluster", "--lease", "1") as agent:
        assert agent.process.wait(20) == 0
        assert "no coordinator came within the lease" in agent.log()


@in_loop
async def test_lease_does_not_run_out_while_the_coordinator_is_there(jupyter_dirs: Path) -> None:
    with PrivateAgent(jupyter_dirs / "cluster", "--lease", "2.2") as agent:
        async with AgentClient(agent.ready) as client:
            await client.start_node()
            # A sample a second: five of them are longer than the lease.
            await client.until(lambda: sum(isinstance(m, p.PeerSample) for m in client.messages) >= 5, "five samples")
            request = client.execute("print('here')")
            await client.printed(request, "here")


@in_loop
async def test_private_agent_keeps_its_log_and_kernel_logs_to_its_user(jupyter_dirs: Path) -> None:
    with PrivateAgent(jupyter_dirs / "cluster") as agent:
        async with AgentClient(agent.ready) as client:
            await client.start_node()
        assert (agent.folder / "agent").stat().st_mode & 0o777 == 0o700
        assert (agent.folder / "agent.log").stat().st_mode & 0o777 == 0o600
        assert (agent.folder / "agent" / "logs" / "digits" / "desk" / "1.log").stat().st_mode & 0o777 == 0o600


def share(name: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["notebook-cluster", "share", "--name", name, "--data-dir", str(folder), *options]
    return subprocess.run(
        [str(Path(sys.executable).with_name(command[0])), *command[1:]],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_taken_port_is_named_with_the_way_out(jupyter_dirs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = share("mini", jupyter_dirs / "mini", "--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert "--port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_second_agent_of_the_same_name_is_refused(agents: Agents, jupyter_dirs: Path) -> None:
    agents("mini")
    again = share("mini", jupyter_dirs / "agents" / "mini")
    other_folder = share("mini", jupyter_dirs / "other")
    for done in (again, other_folder):
        assert done.returncode == 1
        assert "--name" in done.stderr


def test_shared_agent_says_who_may_run_code_and_ends_with_ctrl_c(
    agents: Agents, wait_until: Callable[..., Any]
) -> None:
    agents("mini")
    wait_until(lambda: "Ctrl-C" in agents.output("mini"), what="what sharing means")
    said = agents.output("mini")
    assert "Who may run code here" in said
    assert "Ctrl-C" in said
    assert agents.end("mini", signal.SIGINT) == 0
    assert same_user_keys("agent") == {}


def test_shared_agent_stays_when_a_cluster_is_over(agents: Agents, wait_until: Callable[..., Any]) -> None:
    agents("mini")
    key = next(iter(same_user_keys("agent")))
    said = wait_until(lambda: re.search(r"'mini', port (\d+),", agents.output("mini")), 60, "its port")
    port = int(said[1])

    async def scenario() -> None:
        for cluster in ("one", "two"):
            async with AgentClient({"port": port, "public_key": key}, cluster=cluster) as client:
                started = await client.start_node()
                client.send(p.Release())
                await client.receive(p.Released)
                assert not is_running(started.pid)

    in_loop(scenario)()
    assert agents.processes["mini"].poll() is None
