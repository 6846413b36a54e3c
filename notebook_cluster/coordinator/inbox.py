"""What agents say, handed on by its type. An agent speaks for the nodes that it runs and for no other."""

import asyncio
import ipaddress
import logging
import time
from typing import TYPE_CHECKING

from notebook_cluster.coordinator.peer_link import PeerLink, duration
from notebook_cluster.journal import events as e
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.transfers import FilesAnswer
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import Message

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

log = logging.getLogger(__name__)

MOST_HOSTS = 16
MOST_DEVICES = 64
MOST_KEPT = 16
MOST_KEPT_TOLD = 1000
MOST_FOLDER = 1000
MOST_TIME = 1e11
MOST_TEXT = 200
"""Characters of what an agent says about its machine and devices."""


class AgentInbox:
    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._waiting_logs: dict[str, list[asyncio.Future[list[str]]]] = {}
        self._kept: set[tuple[str, str]] = set()
        """(peer, folder) of kept checkpoints that were told."""

    def handle(self, link: PeerLink, message: Message, buffers: list[bytes]) -> None:
        """Act on one message of the agent at the other end of ``link``."""
        if isinstance(message, p.FromKernel | p.FromNode | p.NodeRefused | p.NodeEnded | p.LogLines):
            node = self._hub.state.nodes.get(message.node)
            if node is not None and node.peer == link.name:
                self._about_node(link, message, buffers)
            elif node is not None:
                log.warning("%s spoke for node %s, which is not there: dropped", link.name, node.name)
            return
        match message:
            case p.PeerSample():
                self._hub.measurements.on_sample(link.name, message)
                self._hub.signs.on_sample(link.name, message)
            case p.PeerInfo():
                self._described(link, message)
            case p.Inventory():
                self._hub.members.on_inventory(link.name, message)
            case p.KeptCheckpoints():
                self._tell_kept(link, message)
            case FilesAnswer():
                self._hub.transfers.on_agent(link.name, message)
            case p.Diagnosis():
                self._hub.examination.on_diagnosis(link.name, message, buffers)
            case p.Slept():
                link.slept = message.seconds
                self._hub.tell("info", f"{link.name} slept for {duration(message.seconds)} and is back")
            case p.Released():
                link.released.set()
            case p.Farewell():
                link.reason = message.reason
                link.released.set()  # its kernels have ended: a Stop need not wait for it
                self._hub.members.peer_gone(link.name, f"agent of {link.name} ended: {message.reason}")

    def _about_node(
        self,
        link: PeerLink,
        message: p.FromKernel | p.FromNode | p.NodeRefused | p.NodeEnded | p.LogLines,
        buffers: list[bytes],
    ) -> None:
        members = self._hub.members
        match message:
            case p.FromKernel():
                members.heard(message.node, message.incarnation)
                key = self._hub.state.peers[link.name].key
                self._hub.cells.runs.on_kernel(key, link.dialer.received, message, buffers)
            case p.FromNode():
                members.on_node(message)
            case p.NodeRefused():
                members.node_down(message.node, message.incarnation, message.reason, [], dead=True)
            case p.NodeEnded():
                members.node_down(
                    message.node, message.incarnation, message.reason, message.log_tail, dead=True,
                    by_itself=message.by_itself,
                )  # fmt: skip
            case p.LogLines():
                for future in self._waiting_logs.pop(message.node, []):
                    if not future.done():
                        future.set_result(message.lines)

    def _tell_kept(self, link: PeerLink, message: p.KeptCheckpoints) -> None:
        """What a peer has kept of trainings, once each time that one is made."""
        for kept in message.checkpoints[:MOST_KEPT]:
            folder = kept.folder[:MOST_FOLDER]
            if (link.name, folder) in self._kept or len(self._kept) >= MOST_KEPT_TOLD or not is_name(kept.name):
                continue
            self._kept.add((link.name, folder))
            known = 0 <= kept.time < MOST_TIME
            when = f", {time.strftime('%-d %b %H:%M', time.localtime(kept.time))}" if known else ""
            self._hub.tell(
                "info",
                f"{link.name} has kept {kept.name!r} of job {kept.job[:MOST_TEXT]!r} (round {kept.round}{when}) in "
                f"{folder}: resume={kept.name!r} goes on from it",
            )

    def _described(self, link: PeerLink, info: p.PeerInfo) -> None:
        link.info = info
        link.portable = info.portable
        link.released.clear()
        devices = [
            (d.id[:MOST_TEXT], d.name[:MOST_TEXT], d.memory_bytes, d.unified) for d in info.devices[:MOST_DEVICES]
        ]
        hosts = [host for host in info.hosts[:MOST_HOSTS] if _is_ipv4(host)]
        self._hub.record(
            e.PeerDescribed(
                name=link.name, machine=info.machine[:MOST_TEXT], hosts=hosts, devices=devices, portable=info.portable
            )
        )
        peer = self._hub.state.peers[link.name]
        if peer.pinned and peer.found_by != "dialled":
            try:
                self._hub.trust.store.set_address(peer.key, peer.address.removeprefix("tcp://"))
            except (ValueError, OSError) as error:
                self._hub.tell("warning", f"the address of {link.name} cannot be remembered: {error}")
        link.ready.set()

    async def read_log(self, peer: str, node: str, lines: int) -> list[str]:
        """The last lines that a node's kernel wrote to its terminal."""
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._waiting_logs.setdefault(node, []).append(future)
        self._hub.peers.send(peer, p.ReadLog(node=node, lines=lines))
        try:
            return await asyncio.wait_for(future, 10)
        except TimeoutError:
            raise RequestError(f"peer {peer!r} did not send the log of {node!r}: is it lost?") from None


def _is_ipv4(text: str) -> bool:
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True
