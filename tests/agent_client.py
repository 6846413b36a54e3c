"""Plays the coordinator for an agent: dials it with a real link, sends requests, keeps what comes back."""

import asyncio
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import pytest
import zmq

from notebook_cluster.agent import Agent, AgentReady, AgentSettings, SharingEvent
from notebook_cluster.agent.sharing.presence import Battery, Sensors, SleepWatch
from notebook_cluster.link import Dialer, LinkSettings
from notebook_cluster.pairing import Partner, pair
from notebook_cluster.protocol import Message
from notebook_cluster.protocol import peer as p
from notebook_cluster.security import Identity, announce, new_identity, withdraw

Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=Message)
REQUEST = b"{}"


class PrivateAgent:
    """A private agent as a process of its own; ended with the block."""

    def __init__(self, folder: Path, *options: str, name: str = "local") -> None:
        self.folder = folder
        command = [sys.executable, "-m", "notebook_cluster.agent", "--private", "--name", name]
        self.process = subprocess.Popen(
            [*command, "--cluster-dir", str(folder), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"no ready line; log: {self.log()}"
        self.ready: dict[str, Any] = json.loads(line)

    def log(self) -> str:
        path = self.folder / "agent.log"
        return path.read_text() if path.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()


class MadeUpSensors(Sensors):
    """A machine on which nobody works, without a battery, until a test says otherwise."""

    def __init__(self) -> None:
        self.idle = 1e6
        self.power: Battery | None = None

    def idle_seconds(self) -> float:
        return self.idle

    def battery(self) -> Battery | None:
        return self.power

    def busy_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0


class SharedAgent:
    """A shared agent in this process, on loopback; ``events`` is what its person was told. Use as ``async with``."""

    def __init__(
        self, folder: Path, *, name: str = "mini", link: LinkSettings | None = None, sensors: Sensors | None = None,
        sleep: SleepWatch | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.events: list[SharingEvent] = []
        self.agent = Agent(
            AgentSettings(name=name, directory=folder, bind="127.0.0.1", **settings),
            link,
            on_event=self.events.append,
            sensors=sensors or MadeUpSensors(),
            sleep=sleep,
        )

    async def __aenter__(self) -> Self:
        ready: asyncio.Future[AgentReady] = asyncio.get_running_loop().create_future()
        self.running = asyncio.create_task(self.agent.run(ready.set_result))
        await asyncio.wait([self.running, ready], return_when=asyncio.FIRST_COMPLETED)
        if self.running.done():
            self.running.result()
        self.ready = ready.result()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.agent.stop("the test is over")
        await self.running

    @property
    def where(self) -> dict[str, Any]:
        """For :class:`AgentClient`."""
        return {"port": self.ready.port, "public_key": self.ready.public_key}

    async def told(self, kind: str, *words: str, count: int = 1) -> SharingEvent:
        """The ``count``-th event of ``kind`` whose text has all ``words``, as soon as it is there."""
        deadline = time.monotonic() + 40
        while True:
            found = [e for e in self.events if e.kind == kind and all(word in e.text for word in words)]
            if len(found) >= count:
                return found[count - 1]
            if time.monotonic() > deadline:
                pytest.fail(f"waited 40 s for the event {kind} {words}; got {self.events[-8:]}")
            await asyncio.sleep(0.02)

    async def pair(self, identity: Identity, code: str = "", *, port: int = 0, owner: str = "ada@desk") -> Partner:
        """Pair the coordinator ``identity`` with this agent."""
        context: zmq.Context[Any] = zmq.Context()
        try:
            return await pair(
                context, f"127.0.0.1:{port or self.ready.pairing_port}", code or self.ready.code,
                identity_key=identity.public_key, role="cluster", name="digits", owner=owner,
            )  # fmt: skip
        finally:
            context.destroy(linger=0)


class AgentClient:
    """A cluster of one agent. Use as ``async with``; every wait has a deadline and names what it waited for."""

    def __init__(
        self, ready: dict[str, Any], *, cluster: str = "digits", epoch: int = 1, identity: Identity | None = None,
        trusted: bool = True, settings: LinkSettings | None = None, cluster_name: str = "",
        received: int = 0,
    ) -> None:  # fmt: skip
        self.identity = identity or new_identity()
        self.messages: list[Message] = []
        self.outputs: list[tuple[str, str, list[dict[str, Any]]]] = []
        self.conditions: list[tuple[str, str]] = []
        self.buffers: list[bytes] = []
        """Of the last message, not from a kernel, that had some."""
        self._trusted = trusted
        self._changed = asyncio.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self.dialer = Dialer(
            self._context,
            f"tcp://127.0.0.1:{ready['port']}",
            ready["public_key"],
            self.identity,
            cluster=cluster,
            cluster_name=cluster_name,
            epoch=epoch,
            sender="test",
            on_message=self._on_message,
            on_condition=self._on_condition,
            settings=settings,
            received=received,
        )

    async def __aenter__(self) -> Self:
        if self._trusted:
            self._announcement = announce("coordinator", self.identity.public_key, "test")
        self.dialer.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.dialer.close()
        if self._trusted:
            withdraw(self._announcement)
        self._context.destroy(linger=0)

    async def until(self, condition: Callable[[], Value], what: str, timeout: float = 60.0) -> Value:
        """The first true value of ``condition``, looked at after everything that happens."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"waited {timeout:g} s for {what}; got {self.messages[-5:]} {self.outputs[-5:]}")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 0.05)
            except TimeoutError:
                pass
        return value

    async def receive(self, kind: type[Kind], check: Callable[[Kind], bool] = lambda message: True) -> Kind:
        """The first message of ``kind`` that passes ``check``, also one that came before."""

        def found() -> Kind | None:
            return next((m for m in self.messages if isinstance(m, kind) and check(m)), None)

        message = await self.until(found, kind.__name__)
        assert message is not None
        return message

    def send(self, message: Message, buffers: Sequence[bytes] = ()) -> None:
        self.dialer.send(message, buffers)

    def request_node(self, node: str = "desk", incarnation: int = 1, **fields: Any) -> None:
        self.send(p.StartNode(node=node, incarnation=incarnation, **{"device": "cpu"} | fields))

    async def start_node(self, node: str = "desk", incarnation: int = 1, **fields: Any) -> p.NodeStarted:
        self.request_node(node, incarnation, **fields)
        return await self.receive(p.NodeStarted, lambda m: (m.node, m.incarnation) == (node, incarnation))

    def execute(self, code: str, node: str = "desk", incarnation: int = 1, identity: str = "", **fields: Any) -> str:
        """Send an execute_request; returns its msg_id."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
        return self.to_kernel("shell", "execute_request", content | fields, node, incarnation, identity)

    def to_kernel(
        self, channel: p.KernelChannel, kind: str, content: dict[str, Any], node: str = "desk", incarnation: int = 1,
        identity: str = "", *, subshell: bool = False,
    ) -> str:  # fmt: skip
        """Send any Jupyter message; returns its msg_id."""
        identity = identity or uuid.uuid4().hex
        header = {
            "msg_id": identity, "session": "test", "username": "test", "date": "2026-01-01T00:00:00Z",
            "msg_type": kind, "version": "5.4",
        }  # fmt: skip
        parts = [json.dumps(header).encode(), REQUEST, REQUEST, json.dumps(content).encode()]
        self.send(p.ToKernel(node=node, incarnation=incarnation, channel=channel, subshell=subshell), parts)
        return identity

    def said(self, identity: str, kind: str) -> list[dict[str, Any]]:
        """Contents of the messages of type ``kind`` that answer request ``identity``, in order."""
        return [
            parts[3]
            for _, _, parts in self.outputs
            if parts[0]["msg_type"] == kind and parts[1].get("msg_id") == identity
        ]

    async def reply(self, identity: str, timeout: float = 60.0) -> dict[str, Any]:
        """The content of the execute_reply to ``identity``."""
        return (await self.until(lambda: self.said(identity, "execute_reply"), "an execute_reply", timeout))[0]

    async def printed(self, identity: str, text: str) -> None:
        """Wait until the request has printed ``text``."""
        await self.until(lambda: text in self.text(identity), f"the output {text!r}")

    def text(self, identity: str) -> str:
        return "".join(content["text"] for content in self.said(identity, "stream"))

    def _on_message(self, message: Message, buffers: list[bytes]) -> None:
        if isinstance(message, p.FromKernel):
            parts = [msgspec.json.decode(part) for part in buffers[:4]]
            self.outputs.append((message.node, message.channel, parts))
        else:
            self.messages.append(message)
            self.buffers = buffers or self.buffers
        self._changed.set()

    def _on_condition(self, condition: str, reason: str) -> None:
        self.conditions.append((condition, reason))
        self._changed.set()
