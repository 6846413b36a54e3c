"""The links of a cluster: one for each peer, watched; what arrives is handed on by its type."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from notebook_cluster.coordinator import events as e
from notebook_cluster.coordinator.finding import Finding, address_of, found_view, start_private_agent
from notebook_cluster.coordinator.viewserver import RequestError
from notebook_cluster.discovery import FoundPeer
from notebook_cluster.link import Dialer
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import Identity, same_user_keys

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

log = logging.getLogger(__name__)

LOCAL = "local"
"""Name of the notebook machine's own, private agent."""
CONNECT_TIMEOUT = 15.0


class PeerLink:
    """One peer of this cluster and the link to its agent."""

    def __init__(self, name: str, dialer: Dialer) -> None:
        self.name = name
        self.dialer = dialer
        self.info: p.PeerInfo | None = None
        self.condition = "connecting"
        self.reason = ""
        self.ready = asyncio.Event()
        self.released = asyncio.Event()


class Peers:
    def __init__(self, hub: "Coordinator", identity: Identity) -> None:
        self._hub = hub
        self._identity = identity
        self._context = zmq.Context()
        self.finding = Finding(self._on_found)
        self.links: dict[str, PeerLink] = {}
        self.follow = False
        """Add every trusted peer that is found from now on."""
        self._waiting_logs: dict[str, list[asyncio.Future[list[str]]]] = {}

    # ---- finding

    async def browse(self) -> None:
        trouble = await self.finding.start()
        if trouble is not None:
            self._hub.tell("warning", trouble)

    def _on_found(self, new: list[FoundPeer]) -> None:
        for peer in new:
            self._hub.tell("info", f"found {peer.name} ({peer.device}) over mDNS at {address_of(peer)}")
            self._moved(peer)
            if self.follow and peer.name not in self.links and peer.public_key in same_user_keys("agent"):
                self._hub.spawn(self._add_found(peer.name))
        self._hub.dirty()

    def _moved(self, peer: FoundPeer) -> None:
        """An agent that was restarted listens elsewhere: dial it there."""
        known = self._hub.state.peers.get(peer.name)
        link = self.links.get(peer.name)
        if known is None or link is None or known.key != peer.public_key or known.address == address_of(peer):
            return
        if link.condition != "connected":
            self.connect(peer.name, peer.public_key, address_of(peer), "mdns")

    async def _add_found(self, name: str) -> None:
        try:
            await self._hub.members.add_found(name)
        except RequestError as error:
            self._hub.tell("warning", str(error))

    async def resolve(self, text: str) -> str:
        """The name of the peer of this cluster for a name or HOST:PORT; it is dialled when it is new."""
        if text not in self.links:
            found = await self.finding.resolve(text)
            if found.name not in self.links:
                self.connect(found.name, found.public_key, address_of(found), "mdns")
            return found.name
        return text

    async def start_local(self, directory: Path, lease: float) -> None:
        """Start this machine's own agent and dial it."""
        agent, process = await start_private_agent(LOCAL, directory, lease)
        self._hub.spawn(process.wait())  # reaps it
        self.connect(LOCAL, agent.public_key, f"tcp://127.0.0.1:{agent.port}", "local", pid=agent.pid)

    # ---- links

    def connect(self, name: str, key: str, address: str, found_by: Any, *, pid: int | None = None) -> None:
        """Dial a peer; a link that was there before is replaced."""
        received = self._hub.recovered_sequences.get(key, 0)
        old = self.links.get(name)
        if old is not None:
            received = old.dialer.received
            self._hub.spawn(old.dialer.close(flush=0))
        self._hub.record(e.PeerAdded(name=name, key=key, address=address, found_by=found_by, pid=pid))
        self._dial(name, key, address, received)

    def redial(self) -> None:
        """After a restart of the coordinator: dial all peers that the log names."""
        for peer in self._hub.state.peers.values():
            self._dial(peer.name, peer.key, peer.address, self._hub.recovered_sequences.get(peer.key, 0))

    def _dial(self, name: str, key: str, address: str, received: int) -> None:
        state = self._hub.state
        dialer = Dialer(
            self._context,
            address,
            key,
            self._identity,
            cluster=state.cluster_id,
            cluster_name=state.cluster,
            epoch=state.epoch,
            sender=state.cluster,
            peer=name,
            received=received,
            on_message=lambda message, buffers: self._on_message(name, message, buffers),
            on_condition=lambda condition, reason: self._on_condition(name, condition, reason),
        )
        self.links[name] = PeerLink(name, dialer)
        dialer.start()

    def send(self, name: str, message: Message, buffers: Sequence[bytes] = ()) -> None:
        link = self.links.get(name)
        if link is not None:
            link.dialer.send(message, buffers)

    async def ready(self, name: str) -> PeerLink:
        """The link once its agent has described itself; RequestError that says why not."""
        link = self.links[name]
        try:
            await asyncio.wait_for(link.ready.wait(), CONNECT_TIMEOUT)
        except TimeoutError:
            raise RequestError(f"peer {name!r} cannot be reached: {link.reason or 'it does not answer'}") from None
        return link

    def received(self) -> dict[str, int]:
        """The last message of each peer, by key, whose effect is in the log."""
        return {self._hub.state.peers[name].key: link.dialer.received for name, link in self.links.items()}

    # ---- what arrives

    def _on_condition(self, name: str, condition: str, reason: str) -> None:
        link = self.links.get(name)
        if link is None:
            return
        link.condition, link.reason = condition, reason
        self._hub.dirty()
        if condition == "lost":
            self._hub.members.peer_lost(name, reason or "nothing is heard from it")
        elif condition == "refused":
            self._hub.tell("error", f"{name} refused this cluster: {reason}")
        elif condition == "suspect":
            self._hub.tell("warning", f"{name} is suspect: nothing heard from it for a moment")

    def _on_message(self, name: str, message: Message, buffers: list[bytes]) -> None:
        link = self.links[name]
        members = self._hub.members
        match message:
            case p.FromKernel():
                key = self._hub.state.peers[name].key
                self._hub.cells.runs.on_kernel(key, link.dialer.received, message, buffers)
            case p.FromNode():
                members.on_node(message)
            case p.PeerSample():
                self._hub.measurements.on_sample(message)
            case p.PeerInfo():
                self._described(link, message)
            case p.Inventory():
                members.on_inventory(name, message)
            case p.NodeRefused():
                members.node_down(message.node, message.incarnation, message.reason, [], dead=True)
            case p.NodeEnded():
                members.node_down(message.node, message.incarnation, message.reason, message.log_tail, dead=True)
            case p.LogLines():
                for future in self._waiting_logs.pop(message.node, []):
                    if not future.done():
                        future.set_result(message.lines)
            case p.Released():
                link.released.set()
            case p.Farewell():
                link.reason = message.reason
                link.released.set()  # its kernels have ended: a Stop need not wait for it
                members.peer_ended(name, message.reason)

    def _described(self, link: PeerLink, info: p.PeerInfo) -> None:
        link.info = info
        link.released.clear()
        devices = [(d.id, d.name, d.memory_bytes, d.unified) for d in info.devices]
        self._hub.record(e.PeerDescribed(name=link.name, machine=info.machine, hosts=info.hosts, devices=devices))
        link.ready.set()

    async def read_log(self, peer: str, node: str, lines: int) -> list[str]:
        """The last lines that a node's kernel wrote to its terminal."""
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._waiting_logs.setdefault(node, []).append(future)
        self.send(peer, p.ReadLog(node=node, lines=lines))
        try:
            return await asyncio.wait_for(future, 10)
        except TimeoutError:
            raise RequestError(f"peer {peer!r} did not send the log of {node!r}: is it lost?") from None

    # ---- what views see

    def views(self) -> list[PeerView]:
        rows: list[PeerView] = []
        for peer in self._hub.state.peers.values():
            link = self.links.get(peer.name)
            round_trip = link.dialer.round_trip if link is not None else None
            rows.append(
                PeerView(
                    name=peer.name,
                    key=peer.key,
                    address=peer.address.removeprefix("tcp://"),
                    condition=link.condition if link is not None else "lost",  # type: ignore[arg-type]
                    found_by=peer.found_by,  # type: ignore[arg-type]
                    trusted=True,
                    device=", ".join(sorted({name for _, name, _, _ in peer.devices})),
                    reason=link.reason if link is not None else "",
                    round_trip_ms=None if round_trip is None else round_trip * 1000,
                )
            )
        used = {peer.key for peer in self._hub.state.peers.values()}
        trusted = same_user_keys("agent")
        for found in self.finding.found.values():
            if found.public_key not in used and (found.public_key not in trusted or trusted[found.public_key] != LOCAL):
                rows.append(found_view(found, found.public_key in trusted))
        return rows

    async def close(self) -> None:
        await asyncio.gather(*(link.dialer.close() for link in self.links.values()), return_exceptions=True)
        await self.finding.close()
        self._context.destroy(linger=0)
