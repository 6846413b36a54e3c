"""The agent of the owner's own machine where a cluster is led from a peer."""

import asyncio
import json
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq.asyncio

from notebook_cluster.client import ClusterError
from notebook_cluster.protocol.heads import HeadState
from notebook_cluster.security import data_directory, load_identity, new_identity, runtime_directory
from notebook_cluster.window.local_agent import LocalAgent
from tests.cluster import is_running, kernel_pid, kill, run, running_cluster
from tests.conftest import wait_until
from tests.strangers import Strangers
from tests.test_head import attached, command, head_of, kill_window

pytestmark = pytest.mark.usefixtures("work")


def agent_pid() -> int:
    return int(json.loads((runtime_directory() / "clusters" / "lesson" / "agent.json").read_bytes())["pid"])


def test_a_key_that_begins_with_a_minus_sign_is_taken(tmp_path: Path) -> None:
    key = "-" + new_identity().public_key[1:]
    local = LocalAgent(tmp_path, 60.0)

    async def play() -> None:
        await local.start("127.0.0.1:9", key)
        assert local.find(key) is not None
        local.end(key)
        async with asyncio.timeout(30):
            while local.find(key) is not None:  # noqa: ASYNC110 - a process of its own
                await asyncio.sleep(0.02)

    asyncio.run(play())


def test_trust_that_is_removed_ends_what_the_head_has_on_this_machine(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1, head=mini.name, code=mini.code) as cluster:
        kernel, agent = kernel_pid(cluster, "local"), agent_pid()
        assert command("trust", "remove", mini.name).returncode == 0
        wait_until(lambda: cluster.connection.closed, what="the view to hear of it")
        wait_until(lambda: not is_running(kernel) and not is_running(agent), what="the kernel here to end")


@pytest.mark.proof
def test_a_new_run_does_not_wait_for_the_agent_of_the_one_before(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1, head=mini.name, code=mini.code):
        asleep = psutil.Process(agent_pid())
        asleep.suspend()
        try:
            kill_window()
            log = head_of(mini) / "coordinator.log"
            wait_until(lambda: "peer local is lost" in log.read_text(), what="the head to give it up")
            mini.end()
            mini.again()
        finally:
            asleep.resume()
    mini.said("shared as .*, port ([0-9]+)")
    with pytest.raises(ClusterError, match=r"ended at .*SIGTERM"):
        wait_until(attached, what="it to be looked for")
    assert is_running(asleep.pid)
    with running_cluster("lesson", local=1, head=mini.name) as again:
        assert run(again, "print(world_size)") == {"local": "1\n"}
        wait_until(lambda: not is_running(asleep.pid), what="the agent of the run before to end")


def test_this_machine_comes_back_with_another_agent(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1, head=mini.name, code=mini.code) as cluster:
        cluster.add(mini.name)
        run(cluster, "kept = 41")
        before = agent_pid()
        kill(before)
        cluster.restart("local")
        assert agent_pid() != before
        assert run(cluster, "print(kept + 1)") == {"local": "42\n", mini.name: "42\n"}


def test_an_agent_here_that_dials_where_the_head_is_no_more_is_told_where_it_is(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1, head=mini.name, code=mini.code) as cluster:
        run(cluster, "kept = 41")
        kill_window()
        local = LocalAgent(runtime_directory() / "clusters" / "lesson", 60.0)
        noted = msgspec.json.decode((runtime_directory() / "clusters" / "lesson" / "agent.json").read_bytes())
        agent = local.known(noted["public_key"])
        assert agent is not None
        reception = int(noted["reception"].rpartition(":")[2])
        assert local.astray(HeadState(ticket=0, key=noted["head_key"], reception=reception)) is None

        async def go_astray() -> None:
            context: zmq.asyncio.Context = zmq.asyncio.Context()
            try:
                identity = load_identity(data_directory())
                await local.follow(context, identity, "lesson", agent, noted["head_key"], "127.0.0.1:9")
            finally:
                context.destroy(linger=0)

        asyncio.run(go_astray())
        wait_until(lambda: "peer local is lost" in (head_of(mini) / "coordinator.log").read_text(), what="the loss")
        with wait_until(attached, what="the window") as again:
            assert run(again, "print(kept + 1)") == {"local": "42\n"}
            again.stop()
