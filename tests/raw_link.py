"""The link protocol spoken by hand on a plain zmq socket, for clients that do not keep to the rules.

Blocking; every wait has a deadline. What the server does to a connection is read from the socket's monitor.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from notebook_cluster.link import frames as f
from notebook_cluster.protocol import PROTOCOL_VERSION, Message, ProtocolError, decode, encode
from notebook_cluster.protocol import peer as p
from notebook_cluster.security import Identity, dial

ACCEPTED, REFUSED = "HANDSHAKE_SUCCEEDED", "HANDSHAKE_FAILED_AUTH"
_EVENTS = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.DISCONNECTED
)


class RawClient:
    """A DEALER to ``endpoint``, as ``identity``, that only believes ``server_key``. Close it, or use ``with``."""

    def __init__(self, endpoint: str, server_key: str, identity: Identity, *, routing_id: bytes = b"") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 5000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        if routing_id:
            self.socket.setsockopt(zmq.ROUTING_ID, routing_id)
        dial(self.socket, identity, server_key)
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(endpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self.socket.disable_monitor()
        self.context.destroy(linger=0)

    def event(self, timeout: float = 10.0) -> str:
        """Name of the next thing that happened to the connection; empty when nothing did in time."""
        if not self._monitor.poll(int(timeout * 1000)):
            return ""
        return zmq.Event(recv_monitor_message(self._monitor)["event"]).name or ""

    def send(self, frames: Sequence[bytes]) -> None:
        self.socket.send_multipart(list(frames))

    def receive(self, timeout: float) -> list[bytes] | None:
        """The next message, or None when none came in time."""
        return self.socket.recv_multipart() if self.socket.poll(max(int(timeout * 1000), 0)) else None


class RawLink(RawClient):
    """A coordinator on such a socket: says Hello, numbers what it sends, acknowledges what it was sent."""

    def __init__(
        self, endpoint: str, server_key: str, identity: Identity, *, cluster: str = "attack", epoch: int = 1
    ) -> None:
        super().__init__(endpoint, server_key, identity)
        self.cluster, self.epoch = cluster, epoch
        self.session = time.time_ns() & ((1 << 62) - 1)
        self.sequence = 0
        """Of the last message that was sent."""
        self.received = 0
        """Sequence number of the newest message that came."""

    def hello(self) -> f.Hello:
        """The first message of the next session. Its numbers go on, what was lost is not asked for."""
        self.session += 1
        return f.Hello(
            self.cluster, self.epoch, self.session, PROTOCOL_VERSION, "test", self.cluster, self.received,
            self.received, self.sequence + 1,
        )  # fmt: skip

    def open(self, timeout: float = 10.0) -> f.Welcome | f.SessionRefusal | None:
        """Say Hello and wait for the answer."""
        hello = self.hello()
        self.send([encode(hello)])
        for header, _ in self.incoming(timeout):
            if isinstance(header, f.Welcome | f.SessionRefusal) and header.session == hello.session:
                if isinstance(header, f.Welcome):
                    self.sequence = max(self.sequence, header.received)
                return header
        return None

    def header(self) -> list[bytes]:
        """Of the next numbered message."""
        self.sequence += 1
        return [encode(f.Data(self.cluster, self.epoch, self.session, self.sequence, self.received))]

    def data(self, message: Message, buffers: Sequence[bytes] = ()) -> list[bytes]:
        """``message`` as the next numbered one."""
        return [*self.header(), encode(message), *buffers]

    def incoming(self, timeout: float) -> Iterator[tuple[f.FrameHeader, list[bytes]]]:
        """Headers and what follows them, as they come, for ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while (frames := self.receive(deadline - time.monotonic())) is not None:
            try:
                header: Any = decode(frames[0], f.AnyHeader)
            except ProtocolError:
                continue
            if isinstance(header, f.Data) and header.session == self.session:
                self.received = max(self.received, header.sequence)
            yield header, frames[1:]

    def messages(self, kind: Any, timeout: float) -> Iterator[tuple[Message, list[bytes]]]:
        """Messages of type (or union) ``kind`` and their buffers; others are passed over."""
        for header, frames in self.incoming(timeout):
            if isinstance(header, f.Data) and frames and not header.pieces_left:
                if header.piece:  # small buffers in one frame, or the end of a large message, which is no message
                    ends = list(accumulate(header.sizes))
                    frames = [frames[0][end - size : end] for size, end in zip(header.sizes, ends, strict=True)] or [
                        b""
                    ]
                try:
                    yield decode(frames[0], kind), frames[1:]
                except ProtocolError:
                    continue

    def acknowledge(self) -> None:
        """Tell the server that everything that came so far is processed."""
        for _ in self.incoming(0):
            pass
        self.send([encode(f.Ack(self.cluster, self.epoch, self.session, self.received))])


def execute_parts(code: str) -> list[bytes]:
    """The parts of an execute_request, as they follow ToKernel."""
    header = {
        "msg_id": f"attack-{time.time_ns()}", "session": "test", "username": "test", "date": "2026-01-01T00:00:00Z",
        "msg_type": "execute_request", "version": "5.4",
    }  # fmt: skip
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False, "stop_on_error": True}
    return [json.dumps(part).encode() for part in (header, {}, {}, content)]


def try_to_execute(link: RawLink, code: str, node: str = "intruder") -> str:
    """Everything that a coordinator does to run ``code`` in a kernel of its own on the other side.

    Returns what came of it: ``executed``, or how the attempt was refused.
    """
    event = link.event()
    if event != ACCEPTED:
        return event or "no answer"
    answer = link.open()
    if not isinstance(answer, f.Welcome):
        return f"session refused: {answer.reason}" if isinstance(answer, f.SessionRefusal) else "no session"
    link.send(link.data(p.StartNode(node=node, incarnation=1, device="cpu")))
    for message, _ in link.messages(p.FromAgent, 30.0):
        if isinstance(message, p.NodeRefused):
            return f"node refused: {message.reason}"
        if isinstance(message, p.NodeStarted) and message.node == node:
            break
    else:
        return "no kernel"
    return execute(link, code, node)


def execute(link: RawLink, code: str, node: str = "intruder", timeout: float = 30.0) -> str:
    """Run ``code`` in kernel ``node`` of an open session; ``executed`` when it replied."""
    parts = execute_parts(code)
    wanted = json.loads(parts[0])["msg_id"]
    link.send(link.data(p.ToKernel(node=node, incarnation=1, channel="shell"), parts))
    for message, buffers in link.messages(p.FromAgent, timeout):
        is_reply = isinstance(message, p.FromKernel) and message.channel == "shell" and len(buffers) > 1
        if is_reply and json.loads(buffers[1]).get("msg_id") == wanted:
            return "executed"
    return "no reply"
