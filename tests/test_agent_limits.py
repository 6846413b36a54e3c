"""What the owner of a shared machine allows: each limit refuses in one line that names the limit and the way out."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from notebook_cluster.agent import Limits
from notebook_cluster.agent.devices import CpuProbe, Devices, RocmProbe
from notebook_cluster.agent.sharing.presence import Battery
from notebook_cluster.protocol import peer as p
from notebook_cluster.security import Identity, new_identity
from tests.agent_client import AgentClient, MadeUpSensors, SharedAgent
from tests.in_loop import in_loop
from tests.test_devices import make_card

pytestmark = pytest.mark.usefixtures("no_processes_left")

EAGER = "x = bytearray(300_000_000)\nfor i in range(0, len(x), 4096): x[i] = 1\nprint('full')"


async def refusal(client: AgentClient, node: str, incarnation: int = 1, **fields: Any) -> str:
    client.request_node(node, incarnation, **fields)
    reason = (await client.receive(p.NodeRefused, lambda m: (m.node, m.incarnation) == (node, incarnation))).reason
    assert "\n" not in reason
    return reason


@in_loop
async def test_number_of_nodes_counts_all_clusters_together(jupyter_dirs: Path) -> None:
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(max_nodes=1)) as agent,
        AgentClient(agent.where, cluster="digits") as digits,
        AgentClient(agent.where, cluster="text") as text,
    ):
        assert (await digits.receive(p.PeerInfo)).limits == ["at most 1 node"]
        await digits.start_node()
        reason = await refusal(text, "mini")
        assert "mini allows 1 node at a time and has 1 node" in reason
        assert "--max-nodes" in reason
        digits.send(p.StopNode(node="desk", incarnation=1))
        await digits.receive(p.NodeEnded)
        await text.start_node("mini", incarnation=2)


@in_loop
async def test_only_shared_devices_are_shown_and_given(jupyter_dirs: Path) -> None:
    make_card(jupyter_dirs / "drm", 0)
    make_card(jupyter_dirs / "drm", 1)
    agent = SharedAgent(jupyter_dirs / "mini", limits=Limits(devices=("rocm:1",)))
    agent.agent._devices = Devices([RocmProbe(jupyter_dirs / "drm", jupyter_dirs), CpuProbe()])
    async with agent, AgentClient(agent.where) as client:
        assert [device.id for device in (await client.receive(p.PeerInfo)).devices] == ["rocm:1"]
        reason = await refusal(client, "first", device="cpu")
        assert "mini does not share cpu" in reason
        assert "rocm:1" in reason
        assert "has no device 'cuda:7'" in await refusal(client, "second", device="cuda:7")
        assert (await client.start_node("third", device="")).device == "rocm:1"
        reason = await refusal(client, "fourth", device="")
        assert "none of them free" in reason
        assert "--devices" in reason


@in_loop
async def test_memory_of_all_nodes_together_ends_the_largest(jupyter_dirs: Path) -> None:
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(memory_bytes=400_000_000)) as agent,
        AgentClient(agent.where) as client,
    ):
        info = await client.receive(p.PeerInfo)
        assert info.limits == ["400 MB of memory for all nodes together"]
        assert [device.memory_bytes for device in info.devices if device.kind == "cpu"] == [400_000_000]
        small = await client.start_node("small")
        await client.start_node("large")
        client.execute(EAGER, node="large")
        ended = await client.receive(p.NodeEnded)
        assert (ended.node, ended.asked) == ("large", False)
        assert "its owner allows 400 MB" in ended.reason
        assert "used the most" in ended.reason
        assert psutil.pid_exists(small.pid)
        await agent.told("limit", "node large", "400 MB")


@in_loop
async def test_memory_counts_what_a_node_started(jupyter_dirs: Path) -> None:
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(memory_bytes=300_000_000)) as agent,
        AgentClient(agent.where) as client,
    ):
        await client.start_node()
        code = EAGER + "\nimport time; time.sleep(100)"
        client.execute(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])")
        assert "its owner allows 300 MB" in (await client.receive(p.NodeEnded)).reason


@in_loop
async def test_machine_in_use_takes_no_node(jupyter_dirs: Path) -> None:
    sensors = MadeUpSensors()
    sensors.idle = 20
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(idle_only=True), sensors=sensors) as agent,
        AgentClient(agent.where) as client,
    ):
        reason = await refusal(client, "desk")
        assert "somebody did 20 s ago" in reason
        assert "--idle-only" in reason
        sensors.idle = 400
        await client.start_node(incarnation=2)


@in_loop
async def test_owner_who_comes_back_ends_the_nodes_but_not_the_sharing(jupyter_dirs: Path) -> None:
    sensors = MadeUpSensors()
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(idle_only=True), sensors=sensors) as agent,
        AgentClient(agent.where) as client,
    ):
        started = await client.start_node()
        sensors.idle = 1
        ended = await client.receive(p.NodeEnded)
        assert not ended.asked
        assert "shared only while nobody uses it" in ended.reason
        assert not psutil.pid_exists(started.pid)
        sensors.idle = 1000
        await client.start_node(incarnation=2)


@in_loop
async def test_low_battery_takes_no_node_and_ends_those_that_run(jupyter_dirs: Path) -> None:
    sensors = MadeUpSensors()
    sensors.power = Battery(30, plugged=False)
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(on_power=40), sensors=sensors) as agent,
        AgentClient(agent.where) as client,
    ):
        assert (await client.receive(p.PeerInfo)).portable
        reason = await refusal(client, "desk")
        assert "on battery at 30 %, below the 40 %" in reason
        assert "plug it in" in reason
        sensors.power = Battery(30, plugged=True)
        await client.start_node(incarnation=2)
        sensors.power = Battery(39, plugged=False)
        assert "on battery at 39 %" in (await client.receive(p.NodeEnded)).reason
        sensors.power = Battery(41, plugged=False)
        await client.start_node(incarnation=3)


@in_loop
async def test_person_is_asked_before_each_start(jupyter_dirs: Path) -> None:
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(confirm=True)) as agent,
        AgentClient(agent.where) as client,
    ):
        client.request_node("yes")
        question = await agent.told("confirm", "node yes of cluster digits")
        assert agent.agent.answer(question.ticket, True)
        await client.receive(p.NodeStarted)
        client.request_node("no")
        question = await agent.told("confirm", "node no")
        assert agent.agent.answer(question.ticket, False)
        assert "did not allow it" in (await client.receive(p.NodeRefused)).reason
        assert not agent.agent.answer(question.ticket, True)


@in_loop
async def test_question_without_an_answer_is_a_no(jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_cluster.agent.sharing.admission.ANSWER_S", 0.2)
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(confirm=True)) as agent,
        AgentClient(agent.where) as client,
    ):
        assert "nobody at mini answered" in await refusal(client, "desk")
        question = await agent.told("confirm")
        assert (await agent.told("confirm-over")).ticket == question.ticket


@in_loop
async def test_question_ends_when_the_node_is_not_wanted_any_more(jupyter_dirs: Path) -> None:
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(confirm=True, max_nodes=1)) as agent,
        AgentClient(agent.where) as client,
    ):
        client.request_node()
        question = await agent.told("confirm")
        client.send(p.StopNode(node="desk", incarnation=1))
        assert "not wanted any more" in (await client.receive(p.NodeRefused)).reason
        assert (await agent.told("confirm-over")).ticket == question.ticket
        # Its place is free again.
        client.request_node("next")
        agent.agent.answer((await agent.told("confirm", "next")).ticket, True)
        await client.receive(p.NodeStarted)


@in_loop
async def test_sharing_ends_at_its_hour(jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until = time.time() + 3600
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic, strftime=time.strftime, localtime=time.localtime)
    monkeypatch.setattr("notebook_cluster.agent.limits.time", clock)
    async with SharedAgent(jupyter_dirs / "mini", limits=Limits(until=until)) as agent:
        async with AgentClient(agent.where) as client:
            await client.start_node()
            assert not agent.running.done()
            clock.time = lambda: until
            reason = (await client.receive(p.NodeEnded)).reason
            assert reason == f"mini was shared until {time.strftime('%H:%M', time.localtime(until))}"
            assert (await client.receive(p.Farewell)).reason == reason
        assert await agent.running == reason


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_nodes": 0}, "at least 1"),
        ({"memory_bytes": 0}, "above 0"),
        ({"on_power": 101}, "between 0 and 100"),
    ],
)
def test_limit_that_makes_no_sense_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Limits(**fields)


def test_limits_are_said_in_words() -> None:
    limits = Limits(
        max_nodes=2,
        devices=("cuda:0", "cpu"),
        memory_bytes=8_000_000_000,
        idle_only=True,
        on_power=50,
        confirm=True,
        until=time.mktime((2026, 1, 5, 17, 0, 0, 0, 0, -1)),
    )
    assert limits.lines() == [
        "at most 2 nodes",
        "only on cuda:0, cpu",
        "8 GB of memory for all nodes together",
        "only while nobody uses the machine",
        "on battery only above 50 %",
        "its owner is asked before each start",
        "until 17:00",
    ]
    assert Limits().lines() == []


def guest() -> Identity:
    """Somebody with a key of their own, of whom this machine knows nothing yet."""
    return new_identity()


@in_loop
async def test_one_owner_at_a_time_has_nodes_and_the_next_is_told_who(jupyter_dirs: Path) -> None:
    ada, bob = guest(), guest()
    async with SharedAgent(jupyter_dirs / "mini", code="maple-river-7") as agent:
        await agent.pair(ada, owner="ada@desk")
        await agent.pair(bob, owner="bob@tower")
        async with (
            AgentClient(agent.where, cluster="1", cluster_name="digits", identity=ada, trusted=False) as first,
            AgentClient(agent.where, cluster="2", cluster_name="text", identity=ada, trusted=False) as second,
            AgentClient(agent.where, cluster="3", cluster_name="taken", identity=bob, trusted=False) as other,
            AgentClient(agent.where, cluster="4", cluster_name="own") as own,
        ):
            assert (await first.receive(p.PeerInfo)).limits == []
            await first.start_node("a")
            await second.start_node("b")  # the same owner's
            for client in (other, own):
                reason = await refusal(client, "c")
                assert (
                    "mini is used by ada@desk (cluster digits, text) and is shared with one owner at a time" in reason
                )
                assert "--owners 2" in reason
            first.send(p.StopNode(node="a", incarnation=1))
            await first.receive(p.NodeEnded)
            assert "ada@desk (cluster text)" in await refusal(other, "d")
            second.send(p.StopNode(node="b", incarnation=1))
            await second.receive(p.NodeEnded)
            await other.start_node("e")
            assert "bob@tower (cluster taken)" in await refusal(first, "f")


@in_loop
async def test_several_owners_are_let_in_where_that_is_said(jupyter_dirs: Path) -> None:
    ada, bob, eve = guest(), guest(), guest()
    async with SharedAgent(jupyter_dirs / "mini", code="maple-river-7", limits=Limits(owners=2)) as agent:
        for identity, owner in ((ada, "ada@desk"), (bob, "bob@tower"), (eve, "eve@pad")):
            await agent.pair(identity, owner=owner)
        async with (
            AgentClient(agent.where, cluster="1", identity=ada, trusted=False) as first,
            AgentClient(agent.where, cluster="2", identity=bob, trusted=False) as second,
            AgentClient(agent.where, cluster="3", identity=eve, trusted=False) as third,
        ):
            said = "at most 2 owners at a time, who can reach each other's kernels"
            assert (await first.receive(p.PeerInfo)).limits == [said]
            await first.start_node("a")
            await second.start_node("b")
            reason = await refusal(third, "c")
            assert "ada@desk" in reason
            assert "bob@tower" in reason
            assert "shared with 2 owners at a time" in reason
            assert "--owners 3" in reason


@in_loop
async def test_an_owner_who_is_paired_and_of_this_machine_is_one_owner(jupyter_dirs: Path) -> None:
    mine = guest()
    async with SharedAgent(jupyter_dirs / "mini", code="maple-river-7") as agent:
        await agent.pair(mine, owner="me@here")
        async with (
            AgentClient(agent.where, cluster="1", identity=mine) as first,
            AgentClient(agent.where, cluster="2") as second,
        ):
            await first.start_node("a")
            await second.start_node("b")
