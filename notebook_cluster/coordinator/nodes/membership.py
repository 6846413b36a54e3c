"""Membership: which nodes are there, in which incarnation, and who is told."""

import asyncio
from collections.abc import Callable

from notebook_cluster.coordinator.core import Core, Departure, Level, MembershipWatcher
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Node, roster
from notebook_cluster.protocol import peer as p
from notebook_cluster.protocol.node import NodeHello, NodeLost
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import is_key

START_TIMEOUT = 90.0
LOST_TIMEOUT = 10.0
"""Seconds that a node is waited for whose machine was given up; it joins when that is back."""
_LOOK_PERIOD = 1.0
MOST_IPC = 200
"""Characters of an ipc address; those of our nodes have about 50."""
MOST_REASON = 2000
"""Characters of why an agent has ended kernels."""


class Membership:
    """Nodes that come, go and come back: their kernels, their rank and the roster."""

    def __init__(
        self,
        core: Core,
        delivery: Delivery,
        *,
        replaying: Callable[[], list[str]],
        replay_died: Callable[[str], int | None],
    ) -> None:
        """``replaying()``: the nodes that replay earlier cells; ``replay_died(node)``: its process ended by itself, and
        which cell it replayed then."""
        self._core = core
        self._delivery = delivery
        self._replaying = replaying
        self._replay_died = replay_died
        self._watchers: list[MembershipWatcher] = []
        self._ready: dict[str, asyncio.Future[None]] = {}
        self._no_replay: set[str] = set()
        self._broadcast = -1

    def watch(self, watcher: MembershipWatcher) -> None:
        """``watcher`` is told of every change from now on."""
        self._watchers.append(watcher)

    # ---- requests of views

    def order(self, name: str, *, all_cells: bool = False) -> None:
        """Order a new incarnation of the node's kernel; ``all_cells``: it is spared none."""
        incarnation = self._core.state.last_incarnation(name) + 1
        self._core.record(e.NodeStarting(node=name, incarnation=incarnation, all_cells=all_cells))
        self._ready[name] = asyncio.get_running_loop().create_future()
        self._ready[name].add_done_callback(lambda future: future.cancelled() or future.exception())
        self._send_start(self._core.state.nodes[name])

    def _nodes_on(self, peer: str) -> list[Node]:
        return [node for node in self._core.state.nodes.values() if node.peer == peer]

    def _send_start(self, node: Node) -> None:
        start = p.StartNode(node=node.name, incarnation=node.incarnation, device=node.device, directory=node.directory)
        self._delivery.to_agent(node.peer, start)

    async def wait(self, names: list[str]) -> None:
        """Return when these nodes, just ordered, answer. RequestError: why one does not."""
        futures = {name: self._ready[name] for name in names if name in self._ready}
        clock = asyncio.get_running_loop().time
        late, heard, deadline = list(futures), clock(), clock() + START_TIMEOUT
        while late:
            await asyncio.wait([futures[name] for name in late], timeout=_LOOK_PERIOD)
            late = [name for name, future in futures.items() if not future.done()]
            nodes = [self._core.state.nodes[name] for name in late if name in self._core.state.nodes]
            lost = [node.reason for node in nodes if node.condition == "lost"]
            if len(lost) < len(late):
                heard = clock()
            if late and clock() > heard + LOST_TIMEOUT:
                raise RequestError(f"{', '.join(late)} did not start: {lost[0]}")
            if late and clock() > deadline:
                # What a kernel replays may take as long as it took then.
                if not set(late) <= set(self._replaying()):
                    why = lost[0] if lost else f"see %cluster logs {late[0]}"
                    raise RequestError(f"{', '.join(late)} did not start within {START_TIMEOUT:g} s: {why}")
                deadline = clock() + START_TIMEOUT
        for future in futures.values():
            future.result()

    def restart(self, name: str, why: str = "restarted", *, replay: bool = True, all_cells: bool = False) -> None:
        """End the node's kernel, if it runs, and start the next incarnation under the same name; who waits for one that
        does not answer yet waits for this one."""
        node = self._core.state.nodes[name]
        link = self._delivery.links.get(node.peer)
        if link is None or link.condition in ("lost", "refused"):
            reason = link.why if link is not None else self._core.state.peers[node.peer].dropped
            raise RequestError(f"peer {node.peer!r} of node {name!r} is not connected ({reason})")
        waited_for = None if node.is_in else self._ready.pop(name, None)
        if node.condition not in ("dead",) and node.incarnation:
            self._delivery.to_agent(node.peer, p.StopNode(node=name, incarnation=node.incarnation, force=True))
            self.node_down(name, node.incarnation, why, [], dead=True)
        if not replay:
            self._no_replay.add(name)
        self.order(name, all_cells=all_cells)
        if waited_for is not None and not waited_for.done():
            self._ready[name] = waited_for

    def recover(self) -> None:
        """After a restart of the coordinator: what its predecessor decided and may not have sent, again. Agents and
        nodes ignore what they know."""
        self.announce()
        for peer in self._core.state.peers:
            self.order_again(peer)

    def order_again(self, peer: str) -> None:
        """Its agent may not have heard of the nodes that it is to start; if it has, it ignores this."""
        for node in self._nodes_on(peer):
            if node.condition == "starting" and node.incarnation:
                self._send_start(node)

    def restart_unsettled(self) -> None:
        """After a restart of the coordinator: a node whose replay was cut off lacks names; it begins anew."""
        for node in list(self._core.state.nodes.values()):
            if node.is_in and not node.settled and node.peer in self._delivery.links:
                self.restart(node.name, "its replay was cut off when the coordinator ended")

    async def restart_and_wait(self, name: str, replay: bool, all_cells: bool) -> None:
        self._core.known_node(name)
        self.restart(name, replay=replay, all_cells=all_cells)
        await self.wait([name])

    def remove(self, name: str) -> None:
        """End the node's kernel and take its name out of the cluster."""
        node = self._core.known_node(name)
        self._delivery.to_agent(node.peer, p.StopNode(node=name, incarnation=node.incarnation, force=True))
        if node.condition not in ("dead",):
            self.node_down(name, node.incarnation, "removed", [], dead=True)
        self._core.record(e.NodeRemoved(node=name, reason="removed"))
        for watcher in self._watchers:
            watcher.node_removed(name)
        self._core.tell("info", f"{name} was removed")

    # ---- what agents and nodes say

    def on_refused(self, message: p.NodeRefused) -> None:
        """An agent does not start a node."""
        self.node_down(message.node, message.incarnation, message.reason, [], dead=True)

    def on_ended(self, message: p.NodeEnded) -> None:
        """The process of a node has ended."""
        self.node_down(
            message.node, message.incarnation, message.reason, message.log_tail, dead=True, by_itself=message.by_itself
        )

    def on_hello(self, node: Node, hello: NodeHello) -> None:
        """The runtime of a new process has reached its agent."""
        if node.is_in:
            return
        if not self._is_usable(node, hello):
            self._delivery.to_agent(node.peer, p.StopNode(node=node.name, incarnation=node.incarnation, force=True))
            reason = "its kernel says a mesh address that cannot be used: is its peer's notebook-cluster damaged?"
            self.node_down(node.name, node.incarnation, reason, [], dead=True)
            return
        self._core.record(
            e.NodeUp(node=node.name, incarnation=node.incarnation, device=node.device or "cpu", hello=hello)
        )
        self._core.tell("info", f"{node.name} is up on {node.peer} ({node.device or 'cpu'})")
        self.announce()
        replay = node.name not in self._no_replay
        self._no_replay.discard(node.name)
        for watcher in self._watchers:
            watcher.node_up(node.name, replay=replay)
        if not self._core.state.cells:  # else it has to catch up first
            self.settled(node.name)

    def _is_usable(self, node: Node, hello: NodeHello) -> bool:
        """Every other node gets this: a key is one node's, and ports are ports."""
        others = [other.hello for other in self._core.state.nodes.values() if other.name != node.name and other.hello]
        ports = (hello.mesh_port, hello.master_port)
        return (
            is_key(hello.mesh_key)
            and all(hello.mesh_key != other.mesh_key for other in others)
            and all(0 < port < 65536 for port in ports)
            and len(hello.mesh_ipc) <= MOST_IPC
        )

    def settled(self, name: str) -> None:
        """The node answers and has replayed what it had to."""
        node = self._core.state.nodes.get(name)
        if node is not None and node.is_in and not node.settled:
            self._core.record(e.NodeSettled(node=name, incarnation=node.incarnation))
        future = self._ready.pop(name, None)
        if future is not None and not future.done():
            future.set_result(None)
        self._core.dirty()

    def node_down(
        self, name: str, incarnation: int, reason: str, log_tail: list[str], *, dead: bool, level: Level = "error",
        by_itself: bool = False,
    ) -> None:  # fmt: skip
        """A node's process ended (``by_itself``: nobody had ended it), or its peer's link is lost."""
        node = self._core.state.nodes.get(name)
        if node is None or node.incarnation != incarnation or node.condition == "dead":
            return
        was_in = node.is_in
        self._core.record(e.NodeDown(node=name, incarnation=incarnation, dead=dead, reason=reason, log_tail=log_tail))
        self._core.tell(level if reason not in ("removed", "restarted", "stopped") else "info", f"{name}: {reason}")
        future = self._ready.get(name)
        replayed = self._replay_died(name) if by_itself else None
        if dead and future is not None and not future.done():
            tail = f" ({log_tail[-1]})" if log_tail else ""
            if replayed is not None:
                tail += f" while it replayed cell {replayed}: %cluster restart {name} leaves that cell out"
            future.set_exception(RequestError(f"node {name!r} did not start: {reason}{tail}"))
        if was_in:
            self.announce()
            for other in self._core.state.roster_nodes():
                self._delivery.to_node(other.name, NodeLost(node=name, incarnation=incarnation, reason=reason))
        departure = Departure(name, incarnation, reason, log_tail, dead, was_in)
        for watcher in reversed(self._watchers):
            watcher.node_down(departure)

    def peer_lost(self, peer: str, reason: str, *, asleep: bool = False) -> None:
        """Nothing is heard from a peer: its nodes may come back with what they hold."""
        for node in self._nodes_on(peer):
            if node.condition in ("ok", "starting"):
                level: Level = "warning" if asleep else "error"
                self.node_down(node.name, node.incarnation, reason, [], dead=False, level=level)

    def peer_gone(self, peer: str, reason: str) -> None:
        """Its agent ended, or it is trusted no more."""
        for node in self._nodes_on(peer):
            self.node_down(node.name, node.incarnation, reason, [], dead=True)

    def on_inventory(self, peer: str, inventory: p.Inventory) -> None:
        """What runs on a peer after its link came (back): returned nodes join again, missing ones are dead, and those
        that were about to start are ordered once more."""
        running = {row.node: row for row in inventory.nodes}
        for node in self._nodes_on(peer):
            row = running.pop(node.name, None)
            if row is not None and row.incarnation == node.incarnation:
                if node.condition == "lost":
                    self._returned(node)
                elif node.condition == "dead":
                    self._delivery.to_agent(peer, p.StopNode(node=row.node, incarnation=row.incarnation, force=True))
            elif node.incarnation and node.condition in ("ok", "lost"):
                why = inventory.ended[:MOST_REASON] or f"the agent of {peer} was restarted"
                self.node_down(node.name, node.incarnation, f"its kernel is gone: {why}", [], dead=True)
            elif node.incarnation and node.condition == "starting":
                # An agent that was about to end may have taken the order with it; one that knows it ignores this.
                self._send_start(node)
        for row in running.values():
            self._delivery.to_agent(peer, p.StopNode(node=row.node, incarnation=row.incarnation, force=True))

    def _returned(self, node: Node) -> None:
        self._core.record(e.NodeReturned(node=node.name, incarnation=node.incarnation))
        # Nobody knows which of the earlier cells it has run.
        cut_off = self._core.state.nodes[node.name].is_in and not node.settled
        if cut_off and self._begins_anew(node.name):
            return
        self._core.tell("info", f"{node.name} is back with what it held")
        self.announce()
        for watcher in self._watchers:
            watcher.node_returned(node.name)

    def _begins_anew(self, name: str) -> bool:
        """True when a node whose replay was cut off could be restarted; who waits for it waits on."""
        waiting = self._ready.pop(name, None)
        try:
            self.restart(name, "its replay was cut off while its peer was away")
            return True
        except RequestError as error:
            self._core.tell("error", f"{name} lacks earlier cells, run %cluster restart {name}: {error}")
            return False
        finally:
            if waiting is not None and not waiting.done():
                self._ready[name] = waiting

    def announce(self) -> None:
        """The roster to every node in it, after the change is in the log."""
        message = roster(self._core.state)
        if message.generation == self._broadcast:
            return
        self._broadcast = message.generation
        for row in message.nodes:
            self._delivery.to_node(row.name, message)
