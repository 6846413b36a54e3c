"""The agent is the only Jupyter client of its kernels: it passes raw messages on and reads as little as possible.

Towards the kernel a message is signed with the kernel's key, from the kernel the signature is checked and removed.
Only ``msg_type`` (and ``msg_id`` of requests) is ever decoded; what no coordinator reads is not passed on. Nothing is
delivered to the kernel before its iopub channel is known to be connected: a PUB socket drops what it sends before, so
the first output would be lost. ipykernel 7 says so itself (``iopub_welcome``); for older ones any iopub message is the
proof, provoked with ``kernel_info_request`` on the control channel.
"""

import asyncio
import hmac
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec
import zmq

from notebook_cluster.agent.kernels.subshell import Subshell
from notebook_cluster.protocol.peer import KernelChannel
from notebook_cluster.sockets import Pump

log = logging.getLogger(__name__)

DELIMITER = b"<IDS|MSG>"
PARTS = 4
"""header, parent_header, metadata, content"""

MAX_PART_BYTES = 1 << 30
"""Of one part of a message: a kernel that says more in one go is cut off before the agent has it in memory. What the
link does not take is left out long before that, with a word in the output."""
_COPY_BELOW = 64 * 1024
"""Bytes: signing in one call is three times as fast as in steps."""
_PROBE_INTERVAL_S = 0.02
_MAX_REMEMBERED = 10_000
_EXIT: dict[str, object] = {
    "code": "get_ipython().exit_now = True",
    "silent": True,
    "store_history": False,
    "user_expressions": {},
    "allow_stdin": False,
    "stop_on_error": False,
}
_PORTS: dict[KernelChannel, str] = {
    "shell": "shell_port",
    "iopub": "iopub_port",
    "stdin": "stdin_port",
    "control": "control_port",
}


class _Header(msgspec.Struct):
    msg_type: str
    msg_id: str = ""


_header = msgspec.json.Decoder(_Header)

Deliver = Callable[[KernelChannel, list[bytes], str], None]


