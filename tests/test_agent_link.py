"""An agent whose link to the coordinator is full, or breaks and comes back. Agent and client share one loop here, so
that limits and times can be small."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.agent import Agent, AgentSettings, Ready
from notebook_cluster.link import LinkSettings
from notebook_cluster.protocol import peer as p
from tests.agent_client import AgentClient
from tests.relay import Relay

pytestmark = pytest.mark.usefixtures("no_processes_left")

# Wide enough apart that a busy machine makes no silence of its own.
SETTINGS = LinkSettings(heartbeat=0.25, suspect=1.5, lost=3.0, outbox_bytes=50_000)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[AgentClient, Relay]]:
    """A client of a private agent, with a relay between them."""
    agent = Agent(AgentSettings(name="local", directory=folder, private=True, bind="127.0.0.1"), SETTINGS)
    ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(agent.run(ready.set_result))
    try:
        address = await ready
        async with Relay(address.port) as relay:
            found = {"port": relay.port, "public_key": address.public_key}
            async with AgentClient(found, settings=SETTINGS) as client:
                yield client, relay
    finally:
        agent.stop("the test is over")
        await serving


def test_full_link_shortens_prints_visibly_and_keeps_replies(jupyter_dirs: Path) -> None:
    done = jupyter_dirs / "done"
    code = (
        "import pathlib, sys, time\nprint('begun', flush=True)\ntime.sleep(1)\n"
        "for i in range(200): print(i, 'x' * 2000, flush=True)\n"
        f"pathlib.Path({str(done)!r}).touch()"
    )

    async def scenario() -> None:
        async with connected(jupyter_dirs / "agent") as (client, relay):
            await client.start_node()
            request = client.execute(code)
            await client.printed(request, "begun")
            relay.hold()
            await client.until(done.exists, "the cell to print everything")
            relay.resume()
            assert (await client.reply(request))["status"] == "ok"
            await client.printed(request, "messages left out: the link was full]")
            assert len(client.text(request)) < 200 * 2000

    run(scenario())


def test_after_a_silence_the_agent_says_which_kernels_it_still_has(jupyter_dirs: Path) -> None:
    async def scenario() -> None:
        async with connected(jupyter_dirs / "agent") as (client, relay):
            started = await client.start_node()
            relay.hold()
            await client.until(lambda: client.dialer.condition == "lost", "the loss")
            relay.resume()
            await client.until(lambda: client.dialer.condition == "connected", "the return")
            await client.receive(p.Inventory, lambda message: message.nodes == [started])
            request = client.execute("print('still here')")
            await client.printed(request, "still here")

    run(scenario())
