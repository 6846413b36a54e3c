"""Messages to agents, to the runtimes of nodes and to kernels, and the links that carry them."""

import asyncio
import datetime
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from notebook_cluster.coordinator.core import Core
from notebook_cluster.journal.state import Cell
from notebook_cluster.link import Dialer
from notebook_cluster.protocol import encode
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.clock import roughly
from notebook_cluster.protocol.state import PeerCondition
from notebook_cluster.protocol.wire import Message

PAIRED_GRACE = 8.0
"""Seconds after a pairing in which a refusal is not believed: the agent may not have looked at its list yet."""


class PeerLink:
    """It stays when the agent is dialled anew (restarted there, or found elsewhere)."""

    def __init__(self, name: str, dialer: Dialer) -> None:
        self.name = name
        self.dialer = dialer
        self.info: p.PeerInfo | None = None
        self.portable = False
        self.condition: PeerCondition = "connecting"
        self.reason = ""
        self.ended = ""
        """Why its agent has ended, as that said; it may be shared again."""
        self.slept: float | None = None
        """Seconds of its last sleep."""
        self.kept: list[str] = []
        """What it keeps of trainings, a line each, the newest first."""
        self.ready = asyncio.Event()
        """Its agent has described itself."""
        self.refused = asyncio.Event()
        self.released = asyncio.Event()
        self._paired = -math.inf
        self._heard = time.monotonic()

    def paired(self) -> None:
        """It trusts this cluster from now on."""
        self._paired = time.monotonic()
        self.refused.clear()

    def heard(self) -> None:
        """Something came from it."""
        self._heard = time.monotonic()

    def become(self, condition: PeerCondition, reason: str) -> None:
        """What the link's own condition is now."""
        if condition == "connected":
            self.ended = ""
        elif self.ended and condition != "refused":
            condition, reason = "lost", self.ended
        self.condition, self.reason = condition, reason
        if condition == "connected":
            self.refused.clear()
            self.heard()
        elif condition == "refused":
            # Its agent has ended what this cluster had there, and describes itself anew when it lets us in again.
            self.ready.clear()
            if time.monotonic() - self._paired > PAIRED_GRACE:
                self.refused.set()

    @property
    def is_open(self) -> bool:
        """Messages go to and fro, or did a moment ago."""
        return self.condition in ("connected", "suspect")

    @property
    def asleep(self) -> bool:
        """A portable machine of which nothing is heard, without its having closed the connection."""
        return self.condition == "lost" and self.portable and self.dialer.silent and not self.ended

    @property
    def shown(self) -> PeerCondition:
        """The condition for people."""
        return "asleep" if self.asleep else self.condition

    @property
    def why(self) -> str:
        """The reason for people."""
        if not self.asleep:
            return self.reason
        silent = roughly(time.monotonic() - self._heard)
        return f"{self.name} fell silent {silent} ago: asleep or out of Wi-Fi; rounds go on without it"


class Delivery:
    """Sends messages. ``links``: the link of each peer that is used, by name; :mod:`.peers.links` opens them."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.links: dict[str, PeerLink] = {}

    def is_connected(self, peer: str) -> bool:
        """Messages to ``peer`` get there now."""
        link = self.links.get(peer)
        return link is not None and link.condition == "connected"

    def to_agent(self, peer: str, message: Message, buffers: Sequence[bytes] = (), *, decided: bool = True) -> None:
        """To the agent of ``peer``, if it is used. What follows from a decision (``decided``) waits until that is in
        the journal."""
        if decided:
            self._core.journal.when_written(lambda: self.to_agent(peer, message, buffers, decided=False))
            return
        link = self.links.get(peer)
        if link is not None:
            link.dialer.send(message, buffers)

    def to_node(self, name: str, message: Message, *, decided: bool = True) -> None:
        """A control message to a node's runtime; ``decided`` as of :meth:`to_agent`."""
        node = self._core.state.nodes.get(name)
        if node is not None and node.incarnation:
            body = p.ToNode(node=name, incarnation=node.incarnation, body=encode(message))
            self.to_agent(node.peer, body, decided=decided)

    def to_kernel(self, name: str, channel: p.KernelChannel, parts: Sequence[bytes], *, subshell: bool = False) -> None:
        """The parts of a Jupyter message to the kernel of a node of this cluster; ``subshell``: beside a cell that it
        runs."""
        node = self._core.state.nodes[name]
        message = p.ToKernel(node=name, incarnation=node.incarnation, channel=channel, subshell=subshell)
        self.to_agent(node.peer, message, parts)


# ---- Jupyter messages of kernels


class JupyterHeader(msgspec.Struct):
    """The two fields of a Jupyter header (messaging protocol 5.4) that are looked at; the rest is skipped."""

    msg_type: str = ""
    msg_id: str = ""


_header = msgspec.json.Decoder(JupyterHeader)
_json = msgspec.json.Decoder()
_encode = msgspec.json.encode
_EMPTY = b"{}"


def read_headers(buffers: list[bytes]) -> tuple[JupyterHeader, str]:
    """(header, parent's msg_id) of message parts [header, parent_header, metadata, content, ...]."""
    return _header.decode(buffers[0]), _header.decode(buffers[1]).msg_id


def read_content(buffers: list[bytes]) -> dict[str, Any]:
    """The decoded content; bytes that are no UTF-8 (names of files, which kernels pass on as they are) are replaced.
    Raises msgspec.DecodeError."""
    try:
        value = _json.decode(buffers[3])
    except UnicodeDecodeError:
        value = _json.decode(bytes(buffers[3]).decode("utf-8", "replace").encode())
    if not isinstance(value, dict):
        raise msgspec.DecodeError("content is not an object")
    return value


def execute_request(
    message_id: str, session: str, cell: Cell, metadata: dict[str, Any], *, allow_stdin: bool = False
) -> list[bytes]:
    """Parts of an execute_request for ``cell``; ``metadata`` is found by the node under ``notebook_cluster``."""
    body = {
        "code": cell.source,
        "silent": False,
        "store_history": True,
        "user_expressions": cell.user_expressions,
        "allow_stdin": allow_stdin,
        "stop_on_error": True,
    }
    return kernel_message("execute_request", message_id, session, body, {"notebook_cluster": metadata})


def kernel_message(
    kind: str, message_id: str, session: str, body: dict[str, Any], metadata: dict[str, Any] | None = None
) -> list[bytes]:
    """Parts of any message that begins a conversation: header, parent_header, metadata, content."""
    header = {
        "msg_id": message_id,
        "session": session,
        "username": "notebook-cluster",
        "date": datetime.datetime.now(datetime.UTC).isoformat(),
        "msg_type": kind,
        "version": "5.4",
    }
    return [_encode(header), _EMPTY, _encode(metadata or {}), _encode(body)]
