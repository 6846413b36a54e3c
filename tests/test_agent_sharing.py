"""Who comes to use a shared agent and who does not: codes, pairing, trust and its end."""

from pathlib import Path

import psutil
import pytest

from notebook_cluster.agent import Limits
from notebook_cluster.pairing import PairingError
from notebook_cluster.protocol import peer as p
from notebook_cluster.security import TrustStore, fingerprint, new_identity, trusted_coordinators
from tests.agent_client import AgentClient, SharedAgent
from tests.in_loop import in_loop
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("no_processes_left")


def store(agent: SharedAgent) -> TrustStore:
    return trusted_coordinators(agent.folder)


@in_loop
async def test_ready_says_code_port_and_fingerprint(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini") as agent:
        ready = agent.ready
        assert ready.code.count("-") == 2
        assert ready.pairing_port not in (0, ready.port)
        assert ready.hosts[-1] == "127.0.0.1"
        assert ready.fingerprint == fingerprint(ready.public_key)


@in_loop
async def test_fixed_port_is_followed_by_the_pairing_port(jupyter_dirs: Path) -> None:
    port = free_port(neighbours=1)
    async with SharedAgent(jupyter_dirs / "mini", port=port) as agent:
        assert (agent.ready.port, agent.ready.pairing_port) == (port, port + 1)


@in_loop
async def test_paired_coordinator_runs_code_and_an_unpaired_one_does_not(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini") as agent:
        identity = new_identity()
        async with AgentClient(agent.where, trusted=False) as stranger:
            await stranger.until(lambda: stranger.dialer.condition == "refused", "the refusal")
        partner = await agent.pair(identity)
        assert (partner.name, partner.key, partner.port) == ("mini", agent.ready.public_key, agent.ready.port)
        async with AgentClient(agent.where, identity=identity, trusted=False) as client:
            await client.start_node()
            request = client.execute("import os; print(os.getcwd())")
            await client.printed(request, f"digits-{fingerprint(identity.public_key)}")
        assert (await agent.told("paired")).owner == "ada@desk"
        assert (await agent.told("cluster-started")).owner == "ada@desk"
        started = await agent.told("node-started", "ada@desk", "desk", "cpu")
        assert (started.cluster, started.node) == ("digits", "desk")


@in_loop
async def test_made_up_code_is_good_once_and_followed_by_another(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini") as agent:
        await agent.pair(new_identity())
        fresh = await agent.told("code-opened", count=2)
        assert fresh.code != agent.ready.code
        assert fresh.port == agent.ready.pairing_port
        with pytest.raises(PairingError, match="wrong"):
            await agent.pair(new_identity(), owner="bob@desk")
        await agent.pair(new_identity(), fresh.code, owner="bob@desk")
        assert {entry.owner for entry in store(agent).entries()} == {"ada@desk", "bob@desk"}


@in_loop
async def test_given_code_is_for_a_whole_class(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", code="Class of 2026") as agent:
        assert agent.ready.code == "class-of-2026"
        for owner in ("ada@desk", "bob@desk"):
            await agent.pair(new_identity(), "class of 2026", owner=owner)
        assert len(store(agent).entries()) == 2


@in_loop
async def test_given_code_ends_with_its_time(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", code="class-of-2026", code_minutes=0.02) as agent:
        await agent.told("code-closed", "its time is over")
        with pytest.raises(PairingError):
            await agent.pair(new_identity())
        # The person may ask for another one.
        code = agent.agent.new_code()
        await agent.pair(new_identity(), code)


@in_loop
async def test_code_is_dead_after_wrong_tries_until_another_is_asked_for(
    jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notebook_cluster.security.codes.MAX_WRONG", 3)
    async with SharedAgent(jupyter_dirs / "mini") as agent:
        for left in (2, 1, 0):
            with pytest.raises(PairingError) as refused:
                await agent.pair(new_identity(), "wrong-code-99")
            assert refused.value.tries_left == left
        await agent.told("attempt", "wrong code", count=3)
        await agent.told("code-dead", "3 wrong codes")
        with pytest.raises(PairingError):
            await agent.pair(new_identity())
        assert store(agent).entries() == []
        await agent.pair(new_identity(), agent.agent.new_code())


@in_loop
async def test_agent_without_pairing_opens_no_code(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", pairing=False) as agent:
        assert (agent.ready.code, agent.ready.pairing_port) == ("", 0)
        assert not [event for event in agent.events if event.kind == "code-opened"]


@in_loop
async def test_known_owner_with_another_key_is_refused_loudly(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", code="class-of-2026") as agent:
        first, second = new_identity(), new_identity()
        await agent.pair(first)
        with pytest.raises(PairingError, match="trust remove") as refused:
            await agent.pair(second)
        for key in (first, second):
            assert fingerprint(key.public_key) in str(refused.value)
        await agent.told("warning", "ada@desk", "trust remove")
        assert [entry.key for entry in store(agent).entries()] == [first.public_key]


@in_loop
async def test_removed_trust_ends_kernels_and_connection_at_once(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", code="class-of-2026", limits=Limits(owners=2)) as agent:
        ada, bob = new_identity(), new_identity()
        await agent.pair(ada)
        await agent.pair(bob, owner="bob@desk")
        async with (
            AgentClient(agent.where, identity=ada, trusted=False) as removed,
            AgentClient(agent.where, identity=bob, trusted=False, cluster="text") as other,
        ):
            pid = (await removed.start_node()).pid
            staying = (await other.start_node()).pid
            removed.execute("import time; time.sleep(100)")
            assert len(store(agent).remove("ada@desk")) == 1
            assert (await agent.told("trust-removed", "trust in ada@desk was removed")).owner == "ada@desk"
            await agent.told("node-ended", "trust in ada@desk was removed")
            assert not psutil.pid_exists(pid)
            await removed.until(lambda: removed.dialer.condition == "refused", "the refusal")
            assert psutil.pid_exists(staying)
            assert other.dialer.condition == "connected"
            request = other.execute("print('here')")
            await other.printed(request, "here")


@in_loop
async def test_removed_coordinator_comes_back_with_a_code_only(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", code="class-of-2026") as agent:
        identity = new_identity()
        await agent.pair(identity)
        async with AgentClient(agent.where, identity=identity, trusted=False) as client:
            await client.receive(p.PeerInfo)
            store(agent).remove(fingerprint(identity.public_key))
            await agent.told("cluster-ended", "trust in ada@desk")
        async with AgentClient(agent.where, identity=identity, trusted=False) as client:
            await client.until(lambda: client.dialer.condition == "refused", "the refusal")
            assert client.messages == []
        await agent.pair(identity)
        async with AgentClient(agent.where, identity=identity, trusted=False, epoch=2) as client:
            await client.start_node()


@in_loop
async def test_trust_outlives_the_agent(jupyter_dirs: Path) -> None:
    identity = new_identity()
    async with SharedAgent(jupyter_dirs / "mini") as agent:
        await agent.pair(identity)
        key = agent.ready.public_key
    async with SharedAgent(jupyter_dirs / "mini", pairing=False) as agent:
        assert agent.ready.public_key == key
        async with AgentClient(agent.where, identity=identity, trusted=False) as client:
            await client.receive(p.PeerInfo)


@in_loop
async def test_store_that_others_can_write_trusts_nobody(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini") as agent:
        identity = new_identity()
        await agent.pair(identity)
        async with AgentClient(agent.where, identity=identity, trusted=False) as client:
            await client.receive(p.PeerInfo)
            store(agent).path.chmod(0o666)
            await agent.told("trust-removed", "ada@desk")
            await client.until(lambda: client.dialer.condition == "refused", "the refusal")


@in_loop
async def test_unusable_code_is_named(jupyter_dirs: Path) -> None:
    with pytest.raises(ValueError, match="'1234'"):
        async with SharedAgent(jupyter_dirs / "mini", code="1234"):
            pass
