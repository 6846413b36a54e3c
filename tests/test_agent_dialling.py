"""An agent that nobody can connect to goes to the cluster itself."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq

from notebook_cluster.link import Dialer, InboundListener, LinkSettings
from notebook_cluster.pairing import PairingError, PairingHost, Partner
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.security import Gate, Identity, OpenCode, new_identity, trusted_coordinators
from tests.agent_client import AgentClient, SharedAgent
from tests.in_loop import in_loop

pytestmark = pytest.mark.usefixtures("no_processes_left")

CODE = "class-of-2026"
LINK = LinkSettings(retry=0.2)


@dataclass
class Inviting:
    """The network's side of a coordinator that invites peers."""

    context: zmq.Context[Any]
    identity: Identity
    gate: Gate
    trusted: dict[str, Partner]
    reception: InboundListener
    port: int
    pairing: PairingHost
    pairing_port: int
    arrived: list[str]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.pairing_port}"


@contextlib.asynccontextmanager
async def inviting(identity: Identity | None = None, port: int = 0, owner: str = "ada@desk") -> AsyncIterator[Inviting]:
    identity = identity or new_identity()
    context: zmq.Context[Any] = zmq.Context()
    gate = Gate(context)
    trusted: dict[str, Partner] = {}
    arrived: list[str] = []
    reception = InboundListener(
        context,
        f"tcp://127.0.0.1:{port}",
        identity,
        authorise=lambda key: trusted[key].name if key in trusted else None,
        on_arrival=lambda key, place: arrived.append(key),
        gate=gate,
    )
    bound = reception.start()

    def paired(partner: Partner) -> None:
        trusted[partner.key] = partner

    pairing = PairingHost(
        context,
        "tcp://127.0.0.1:0",
        gate=gate,
        here=lambda: Here(
            protocol=PROTOCOL_VERSION, role="cluster", name="digits", owner=owner, key=identity.public_key, port=bound
        ),
        on_paired=paired,
        on_attempt=lambda line: None,
    )
    pairing_port = pairing.open(OpenCode(CODE, single_use=False))
    try:
        yield Inviting(context, identity, gate, trusted, reception, bound, pairing, pairing_port, arrived)
    finally:
        pairing.close()
        reception.close()
        gate.close()
        context.destroy(linger=0)


class DialledClient(AgentClient):
    """A cluster whose frames go over the connection that the agent made."""

    def __init__(self, host: Inviting, agent: SharedAgent) -> None:
        super().__init__(agent.where, identity=host.identity, trusted=False)
        self.dialer = Dialer(
            host.context,
            "tcp://unused:1",
            agent.ready.public_key,
            host.identity,
            cluster="digits",
            epoch=1,
            sender="test",
            on_message=self._on_message,
            on_condition=self._on_condition,
            reception=host.reception,
        )


@in_loop
async def test_agent_pairs_dials_and_serves(jupyter_dirs: Path) -> None:
    async with (
        inviting() as host,
        SharedAgent(jupyter_dirs / "mini", dial=host.address, code=CODE, link=LINK) as agent,
    ):
        # Its own door stays closed: nobody could come through it.
        assert (agent.ready.code, agent.ready.pairing_port) == ("", 0)
        assert host.trusted[agent.ready.public_key].name == "mini"
        assert (await agent.told("paired", "digits", "ada@desk")).cluster == "digits"
        await agent.told("dial", "connected")
        async with DialledClient(host, agent) as client:
            await client.start_node()
            request = client.execute("print('over there')")
            await client.printed(request, "over there")


@in_loop
async def test_running_agent_joins_a_cluster(jupyter_dirs: Path) -> None:
    async with inviting() as host, SharedAgent(jupyter_dirs / "mini", link=LINK) as agent:
        trusted = await agent.agent.join(host.address, CODE)
        assert (trusted.owner, trusted.address) == ("ada@desk", f"127.0.0.1:{host.port}")
        async with DialledClient(host, agent) as client:
            assert (await client.receive(p.PeerInfo)).name == "mini"
        # A second time is no second connection.
        await agent.agent.join(host.address)
        assert len(host.arrived) == 1


@pytest.mark.parametrize("place", ["pairing", "reception", "closed pairing"])
@in_loop
async def test_paired_agent_needs_no_code_the_next_time(jupyter_dirs: Path, place: str) -> None:
    async with inviting() as host:
        async with SharedAgent(jupyter_dirs / "mini", dial=host.address, code=CODE, link=LINK) as agent:
            await agent.told("dial", "connected")
        address = f"127.0.0.1:{host.port}" if place == "reception" else host.address
        if place == "closed pairing":
            host.pairing.close()
        async with SharedAgent(jupyter_dirs / "mini", dial=address, link=LINK) as agent:
            await agent.told("dial", "connected")
            async with DialledClient(host, agent) as client:
                await client.receive(p.PeerInfo)


@in_loop
async def test_connection_comes_back_with_the_coordinator(jupyter_dirs: Path) -> None:
    identity = new_identity()
    async with contextlib.AsyncExitStack() as stack:
        async with inviting(identity) as host:
            agent = await stack.enter_async_context(
                SharedAgent(jupyter_dirs / "mini", dial=host.address, code=CODE, link=LINK)
            )
            await agent.told("dial", "connected")
            port, trusted = host.port, host.trusted
        await agent.told("dial", "lost")
        async with inviting(identity, port) as host:
            host.trusted.update(trusted)
            await agent.told("dial", "connected", count=2)
            async with DialledClient(host, agent) as client:
                await client.receive(p.PeerInfo)


@in_loop
async def test_wrong_code_says_how_many_tries_are_left(jupyter_dirs: Path) -> None:
    async with inviting() as host:
        with pytest.raises(OSError, match="19 tries left"):
            async with SharedAgent(jupyter_dirs / "mini", dial=host.address, code="class-of-2025"):
                pass
        async with SharedAgent(jupyter_dirs / "mini") as agent:
            with pytest.raises(PairingError, match="18 tries left"):
                await agent.agent.join(host.address, "class-of-2024")


@in_loop
async def test_unknown_cluster_needs_a_code(jupyter_dirs: Path) -> None:
    async with inviting() as host:
        with pytest.raises(OSError, match=r"ada@desk.*--code"):
            async with SharedAgent(jupyter_dirs / "mini", dial=host.address):
                pass
        host.pairing.close()
        with pytest.raises(OSError, match=r"is known here.*--code"):
            async with SharedAgent(jupyter_dirs / "mini", dial=host.address):
                pass


@in_loop
async def test_known_owner_with_another_key_is_not_joined(jupyter_dirs: Path) -> None:
    async with inviting() as first, inviting() as second, SharedAgent(jupyter_dirs / "mini") as agent:
        await agent.agent.join(first.address, CODE)
        with pytest.raises(ValueError, match="trust remove"):
            await agent.agent.join(second.address, CODE)
        assert second.arrived == []


@in_loop
async def test_removed_trust_ends_the_connection_that_the_agent_made(jupyter_dirs: Path) -> None:
    async with inviting() as host, SharedAgent(jupyter_dirs / "mini", link=LINK) as agent:
        await agent.agent.join(host.address, CODE)
        async with DialledClient(host, agent) as client:
            started = await client.start_node()
            trusted_coordinators(agent.folder).remove("ada@desk")
            await agent.told("node-ended", "trust in ada@desk was removed")
            await client.until(lambda: not host.reception.is_here(agent.ready.public_key), "the connection to end")
            assert started.pid
        # With the code again, it is made again.
        await agent.agent.join(host.address, CODE)
        await client.until(lambda: len(host.arrived) == 2, "the second arrival")
