"""An agent whose link is full, or breaks and comes back, and one with made-up accelerators. Agent and client share one
loop here, so that limits and times can be small."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from notebook_cluster.agent import Agent, AgentReady, AgentSettings
from notebook_cluster.agent.devices import CpuProbe, Devices, RocmProbe
from notebook_cluster.link import LinkSettings
from notebook_cluster.protocol import peer as p
from tests.agent_client import AgentClient
from tests.in_loop import in_loop
from tests.relay import Relay
from tests.test_devices import make_card

pytestmark = pytest.mark.usefixtures("no_processes_left")

# Wide enough apart that a busy machine makes no silence of its own.
SETTINGS = LinkSettings(heartbeat=0.25, suspect=1.5, lost=3.0, outbox_bytes=50_000)


@contextlib.asynccontextmanager
async def serving(folder: Path, devices: Devices | None = None) -> AsyncIterator[AgentReady]:
    """An agent in this process."""
    agent = Agent(AgentSettings(name="mini", directory=folder, private=True, bind="127.0.0.1"), SETTINGS, devices)
    ready: asyncio.Future[AgentReady] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(agent.run(ready.set_result))
    try:
        yield await ready
    finally:
        agent.stop("the test is over")
        await task


@contextlib.asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[tuple[AgentClient, Relay]]:
    """A client of an agent, with a relay between them."""
    async with serving(folder) as ready, Relay(ready.port) as relay:
        found = {"port": relay.port, "public_key": ready.public_key}
        async with AgentClient(found, settings=SETTINGS) as client:
            yield client, relay


@in_loop
async def test_full_link_shortens_prints_visibly_and_keeps_replies(jupyter_dirs: Path) -> None:
    done = jupyter_dirs / "done"
    code = (
        "import pathlib, sys, time\nprint('begun', flush=True)\ntime.sleep(1)\n"
        "for i in range(200): print(i, 'x' * 2000, flush=True)\n"
        f"pathlib.Path({str(done)!r}).touch()"
    )
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


@in_loop
async def test_after_a_silence_the_agent_says_which_kernels_it_still_has(jupyter_dirs: Path) -> None:
    async with connected(jupyter_dirs / "agent") as (client, relay):
        started = await client.start_node()
        relay.hold()
        await client.until(lambda: client.dialer.condition == "lost", "the loss")
        relay.resume()
        await client.until(lambda: client.dialer.condition == "connected", "the return")
        await client.receive(p.Inventory, lambda message: message.nodes == [started])
        request = client.execute("print('still here')")
        await client.printed(request, "still here")


@in_loop
async def test_accelerator_serves_one_cluster_at_a_time(jupyter_dirs: Path) -> None:
    make_card(jupyter_dirs / "drm", 0)
    devices = Devices([RocmProbe(jupyter_dirs / "drm", jupyter_dirs), CpuProbe()])
    async with serving(jupyter_dirs / "agent", devices) as ready:
        found = {"port": ready.port, "public_key": ready.public_key}
        async with AgentClient(found, cluster="digits") as digits, AgentClient(found, cluster="text") as text:
            assert (await digits.start_node(device="")).device == "rocm:0"
            await text.receive(p.PeerInfo, lambda info: info.leased == {"rocm:0": "digits"})
            text.request_node(device="rocm:0")
            refused = await text.receive(p.NodeRefused)
            assert "rocm:0 of mini is used by digits" in refused.reason
            assert (await text.start_node(incarnation=2, device="")).device == "cpu"

            request = digits.execute("import os; print(os.environ['HIP_VISIBLE_DEVICES'])")
            await digits.printed(request, "0")
            digits.send(p.StopNode(node="desk", incarnation=1))
            await text.receive(p.PeerInfo, lambda info: info.leased == {} and bool(info.devices))
            await digits.receive(p.NodeEnded)
            assert (await text.start_node("second", device="rocm:0")).device == "rocm:0"
