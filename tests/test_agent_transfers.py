"""An agent that is sent files over a link that breaks, within what its owner allows."""

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from notebook_cluster.agent import Agent, AgentReady, AgentSettings, Limits
from notebook_cluster.agent import transfers as agent_transfers
from notebook_cluster.link import LinkSettings
from notebook_cluster.protocol.peer import NodeStarted
from notebook_cluster.protocol.transfers import (
    CHUNK_BYTES,
    EndFiles,
    FileOffer,
    FilesAnswer,
    FilesBody,
    FilesRequest,
    FindFolder,
    OfferFiles,
    WriteFile,
)
from tests.agent_client import AgentClient
from tests.in_loop import in_loop
from tests.relay import Relay

pytestmark = pytest.mark.usefixtures("no_processes_left")

SETTINGS = LinkSettings(heartbeat=0.25, suspect=1.5, lost=3.0)
CONTENT = bytes(range(256)) * 8 * 1024
TICKET = "0123456789abcdef"


@contextlib.asynccontextmanager
async def connected(folder: Path, limits: Limits | None = None) -> AsyncIterator[tuple["Client", Relay, Path]]:
    """A client of an agent in this process with node ``desk``, a relay between them, and the node's working folder."""
    settings = AgentSettings(name="mini", directory=folder, private=True, bind="127.0.0.1", limits=limits or Limits())
    agent = Agent(settings, SETTINGS)
    ready: asyncio.Future[AgentReady] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(agent.run(ready.set_result))
    try:
        here = await ready
        async with contextlib.AsyncExitStack() as stack:
            relay = await stack.enter_async_context(Relay(here.port))
            way = {"port": relay.port, "public_key": here.public_key}
            client = await stack.enter_async_context(AgentClient(way, settings=SETTINGS))
            await client.start_node()
            files = Client(client)
            yield files, relay, Path((await files.ask(FindFolder(node="desk"))).folder)
    finally:
        agent.stop("the test is over")
        await task


class Client:
    """Asks about files."""

    def __init__(self, client: AgentClient) -> None:
        self.client = client
        self._numbers = itertools.count(1)

    def send(self, body: FilesBody, data: bytes | None = None) -> int:
        number = next(self._numbers)
        self.client.send(FilesRequest(request=number, body=body), [] if data is None else [data])
        return number

    async def answer(self, number: int) -> FilesAnswer:
        return await self.client.receive(FilesAnswer, lambda answer: answer.request == number)

    async def ask(self, body: FilesBody, data: bytes | None = None) -> FilesAnswer:
        return await self.answer(self.send(body, data))

    async def offer(self, content: bytes, path: str = "data.bin", ticket: str = TICKET) -> FilesAnswer:
        digest = hashlib.blake2b(content, digest_size=16).digest()
        file = FileOffer(path=path, size=len(content), digest=digest)
        return await self.ask(OfferFiles(node="desk", ticket=ticket, files=[file]))

    def write(self, content: bytes, offset: int, ticket: str = TICKET) -> int:
        body = WriteFile(node="desk", ticket=ticket, number=0, offset=offset)
        return self.send(body, content[offset : offset + CHUNK_BYTES])


@in_loop
async def test_a_file_arrives_over_a_link_that_was_lost_and_cut(jupyter_dirs: Path) -> None:
    async with connected(jupyter_dirs / "agent") as (files, relay, folder):
        assert (await files.offer(CONTENT)).wanted == [0]
        offsets = range(0, len(CONTENT), CHUNK_BYTES)
        first = files.write(CONTENT, 0)
        assert (await files.answer(first)).error == ""
        relay.hold()
        rest = [files.write(CONTENT, offset) for offset in offsets[1:]]
        await files.client.until(lambda: files.client.dialer.condition == "lost", "the loss")
        assert not (folder / "data.bin").exists()
        relay.cut()
        relay.resume()
        assert [(await files.answer(number)).error for number in rest] == [""] * len(rest)
        assert (folder / "data.bin").read_bytes() == CONTENT
        assert (await files.offer(CONTENT, ticket="f" * 16)).wanted == []


@in_loop
async def test_what_is_given_up_or_left_alone_leaves_no_file(
    jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_transfers, "IDLE_SECONDS", 0.4)
    async with connected(jupyter_dirs / "agent") as (files, _, folder):
        await files.offer(CONTENT)
        await files.answer(files.write(CONTENT, 0))
        assert len(list(folder.glob(".nbc-*"))) == 1
        await files.ask(EndFiles(node="desk", ticket=TICKET))
        assert not list(folder.iterdir())
        error = (await files.answer(files.write(CONTENT, CHUNK_BYTES))).error
        assert error == "what was offered is not known any more (the agent was restarted?): send it again"

        await files.offer(CONTENT, ticket="e" * 16)
        await files.answer(files.write(CONTENT, 0, ticket="e" * 16))
        await files.client.until(lambda: not list(folder.iterdir()), "the end of what nobody sends any more")


@in_loop
async def test_an_owner_limits_what_clusters_send_and_disks_what_fits(
    jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(jupyter_dirs / "agent", Limits(files_bytes=3_000_000)) as (files, _, folder):
        await files.offer(CONTENT)
        for number in [files.write(CONTENT, offset) for offset in range(0, len(CONTENT), CHUNK_BYTES)]:
            assert (await files.answer(number)).error == ""
        error = (await files.offer(CONTENT, "second.bin", "b" * 16)).error
        assert "2.1 MB of files are too much: its owner allows 3 MB for each cluster, 2.1 MB of it" in error
        assert "--files" in error
        monkeypatch.setattr(agent_transfers, "free_bytes", lambda folder: 100_000)
        error = (await files.offer(bytes(200_000), "third.bin", "c" * 16)).error
        assert error == "200 kB of files do not fit on the disk: 100 kB are free there"
        assert [path.name for path in folder.iterdir()] == ["data.bin"]


@in_loop
async def test_bad_requests_are_answered_and_the_agent_goes_on(jupyter_dirs: Path) -> None:
    async with connected(jupyter_dirs / "agent") as (files, _, folder):
        assert "no kernel of node 'nobody'" in (await files.ask(FindFolder(node="nobody"))).error
        assert "must be relative" in (await files.offer(CONTENT, "../data.bin")).error
        await files.offer(CONTENT)
        assert "too much is being sent there at once" in (await files.offer(CONTENT)).error
        body = WriteFile(node="desk", ticket=TICKET, number=0, offset=0)
        assert "more was sent at once" in (await files.ask(body, bytes(CHUNK_BYTES + 1))).error
        assert "out of order" in (await files.answer(files.write(CONTENT, CHUNK_BYTES))).error
        assert not list(folder.iterdir())
        assert (await files.offer(b"x", ticket="d" * 16)).wanted == [0]
        assert any(isinstance(message, NodeStarted) for message in files.client.messages)
