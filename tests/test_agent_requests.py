"""What a trusted coordinator may ask an agent for, and what it may not: names, folders, variables, sizes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from notebook_cluster.agent import Limits
from notebook_cluster.agent.kernels.supervisor import checked_environment
from notebook_cluster.agent.sharing.admission import StartRefused
from notebook_cluster.protocol import peer as p
from notebook_cluster.security import new_identity
from tests.agent_client import AgentClient, SharedAgent
from tests.in_loop import in_loop

pytestmark = pytest.mark.usefixtures("no_processes_left")


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[SharedAgent, AgentClient]]:
    async with SharedAgent(folder / "mini", pairing=False) as agent, AgentClient(agent.where) as client:
        yield agent, client


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "", ".", "..", "a\0b", "x" * 64, "<b>", "a b", "-rf", "x" * 1_000_000]
)
@in_loop
async def test_node_name_that_is_no_name_is_refused_in_a_short_line(jupyter_dirs: Path, name: str) -> None:
    async with connected(jupyter_dirs) as (agent, client):
        client.request_node(name)
        reason = (await client.receive(p.NodeRefused)).reason
        assert "is not usable" in reason
        assert len(reason) < 300
        assert "\n" not in reason
        assert not (agent.folder / "logs").exists()


@pytest.mark.parametrize(
    "directory", ["/no/such/folder", "~nobody-at-all/x", "a\0b", "/" + "x" * 5000], ids=lambda name: repr(name)[:12]
)
@in_loop
async def test_folder_that_is_none_is_refused(jupyter_dirs: Path, directory: str) -> None:
    async with connected(jupyter_dirs) as (_, client):
        client.request_node(directory=directory)
        reason = (await client.receive(p.NodeRefused)).reason
        assert "create it there" in reason
        assert len(reason) < 400


@in_loop
async def test_environment_does_not_override_what_the_agent_sets(jupyter_dirs: Path) -> None:
    taken = {
        "NOTEBOOK_CLUSTER_CONTROL": "tcp://192.0.2.1:1",
        "NOTEBOOK_CLUSTER_NODE": "somebody",
        "NOTEBOOK_CLUSTER_SOCKETS": "/",
        "NOTEBOOK_CLUSTER_DEVICE": "cuda:0",
        "NOTEBOOK_CLUSTER_OTHER": "x",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "JPY_PARENT_PID": "1",
        "MINE": "kept",
    }
    async with connected(jupyter_dirs) as (_, client):
        await client.start_node(environment=taken)
        code = (
            "import os\nprint(*(os.environ.get(n, '-') for n in "
            "('NOTEBOOK_CLUSTER_NODE', 'NOTEBOOK_CLUSTER_DEVICE', 'NOTEBOOK_CLUSTER_OTHER', 'MINE')))\n"
            "print(repr(os.environ['CUDA_VISIBLE_DEVICES']), os.environ['NOTEBOOK_CLUSTER_CONTROL'][:6], "
            "os.environ.get('JPY_PARENT_PID') == '1')\nprint('end')"
        )
        request = client.execute(code)
        await client.printed(request, "end")
        assert client.text(request) == "desk cpu - kept\n'' ipc:// False\nend\n"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"A=B": "x"}, "'A=B' is no environment variable"),
        ({"": "x"}, "is no environment variable"),
        ({"A": "x\0y"}, "'A' is no environment variable"),
        ({"A": "x" * 100_000}, "over 64 KiB"),
        ({f"A{number}": "" for number in range(1001)}, "1001 environment variables"),
    ],
)
def test_environment_that_is_none_is_refused(variables: dict[str, str], words: str) -> None:
    with pytest.raises(StartRefused, match=words):
        checked_environment(variables)


@in_loop
async def test_log_of_an_unknown_node_is_empty_and_a_request_without_bounds_is_bounded(jupyter_dirs: Path) -> None:
    async with connected(jupyter_dirs) as (_, client):
        await client.start_node()
        await client.reply(client.execute("import os\nos.write(2, b'line\\n' * 200_000)"))
        for node, count in (("../../etc/passwd", 10), ("desk", -5), ("desk", 0)):
            client.messages.clear()
            client.send(p.ReadLog(node=node, lines=count))
            assert (await client.receive(p.LogLines)).lines == []
        client.messages.clear()
        client.send(p.ReadLog(node="desk", lines=1 << 62))
        lines = (await client.receive(p.LogLines)).lines
        # Of the last 64 KiB.
        assert 10_000 <= len(lines) <= 14_000


@in_loop
async def test_doctor_gets_its_bytes_back(jupyter_dirs: Path) -> None:
    async with connected(jupyter_dirs) as (_, client):
        client.send(p.Diagnose(ticket=7, only_bytes=True), [b"x" * 1000, b"y"])
        assert (await client.receive(p.Diagnosis)).ticket == 7
        assert client.buffers == [b"x" * 1000, b"y"]


@in_loop
async def test_node_for_which_too_much_waits_is_ended(jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_cluster.agent.kernels.kernel.MAX_EARLY_BYTES", 100_000)
    async with connected(jupyter_dirs) as (_, client):
        client.request_node()
        for _ in range(3):
            client.execute("#" + "x" * 50_000)
        ended = await client.receive(p.NodeEnded)
        assert "were sent to it before it was up" in ended.reason
        # Once it is up, that is no limit any more.
        await client.start_node(incarnation=2)
        await client.reply(client.execute("1", incarnation=2))
        for _ in range(3):
            await client.reply(client.execute("#" + "x" * 50_000, incarnation=2))


@in_loop
async def test_coordinators_with_clusters_of_one_name_work_in_folders_of_their_own(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", code="class-of-2026", limits=Limits(owners=2)) as agent:
        texts = []
        for owner in ("ada@desk", "bob@desk"):
            identity = new_identity()
            await agent.pair(identity, owner=owner)
            async with AgentClient(
                agent.where, identity=identity, trusted=False, cluster=f"id-{owner[:3]}", cluster_name="digits"
            ) as client:
                await client.start_node()
                request = client.execute("import os; print(os.getcwd())")
                await client.printed(request, "mini/work")
                texts.append(client.text(request))
        assert texts[0] != texts[1]
