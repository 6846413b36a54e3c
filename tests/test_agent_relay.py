"""The agent as the Jupyter client of a kernel: what does not come from that kernel, or is no message, goes nowhere."""

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from notebook_cluster.agent.kernels.relay import DELIMITER, KernelRelay
from tests.in_loop import in_loop

KEY = b"secret of the kernel"


def signed(text: str, *, key: bytes = KEY, kind: str = "stream", parts: int = 4, **content: str) -> list[bytes]:
    """A message from a kernel: delimiter, signature, parts."""
    header = {"msg_id": "1", "msg_type": kind}
    message = [json.dumps(header).encode(), b"{}", b"{}", json.dumps({"text": text, **content}).encode()][:parts]
    signature = hmac.new(key, b"".join(message), hashlib.sha256).hexdigest().encode()
    return [DELIMITER, signature, *message]


@dataclass
class Kernel:
    """The kernel's side of the four channels."""

    iopub: zmq.asyncio.Socket
    relay: KernelRelay
    heard: list[str] = field(default_factory=list)

    async def say(self, frames: list[bytes]) -> None:
        await self.iopub.send_multipart([b"topic", *frames])

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110 - what is waited for happens in libzmq
            await asyncio.sleep(0.01)


@asynccontextmanager
async def kernel(folder: Path) -> AsyncIterator[Kernel]:
    context = zmq.asyncio.Context()
    plain: zmq.Context[Any] = zmq.Context()
    base = folder / "kernel"
    sockets = [context.socket(kind) for kind in (zmq.ROUTER, zmq.XPUB, zmq.ROUTER, zmq.ROUTER)]
    for number, socket in enumerate(sockets, 1):
        socket.bind(f"ipc://{base}-{number}")
    connection: dict[str, object] = {"transport": "ipc", "ip": str(base), "key": KEY}
    connection |= {"shell_port": 1, "iopub_port": 2, "stdin_port": 3, "control_port": 4}
    heard: list[str] = []
    relay = KernelRelay(
        plain, connection, lambda channel, parts, kind: heard.append(json.loads(parts[3])["text"]), lambda: None
    )
    try:
        # The subscription: from now on nothing is lost.
        assert await sockets[1].recv() == b"\x01"
        yield Kernel(sockets[1], relay, heard)
    finally:
        relay.close()
        plain.destroy(linger=0)
        context.destroy(linger=0)


@in_loop
async def test_signed_message_is_passed_on_without_its_signature(jupyter_dirs: Path) -> None:
    async with kernel(jupyter_dirs) as fake:
        await fake.say(signed("hello"))
        await fake.until(lambda: fake.heard == ["hello"])
        assert fake.relay.dropped == 0


@in_loop
async def test_what_no_coordinator_reads_is_not_passed_on(jupyter_dirs: Path) -> None:
    async with kernel(jupyter_dirs) as fake:
        await fake.say(signed("busy", kind="status", execution_state="busy"))
        await fake.say(signed("source", kind="execute_input", code="print('idle')"))
        await fake.say(signed("x" * 100_000))
        await fake.say(signed("idle", kind="status", execution_state="idle"))
        await fake.until(lambda: "idle" in fake.heard)
        assert fake.heard == ["x" * 100_000, "idle"]
        assert fake.relay.dropped == 0


@pytest.mark.parametrize(
    "frames",
    [
        signed("forged", key=b"a guess"),
        signed("short", parts=3),
        [DELIMITER, b"", b"{}", b"{}", b"{}", b"{}"],
        [DELIMITER, b"\xff" * 64, b"{}", b"{}", b"{}", b"{}"],
        [b"no delimiter"] * 8,
        [DELIMITER],
        [],
        [DELIMITER, hmac.new(KEY, b"not json" * 4, hashlib.sha256).hexdigest().encode(), *[b"not json"] * 4],
    ],
)
@in_loop
async def test_message_with_a_wrong_signature_or_shape_is_dropped_and_counted(
    jupyter_dirs: Path, frames: list[bytes]
) -> None:
    async with kernel(jupyter_dirs) as fake:
        await fake.say(frames)
        await fake.say(signed("after it"))
        await fake.until(lambda: fake.heard)
        assert fake.heard == ["after it"]
        assert fake.relay.dropped == 1


@in_loop
async def test_request_that_is_no_message_does_not_reach_the_kernel(jupyter_dirs: Path) -> None:
    async with kernel(jupyter_dirs) as fake:
        fake.relay.send("shell", [b"{}"])
        fake.relay.send("shell", [b"not json", b"{}", b"{}", b"{}"])
        fake.relay.send("iopub", [b"{}"] * 4)
        assert fake.relay.dropped == 3