class KernelRelay:
    """The four channels of one kernel.

    Args:
        context: the agent's context for its kernels.
        connection: the kernel's connection information (``transport``, ``ip``, ``*_port``, ``key``).
        deliver: called on the loop with (channel, [header, parent_header, metadata, content, *buffers], msg_type).
        interrupt: sends SIGINT to the kernel.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connection: dict[str, object],
        deliver: Deliver,
        interrupt: Callable[[], None],
    ) -> None:
        key = connection["key"]
        assert isinstance(key, bytes)
        self._key = key
        self._deliver = deliver
        self._interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        self._session = uuid.uuid4().hex
        self._own = self._session.encode()
        self.dropped = 0
        """Messages with a wrong signature or shape."""
        self.live = False
        """True once iopub is known to be connected."""
        self._waiting: list[tuple[KernelChannel, Sequence[bytes], bool]] = []
        self._subshell = Subshell(self._own_request, lambda parts: self._sign_and_send("shell", parts))
        self._delivered: dict[str, None] = {}
        self._unfinished: dict[str, bool] = {}
        self._interrupted: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._channels: dict[KernelChannel, Pump] = {
            channel: self._connect(context, connection, channel) for channel in _PORTS
        }
        # ZeroMQ keeps this until the kernel has bound its sockets; each reply without an iopub message sends another.
        self._probe()

    # ---- towards the kernel ------------------------------------------------------------------------------------

    def send(self, channel: KernelChannel, parts: Sequence[bytes], *, subshell: bool = False) -> None:
        """Sign and deliver ``parts`` (header, parent_header, metadata, content, *buffers); held until iopub is live.

        An execute_request that was delivered before is dropped; so is, counted, what is no Jupyter message.
        ``subshell``: a shell message that the kernel shall answer also while a cell runs; see :class:`.Subshell`.
        """
        if len(parts) < PARTS or channel == "iopub":
            self.dropped += 1
            return
        if channel == "shell" and not self._first_delivery(parts[0]):
            return
        if self.live:
            self._pass_on(channel, parts, subshell)
        else:
            self._waiting.append((channel, parts, subshell))

    def _pass_on(self, channel: KernelChannel, parts: Sequence[bytes], subshell: bool) -> None:
        if subshell and channel == "shell":
            self._subshell.send(parts)
        else:
            self._sign_and_send(channel, parts)

    def ask_to_end(self) -> None:
        """Ask the kernel to end by itself, a busy one after its cell is interrupted. Replies are not passed on.

        An idle kernel is told so on its main thread: while it handles a shutdown_request the control thread still
        publishes through an iopub thread that the main thread closes, and every few times ipykernel 7 hangs there.
        """
        if self._unfinished:
            self._interrupt()
            self._own_request("control", "shutdown_request", {"restart": False})
        else:
            self._own_request("shell", "execute_request", _EXIT)

    def interrupted(self) -> None:
        """SIGINT was sent. A cell that was delivered but not taken up gets another once it is: until then the kernel
        ignores SIGINT. See :class:`notebook_cluster.node.runtime.running_cell.CellInterrupts`."""
        self._interrupted = {identity for identity, begun in self._unfinished.items() if not begun}

    def _first_delivery(self, header: bytes) -> bool:
        request = self._read_header(header)
        if request is None:
            return False
        if request.msg_type != "execute_request":
            return True
        if request.msg_id in self._delivered:
            return False
        self._delivered[request.msg_id] = None
        self._unfinished[request.msg_id] = False
        if len(self._delivered) > _MAX_REMEMBERED:
            del self._delivered[next(iter(self._delivered))]
        return True

    def _own_request(self, channel: KernelChannel, kind: str, content: dict[str, object]) -> None:
        header = {
            "msg_id": f"{self._session}-{uuid.uuid4().hex}",
            "session": self._session,
            "username": "notebook-cluster",
            "date": datetime.now(UTC).isoformat(),
            "msg_type": kind,
            "version": "5.4",
        }
        self._sign_and_send(channel, [json.dumps(header).encode(), b"{}", b"{}", json.dumps(content).encode()])

    def _sign_and_send(self, channel: KernelChannel, parts: Sequence[bytes]) -> None:
        self._channels[channel].send([DELIMITER, self._sign(parts), *parts])

    def _sign(self, parts: Sequence[bytes]) -> bytes:
        parts = parts[:PARTS]
        if sum(map(len, parts)) < _COPY_BELOW:
            return hmac.digest(self._key, b"".join(parts), "sha256").hex().encode()
        signature = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            signature.update(part)
        return signature.hexdigest().encode()

    # ---- from the kernel ---------------------------------------------------------------------------------------

    def _receive(self, channel: KernelChannel, frames: list[bytes]) -> None:
        # iopub messages have their topic in front; those of the other channels begin with the delimiter.
        start = next((index for index, frame in enumerate(frames[:4]) if bytes(frame) == DELIMITER), -1)
        parts = frames[start + 2 :]
        if start < 0 or len(parts) < PARTS or not hmac.compare_digest(self._sign(parts), bytes(frames[start + 1])):
            self.dropped += 1
            return
        header = self._read_header(parts[0])
        if header is None:
            return
        if channel == "iopub" and not self.live:
            self._go_live()
        if header.msg_type == "iopub_welcome":
            return
        if self._own in parts[1]:
            self._subshell.on_reply(channel, header.msg_type, bytes(parts[3]))
            if channel == "control" and not self.live:
                self._timer = self._loop.call_later(_PROBE_INTERVAL_S, self._probe)
            return
        if self._unfinished and header.msg_type in ("execute_reply", "execute_input", "status"):
            self._follow(header.msg_type, parts)
        if not _is_for_nobody(header.msg_type, parts):
            self._deliver(channel, parts, header.msg_type)

    def _follow(self, kind: str, parts: list[bytes]) -> None:
        parent = self._read_header(parts[1]) if parts[1] != b"{}" else None
        if parent is None or parent.msg_id not in self._unfinished:
            return
        self._subshell.main_runs()
        if kind == "execute_reply":
            del self._unfinished[parent.msg_id]
            self._interrupted.discard(parent.msg_id)
        elif not self._unfinished[parent.msg_id]:
            self._unfinished[parent.msg_id] = True
            if parent.msg_id in self._interrupted:
                self._interrupted.discard(parent.msg_id)
                self._interrupt()

    def _go_live(self) -> None:
        self.live = True
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, []
        for channel, parts, subshell in waiting:
            self._pass_on(channel, parts, subshell)

    def _probe(self) -> None:
        self._own_request("control", "kernel_info_request", {})

    # ---- sockets -----------------------------------------------------------------------------------------------

    def _connect(
        self, context: zmq.Context[zmq.Socket[bytes]], connection: dict[str, object], channel: KernelChannel
    ) -> Pump:
        socket = context.socket(zmq.SUB if channel == "iopub" else zmq.DEALER)
        socket.linger = 0
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.maxmsgsize = MAX_PART_BYTES
        socket.reconnect_ivl = 20
        socket.reconnect_ivl_max = 200
        if channel == "iopub":
            socket.subscribe(b"")
        else:
            # One identity for all: the kernel sends input_request on stdin to the identity that asked on shell.
            socket.routing_id = self._own
        separator = "-" if connection["transport"] == "ipc" else ":"
        socket.connect(f"{connection['transport']}://{connection['ip']}{separator}{connection[_PORTS[channel]]}")
        return Pump(socket, lambda frames: self._receive(channel, frames))

    def close(self) -> None:
        """Close the sockets; what was not delivered is dropped."""
        if self._timer is not None:
            self._timer.cancel()
        for pump in self._channels.values():
            pump.close()

    def _read_header(self, data: bytes) -> _Header | None:
        try:
            return _header.decode(data)
        except msgspec.DecodeError:
            self.dropped += 1
            return None


def _is_for_nobody(kind: str, parts: list[bytes]) -> bool:
    """Two of the five messages of a short cell: its source, which the coordinator has, and that the kernel is busy."""
    return kind == "execute_input" or (kind == "status" and b'"idle"' not in bytes(parts[3]))
