"""The ipc socket to which the runtimes of one cluster's kernels dial: passes their messages on, unread. Over it nodes
that print more than the link takes are told to wait in ``print()``.

Each message is one frame, the encoded struct of :mod:`notebook_cluster.protocol.node`. A runtime's routing id is
``<node>/<incarnation>``; frames with another id are counted and dropped. The socket lies in the agent's 0700 folder,
so only this user's processes reach it.

Nodes wait in ``print()`` only while the coordinator reads. When it is gone nobody may have to wait for it: what is then
printed beyond the outbox is left out, as :mod:`notebook_cluster.link.channel` says.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from notebook_cluster.link import Session
from notebook_cluster.protocol.node import HoldOutput
from notebook_cluster.protocol.wire import MAX_MESSAGE_BYTES, encode
from notebook_cluster.sockets import Pump

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 16 * 1024 * 1024
"""For a runtime that has not dialled yet; a node that never does must not fill the agent's memory."""


def routing_id(node: str, incarnation: int) -> bytes:
    """How a runtime is addressed on the control socket."""
    return f"{node}/{incarnation}".encode()


class ControlSocket:
    """One ROUTER for all nodes of one cluster on this peer.

    Args:
        context: the agent's context for its kernels.
        path: where to bind (an ipc path of at most 100 bytes).
        on_body: called with (node, incarnation, encoded message) on the loop, in order for each node.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, on_body: Callable[[str, int, bytes], None]):
        self.endpoint = f"ipc://{path}"
        self.dropped = 0
        self._path = path
        self._on_body = on_body
        self._expected: dict[bytes, tuple[str, int]] = {}
        self._held: dict[bytes, list[bytes]] = {}
        self._held_bytes: dict[bytes, int] = {}
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.bind(self.endpoint)
        self._pump = Pump(socket, self._receive)

    def expect(self, node: str, incarnation: int) -> None:
        """A kernel starts: accept its runtime, and hold what is sent to it until it dials."""
        identity = routing_id(node, incarnation)
        self._expected[identity] = (node, incarnation)
        self._held[identity] = []
        self._held_bytes[identity] = 0

    def forget(self, node: str, incarnation: int) -> None:
        """The kernel is gone."""
        identity = routing_id(node, incarnation)
        self._expected.pop(identity, None)
        self._held.pop(identity, None)
        self._held_bytes.pop(identity, None)

    def has_dialled(self, node: str, incarnation: int) -> bool:
        """Whether the kernel's runtime is there."""
        identity = routing_id(node, incarnation)
        return identity in self._expected and identity not in self._held

    def send(self, node: str, incarnation: int, body: bytes) -> None:
        """Deliver ``body`` in order, after the runtime has dialled. For a kernel that is gone: dropped and counted."""
        identity = routing_id(node, incarnation)
        if identity not in self._expected:
            self.dropped += 1
            return
        held = self._held.get(identity)
        if held is None:
            self._pump.send([identity, body])
        elif self._held_bytes[identity] + len(body) <= MAX_HELD_BYTES:
            held.append(body)
            self._held_bytes[identity] += len(body)
        else:
            self.dropped += 1
            log.warning(
                "a message for %s/%d was dropped: it has not dialled and %d MB wait",
                node,
                incarnation,
                MAX_HELD_BYTES >> 20,
            )

    def close(self) -> None:
        """Unbind and remove the socket's file."""
        self._pump.close()
        self._path.unlink(missing_ok=True)

    def _receive(self, frames: list[bytes]) -> None:
        expected = self._expected.get(frames[0]) if len(frames) == 2 else None
        if expected is None:
            self.dropped += 1
            return
        held = self._held.pop(frames[0], None)
        if held is not None:
            # Its first frame proves that the runtime is there and reads.
            for body in held:
                self._pump.send([frames[0], body])
        self._on_body(*expected, frames[1])


HOLD_BYTES = 16 << 20
"""Unacknowledged; a quarter of what the outbox takes. A held node prints for another moment."""
GO_ON_BYTES = 4 << 20
POLL_S = 0.05
RENEW_S = 2.0
"""A node believes a hold for 10 s: an agent that stands still must not keep it for ever."""


class OutputHolder:
    """For the nodes of one cluster."""

    def __init__(self, session: Session, control: ControlSocket) -> None:
        self._session = session
        self._control = control
        self._held: set[tuple[str, int]] = set()
        self._polls = 0

    def printed(self, node: str, incarnation: int) -> None:
        """A node's text was given to the link."""
        if (node, incarnation) not in self._held and self._session.waiting_bytes > HOLD_BYTES and self._is_read():
            if not self._held:
                self._polls = 0
                asyncio.get_running_loop().call_later(POLL_S, self._poll)
            self._held.add((node, incarnation))
            self._tell(node, incarnation, hold=True)

    def _is_read(self) -> bool:
        return self._session.condition in ("connected", "suspect")

    def _poll(self) -> None:
        self._polls += 1
        over = self._session.waiting_bytes < GO_ON_BYTES or not self._is_read()
        if over or self._polls % round(RENEW_S / POLL_S) == 0:
            for node, incarnation in self._held:
                self._tell(node, incarnation, hold=not over)
        if over:
            self._held.clear()
        else:
            asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _tell(self, node: str, incarnation: int, *, hold: bool) -> None:
        self._control.send(node, incarnation, encode(HoldOutput(hold=hold)))
