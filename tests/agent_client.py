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

from notebook_cluster.link import Dialer, LinkSettings
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
        self.process.wait(15)
        assert self.process.stdout is not None
        self.process.stdout.close()


class AgentClient:
    """A cluster of one agent. Use as ``async with``; every wait has a deadline and names what it waited for."""

    def __init__(
        self, ready: dict[str, Any], *, cluster: str = "digits", epoch: int = 1, identity: Identity | None = None,
        trusted: bool = True, settings: LinkSettings | None = None,
    ) -> None:  # fmt: skip
        self.identity = identity or new_identity()
        self.messages: list[Message] = []
        self.outputs: list[tuple[str, str, list[dict[str, Any]]]] = []
        self.conditions: list[tuple[str, str]] = []
        self._trusted = trusted
        self._changed = asyncio.Event()
        self._context: zmq.Context[Any] = zmq.Context()
        self.dialer = Dialer(
            self._context,
            f"tcp://127.0.0.1:{ready['port']}",
            ready["public_key"],
            self.identity,
            cluster=cluster,
            epoch=epoch,
            sender="test",
            on_message=self._on_message,
            on_condition=self._on_condition,
            settings=settings,
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

    async def until(self, condition: Callable[[], Value], what: str, timeout: float = 20.0) -> Value:
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
        identity: str = "",
    ) -> str:  # fmt: skip
        """Send any Jupyter message; returns its msg_id."""
        identity = identity or uuid.uuid4().hex
        header = {
            "msg_id": identity, "session": "test", "username": "test", "date": "2026-01-01T00:00:00Z",
            "msg_type": kind, "version": "5.4",
        }  # fmt: skip
        parts = [json.dumps(header).encode(), REQUEST, REQUEST, json.dumps(content).encode()]
        self.send(p.ToKernel(node=node, incarnation=incarnation, channel=channel), parts)
        return identity

    def said(self, identity: str, kind: str) -> list[dict[str, Any]]:
        """Contents of the messages of type ``kind`` that answer request ``identity``, in order."""
        return [
            parts[3]
            for _, _, parts in self.outputs
            if parts[0]["msg_type"] == kind and parts[1].get("msg_id") == identity
        ]

    async def reply(self, identity: str, timeout: float = 20.0) -> dict[str, Any]:
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
        self._changed.set()

    def _on_condition(self, condition: str, reason: str) -> None:
        self.conditions.append((condition, reason))
        self._changed.set()
