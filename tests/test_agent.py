"""The agent as a process, dialled over a real link, with real kernels."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.protocol import decode
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.node import FromNodeBody, NodeHello
from notebook_cluster.security import same_user_keys
from tests.agent_client import AgentClient, PrivateAgent
from tests.cluster import is_running
from tests.in_loop import in_loop

pytestmark = pytest.mark.usefixtures("no_processes_left")


@pytest.fixture
def agent(jupyter_dirs: Path, no_processes_left: str) -> Any:
    with PrivateAgent(jupyter_dirs / "cluster") as running:
        yield running


def test_ready_line_says_how_to_reach_it_and_its_key_is_announced(agent: PrivateAgent) -> None:
    assert agent.ready["pid"] == agent.process.pid
    assert agent.ready["name"] == "local"
    assert same_user_keys("agent")[agent.ready["public_key"]] == "local"


@in_loop
async def test_first_words_are_the_inventory_and_what_this_machine_is(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        info = await client.receive(p.PeerInfo)
        assert client.messages[0] == p.Inventory(nodes=[])
        assert info.name == "local"
        assert [device.kind for device in info.devices][-1] == "cpu"
        assert info.hosts[-1] == "127.0.0.1"
        assert "ipykernel" in info.packages


@in_loop
async def test_code_sent_right_after_start_runs_and_all_its_output_comes_back(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        client.request_node()
        request = client.execute("print('first words')\n1+1")
        assert (await client.reply(request))["status"] == "ok"
        await client.until(lambda: client.said(request, "execute_result"), "the result")
        assert client.said(request, "execute_result")[0]["data"]["text/plain"] == "2"
        assert client.text(request) == "first words\n"


@in_loop
async def test_probes_of_the_agent_itself_are_not_passed_on(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        client.request_node()
        await client.reply(client.execute("1"))
        kinds = {(channel, parts[0]["msg_type"]) for _, channel, parts in client.outputs}
        assert ("control", "kernel_info_reply") not in kinds
        assert ("iopub", "iopub_welcome") not in kinds


@in_loop
async def test_kernel_is_told_who_it_is_and_where_it_works(agent: PrivateAgent, tmp_path: Path) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node(
            incarnation=3, directory=str(tmp_path), environment={"OMP_NUM_THREADS": "1", "RANK": "7"}
        )
        code = (
            "import os\nprint(os.getcwd(), os.environ['RANK'], os.environ['CUDA_VISIBLE_DEVICES'] == '')\n"
            "print(*(os.environ['NOTEBOOK_CLUSTER_' + n] for n in ('NODE', 'INCARNATION', 'DEVICE')))\n"
            "print(oct(os.stat(os.environ['NOTEBOOK_CLUSTER_SOCKETS']).st_mode & 0o777))"
        )
        request = client.execute(code, incarnation=3)
        await client.reply(request)
        await client.printed(request, "0o700")
        assert client.text(request) == f"{tmp_path} 7 True\ndesk 3 cpu\n0o700\n"


@in_loop
async def test_interrupt_ends_a_sleep(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        request = client.execute("import time\nprint('begun')\ntime.sleep(60)")
        await client.printed(request, "begun")
        client.send(p.InterruptNode(node="desk", incarnation=1))
        assert (await client.reply(request))["ename"] == "KeyboardInterrupt"


@in_loop
async def test_interrupt_right_behind_the_request_is_not_lost(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        await client.reply(client.execute("import time"))
        for _ in range(5):
            request = client.execute("time.sleep(60)", stop_on_error=False)
            client.send(p.InterruptNode(node="desk", incarnation=1))
            assert (await client.reply(request))["ename"] == "KeyboardInterrupt"


@in_loop
async def test_interrupt_that_comes_just_before_a_sleep_ends_the_sleep(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        # Blocked on the main thread SIGINT goes to another one: Python knows of it and the sleep goes on, as when it
        # comes between Python's last look at signals and the system call.
        request = client.execute(
            "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]); print('in')\n"
            "time.sleep(600)"
        )
        await client.printed(request, "in")
        client.send(p.InterruptNode(node="desk", incarnation=1))
        assert (await client.reply(request))["ename"] == "KeyboardInterrupt"


@in_loop
async def test_execute_request_with_a_known_id_is_not_run_again(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        first = client.execute("n = globals().get('n', 0) + 1")
        client.execute("n = globals().get('n', 0) + 1", identity=first)
        request = client.execute("print(n)")
        await client.reply(request)
        await client.printed(request, "1")
        assert len(client.said(first, "execute_reply")) == 1


@in_loop
async def test_input_is_answered_over_stdin(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        request = client.execute("print(input('name? '))", allow_stdin=True)
        await client.until(lambda: client.said(request, "input_request"), "an input_request")
        client.to_kernel("stdin", "input_reply", {"value": "Ada"})
        await client.printed(request, "Ada")


@in_loop
async def test_killed_kernel_is_reported_with_the_reason_and_its_last_lines(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        started = await client.start_node()
        request = client.execute("import os\nos.write(2, b'last line\\n')\nprint('written')")
        await client.printed(request, "written")
        os.kill(started.pid, signal.SIGKILL)
        ended = await client.receive(p.NodeEnded)
        assert (ended.node, ended.incarnation, ended.asked) == ("desk", 1, False)
        assert ended.reason == "killed by SIGKILL (out of memory? see dmesg)"
        assert "last line" in ended.log_tail


@in_loop
async def test_kernel_that_exits_is_reported_with_its_code(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        client.execute("import os\nos._exit(3)")
        assert (await client.receive(p.NodeEnded)).reason == "exit code 3"


@in_loop
async def test_next_incarnation_replaces_the_one_that_runs(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        first = await client.start_node()
        second = await client.start_node(incarnation=2)
        assert not is_running(first.pid)
        assert (await client.receive(p.NodeEnded)).incarnation == 1
        request = client.execute("import os; print(os.getpid())", incarnation=2)
        await client.printed(request, str(second.pid))


@in_loop
async def test_stop_node_ends_it_politely_and_says_stopped(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        started = await client.start_node()
        await client.reply(client.execute("import atexit, pathlib; atexit.register(pathlib.Path('bye').touch)"))
        client.send(p.StopNode(node="desk", incarnation=1))
        ended = await client.receive(p.NodeEnded)
        assert (ended.asked, ended.reason) == (True, "stopped")
        assert not is_running(started.pid)
        assert (agent.folder / "agent" / "work" / "digits" / "bye").exists()


@in_loop
async def test_busy_node_is_interrupted_before_it_ends(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        code = "import pathlib, time\nprint('begun')\ntry: time.sleep(60)\nfinally: pathlib.Path('saved').touch()"
        request = client.execute(code)
        await client.printed(request, "begun")
        client.send(p.StopNode(node="desk", incarnation=1))
        assert (await client.receive(p.NodeEnded)).asked
        assert (agent.folder / "agent" / "work" / "digits" / "saved").exists()


@in_loop
async def test_node_that_will_not_end_is_killed(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        started = await client.start_node()
        code = "import time\nprint('begun')\nwhile True:\n try: time.sleep(1)\n except KeyboardInterrupt: pass"
        request = client.execute(code)
        await client.printed(request, "begun")
        client.send(p.StopNode(node="desk", incarnation=1))
        assert (await client.receive(p.NodeEnded)).reason == "stopped"
        assert not is_running(started.pid)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"device": "cuda:99"}, ["cuda:99", "cpu"]),
        ({"directory": "/no/such/folder"}, ["/no/such/folder", "create it"]),
        ({"node": "../up"}, ["../up", "letters"]),
    ],
)
@in_loop
async def test_node_that_cannot_start_is_refused_in_one_line(
    agent: PrivateAgent, fields: Any, words: list[str]
) -> None:
    async with AgentClient(agent.ready) as client:
        client.request_node(**fields)
        reason = (await client.receive(p.NodeRefused)).reason
        assert all(word in reason for word in words)
        assert "\n" not in reason


@in_loop
async def test_samples_come_by_themselves_with_memory_of_each_node(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        sample = await client.receive(p.PeerSample, lambda m: bool(m.nodes))
        assert sample.nodes[0].node == "desk"
        assert 0 < sample.nodes[0].rss <= sample.nodes[0].rss_peak
        assert 0 < sample.ram_used <= sample.ram_total
        assert any(device.id == "cpu" for device in sample.devices)


@in_loop
async def test_log_of_a_node_can_be_read(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        await client.reply(client.execute("import os\nos.write(2, b'one\\ntwo\\nthree\\n')"))
        client.send(p.ReadLog(node="desk", lines=2))
        assert (await client.receive(p.LogLines)).lines == ["two", "three"]


def test_release_ends_the_kernels_then_the_private_agent(agent: PrivateAgent, wait_until: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with AgentClient(agent.ready) as client:
            pids = [(await client.start_node(node)).pid for node in ("mini", "desk")]
            client.send(p.Release())
            await client.receive(p.Released)
            assert not any(is_running(pid) for pid in pids)
            assert agent.process.wait(30) == 0

    in_loop(scenario)()
    assert agent.ready["public_key"] not in same_user_keys("agent")


@in_loop
async def test_two_clusters_with_a_node_of_the_same_name_do_not_meet(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready, cluster="one") as one, AgentClient(agent.ready, cluster="two") as two:
        await one.start_node()
        await two.start_node()
        await one.reply(one.execute("x = 'one'"))
        request = two.execute("print('x' in globals())")
        await two.printed(request, "False")


@in_loop
async def test_restarted_coordinator_hears_first_which_kernels_are_there(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as first:
        started = await first.start_node()
        await first.reply(first.execute("x = 41"))
        received = first.dialer.received
        async with AgentClient(agent.ready, epoch=2, identity=first.identity) as second:
            await second.receive(p.Inventory, lambda m: m.nodes == [started])
            await second.receive(p.PeerInfo)
            request = second.execute("print(x + 1)")
            await second.printed(request, "42")
    assert received > 0


def test_untrusted_coordinator_is_refused_and_named_in_the_log(agent: PrivateAgent) -> None:
    async def scenario() -> None:
        async with AgentClient(agent.ready, trusted=False) as client:
            await client.until(lambda: client.dialer.condition == "refused", "the refusal")
            assert client.messages == []

    in_loop(scenario)()
    assert "refused key" in agent.log()


@in_loop
async def test_runtime_of_a_node_says_hello_through_the_agent(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        started = await client.start_node(incarnation=4)
        message = await client.receive(p.FromNode)
        assert (message.node, message.incarnation) == ("desk", 4)
        hello = decode(message.body, FromNodeBody)
        assert isinstance(hello, NodeHello)
        assert (hello.node, hello.incarnation, hello.pid) == ("desk", 4, started.pid)
