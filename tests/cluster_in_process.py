"""A cluster in one process: real sync objects, real torch models, the real round machines; queues instead of sockets.

Each node has a runtime thread and, while a cell runs, a main thread; the coordinator's machine has a thread of its own.
Messages are encoded and decoded as on the wire. ``lose`` decides which mesh frames get lost; ``watch`` sees messages.
"""

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from notebook_cluster.journal.records import Record
from notebook_cluster.protocol.mesh import JobFrame, MeshHeader
from notebook_cluster.protocol.node import FromNodeBody, NodeAddress, NodeLog, Roster, ToNodeBody
from notebook_cluster.protocol.rounds import Arrived, Commit, Prepared, Seal
from notebook_cluster.protocol.wire import Message, decode, encode
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.leader.state import ATTEMPT_BITS
from notebook_cluster.rounds.member import machine as member
from notebook_cluster.rounds.member.state import MemberSettings
from notebook_cluster.training.loop import encoding, sync
from notebook_cluster.training.runtime import JobHandler, Payload

TICK = 0.05
POINTS = [("from", Arrived), ("to", Seal), ("from", Prepared), ("to", Commit)]
"""The points of a round for a node, as :meth:`Cluster.once_at` takes them."""

# torch imports much at the first optimiser, seconds on a busy machine: before a cell's time is counted.
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

_here = threading.local()


@pytest.fixture(params=["aside", "in place"])
def stepped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer step of every model as of a small one, then as of a large one."""
    if request.param == "in place":
        monkeypatch.setattr(member, "MemberSettings", partial(MemberSettings, in_place_from=0))
        monkeypatch.setattr(encoding, "LATER_FROM", 0)


class NothingLent:
    """These nodes read nothing in each other's memory."""

    def readers(self) -> frozenset[str]:
        return frozenset()

    def memory(self, size: int) -> None:
        return None


class NoLoops:
    """These nodes have no ``nc.shard``."""

    def step_taken(self) -> None:
        pass

    def positions(self) -> object:
        return None

    def go_on(self, positions: object) -> None:
        pass

    def loops_going_on(self) -> int:
        return 0

    def when_run_again(self, callback: Callable[[], None], still: Callable[[], bool]) -> None:
        pass

    def begin_anew(self) -> None:
        pass

    def tell_unclaimed(self, warn: Callable[[str], None]) -> None:
        pass

    def at_next_batch(self, callback: Callable[[], None]) -> bool:
        return False

    def before_next(self, callback: Callable[[], None]) -> None:
        pass


class Killed(BaseException):
    """Ends the main thread of a node that was killed."""


class _Worker:
    """A thread that runs what is put on its queue, and ``tick`` in between."""

    def __init__(self, name: str, tick: Callable[[], None]) -> None:
        self.queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self._tick = tick
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self.queue.put(None)
        self._thread.join(10)

    def _run(self) -> None:
        try:
            due = time.monotonic() + TICK
            while True:
                try:
                    job = self.queue.get(timeout=max(0.0, due - time.monotonic()))
                except queue.Empty:
                    due = time.monotonic() + TICK
                    self._tick()
                    continue
                if job is None:
                    return
                job()
        except BaseException as failure:
            self.failure = failure
            raise


class Node:
    """Implements ``training.runtime.Runtime``."""

    def __init__(self, cluster: "Cluster", name: str, incarnation: int, directory: Path) -> None:
        self.cluster = cluster
        self.name = name
        self.incarnation = incarnation
        self.dead = False
        self.unlinked = False
        self.waiting: list[Callable[[], None]] = []
        """What the coordinator and this node have to say to each other when the link is back."""
        self.is_replaying = False
        self.current_cell = 0
        self.reports: list[dict[str, Any]] = []
        self.handlers: dict[str, JobHandler] = {}
        self._ends: list[Callable[[str], None]] = []
        self._directory = directory
        self._roster: Roster | None = None
        self._worker = _Worker(f"runtime {name}", self._tick)

    def cell(self) -> int:
        return self.current_cell

    def replaying(self) -> bool:
        return self.is_replaying

    def rank(self) -> int:
        return self.cluster.ranks()[self.name]

    def world_size(self) -> int:
        return len(self.cluster.nodes)

    def device(self) -> str:
        return "cpu"

    def checkpoint_directory(self) -> Path:
        return self._directory

    @property
    def roster(self) -> Roster | None:
        return self._roster

    def kept_directory(self) -> Path | None:
        return None

    def send_control(self, message: Message) -> None:
        if not self.dead:
            self.cluster.from_node(self, decode(encode(message), FromNodeBody))

    def send_mesh(self, node: str, header: JobFrame, payload: Payload = b"") -> None:
        if not self.dead:
            self.cluster.carry(self, node, decode(encode(header), MeshHeader), bytes(payload))

    @property
    def lending(self) -> "NothingLent":
        return NothingLent()

    def attach_job(self, name: str, handler: JobHandler) -> None:
        self.handlers[name] = handler
        if self._roster is not None:
            roster = self._roster
            self.call_soon(lambda: handler.on_roster(roster))

    def job(self, name: str) -> JobHandler | None:
        return self.handlers.get(name)

    def call_soon(self, callback: Callable[[], None]) -> None:
        def unless_dead() -> None:
            if not self.dead:
                callback()

        self._worker.queue.put(unless_dead)

    def at_cell_end(self, callback: Callable[[str], None]) -> None:
        self._ends.append(callback)

    @property
    def data(self) -> "NoLoops":
        return NoLoops()

    @contextlib.contextmanager
    def deferred_interrupts(self) -> Iterator[Callable[[], bool]]:
        if self.dead:
            raise Killed
        if threading.current_thread() is not threading.main_thread():
            yield lambda: False
            return
        arrived: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
        try:
            yield lambda: bool(arrived)
        finally:
            signal.signal(signal.SIGINT, before)
        if arrived and callable(before):
            before(signal.SIGINT, None)

    def in_round(self, job: str, round: int) -> None:
        pass

    def in_finish(self) -> None:
        pass

    def report(self, **values: Any) -> None:
        if self.dead:
            raise Killed
        self.reports.append(values)

    # ---- what the cluster does to it

    def deliver(self, message: Message) -> None:
        data = encode(message)
        self.call_soon(lambda: self._control(decode(data, ToNodeBody)))

    def deliver_frame(self, sender: str, header: JobFrame, payload: bytes) -> None:
        self.call_soon(lambda: self._frame(sender, header, payload))

    def end_cell(self, status: str) -> None:
        ends, self._ends = self._ends, []
        for callback in ends:
            callback(status)

    def stop(self) -> None:
        self.dead = True
        self._worker.stop()
        if self._worker.failure is not None:
            raise AssertionError(f"runtime thread of {self.name} failed") from self._worker.failure

    def _control(self, message: Any) -> None:
        if isinstance(message, Roster):
            self._roster = message
            for handler in self.handlers.values():
                handler.on_roster(message)
            return
        handler = self.handlers.get(message.job)
        if handler is not None:
            handler.on_control(message)

    def _frame(self, sender: str, header: JobFrame, payload: bytes) -> None:
        handler = self.handlers.get(header.job)
        if handler is not None:
            handler.on_mesh(sender, header, memoryview(payload))

    def _tick(self) -> None:
        if not self.dead:
            for handler in list(self.handlers.values()):
                handler.on_tick(time.monotonic())


class Cluster:
    """Use as a context manager. ``run`` runs one cell on all nodes."""

    def __init__(self, names: list[str], directory: Path) -> None:
        self.directory = directory
        self.nodes: dict[str, Node] = {}
        self.records: list[Any] = []
        self.synced = 0
        """So many of them survive also a machine that loses power."""
        self._starts = 1
        self.told: list[tuple[str, str]] = []
        self.lose: Callable[[str, str, JobFrame], bool] = lambda sender, receiver, header: False
        self.watch: Callable[[str, str, Message], None] = lambda direction, node, message: None
        self._cells = 0
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._incarnations: dict[str, int] = {}
        self._state = rounds.new_state()
        self._worker = _Worker("coordinator", lambda: self._feed(rounds.Tick(time.monotonic())))
        self._post(rounds.Tick(time.monotonic()))  # before it the time is 0, and a grace period would be over at once
        for name in names:
            self.add(name)

    def __enter__(self) -> "Cluster":
        self._real = sync.current_runtime
        sync.current_runtime = lambda: _here.runtime  # one runtime per main thread instead of per process
        return self

    def __exit__(self, *error: object) -> None:
        sync.current_runtime = self._real
        for node in self.nodes.values():
            node.stop()
        self._worker.stop()
        if self._worker.failure is not None:
            raise AssertionError("the coordinator failed") from self._worker.failure

    def ranks(self) -> dict[str, int]:
        return {name: rank for rank, name in enumerate(self.nodes)}

    def add(self, name: str) -> Node:
        """A new node, or a new incarnation of one that was killed."""
        incarnation = self._incarnations[name] = self._incarnations.get(name, 0) + 1
        node = self.nodes[name] = Node(self, name, incarnation, self.directory)
        rank = self.ranks()[name]
        self._post(rounds.MemberUp(name, incarnation, rank))
        self._roster_changed()
        return node

    def kill(self, name: str) -> None:
        """The node is gone at once: nothing more from it, nothing more to it."""
        node = self.nodes.pop(name)
        node.dead = True
        self._post(rounds.MemberLost(name, node.incarnation, "killed"))
        self._roster_changed()

    def unlink(self, name: str) -> None:
        """The node's link is lost: what it and the coordinator say to each other waits, and no frame comes through."""
        node = self.nodes[name]
        node.unlinked = True
        self._post(rounds.MemberLost(name, node.incarnation, "link lost"))

    def relink(self, name: str) -> None:
        """The link is back, with everything that waited."""
        node = self.nodes[name]

        def back() -> None:
            node.unlinked = False
            self._feed(rounds.MemberUp(name, node.incarnation, self.ranks()[name]))
            waited, node.waiting = node.waiting, []
            for go in waited:
                go()

        self._worker.queue.put(back)

    def wait_for(self, done: Callable[[], bool], timeout: float = 60.0) -> bool:
        """True when ``done`` became true in time."""
        deadline = time.monotonic() + timeout
        while not done() and time.monotonic() < deadline:
            time.sleep(0.01)
        return done()

    def run(
        self,
        function: Callable[[Node], Any],
        names: list[str] | None = None,
        main: str | None = None,
        timeout: float = 180.0,
    ) -> dict[str, Any]:
        """Run ``function(node)`` as a cell; node -> its result or exception. ``main`` runs on this thread."""
        return self.start(function, names).wait(main, timeout)

    def start(self, function: Callable[[Node], Any], names: list[str] | None = None) -> "Cell":
        self._cells += 1
        cell = Cell(self, self._cells, function)
        names = names or list(self.nodes)
        self._post(rounds.CellBegan(self._cells, tuple(names)))
        self._let_arrive([self.nodes[name] for name in names])
        for name in names:
            cell.begin(self.nodes[name])
        return cell

    def run_with_newcomer(
        self, function: Callable[[Node], Any], here: threading.Event, name: str = "late"
    ) -> dict[str, Any]:
        """:meth:`run` on all nodes and, from when ``here`` is set, on the new node ``name``."""
        cell = self.start(function)
        cell.go()
        assert here.wait(60), f"the moment for {name} did not come; told: {self.told}"
        self.add(name)
        cell.join(name)
        return cell.wait()

    def once_at(self, direction: str, node: str, kind: type, number: int, action: Callable[[], None]) -> list[int]:
        """Do ``action`` at the first message of ``kind`` for round ``number`` "from" or "to" the node, after ``watch``.

        Returns:
            A list that holds the round's number from that moment on.
        """
        done: list[int] = []
        before = self.watch

        def watch(towards: str, name: str, message: Any) -> None:
            before(towards, name, message)
            point = (towards, name, getattr(message, "round", 0)) == (direction, node, number)
            if point and isinstance(message, kind) and not done:
                done.append(number)
                action()

        self.watch = watch
        return done

    def run_and_lose(
        self, victim: str, direction: str, kind: type, number: int, function: Callable[[Node], Any]
    ) -> dict[str, Any]:
        """:meth:`run`, with ``victim`` killed at that moment (see :meth:`once_at`); the results of the others."""
        killed = self.once_at(direction, victim, kind, number, lambda: self.kill(victim))
        results = self.run(function)
        assert killed, f"no {kind.__name__} {direction} {victim} for round {number}"
        results.pop(victim)
        return results

    def restart_coordinator(self, *, power_lost: bool = False) -> None:
        """Its state is gone; a new one begins from the records, where the power was lost from those that were synced.
        Messages on the way to the old one still arrive."""

        def restart() -> None:
            if power_lost:
                del self.records[self.synced :]
            self._starts += 1
            self._state = rounds.new_state()
            nodes = tuple((node.name, node.incarnation) for node in self.nodes.values())
            self._feed(
                rounds.LeaderRestarted(
                    tuple(msgspec.convert(self.records, list[Record])),
                    nodes,
                    time.monotonic(),
                    time.time_ns(),
                    attempts=self._starts << ATTEMPT_BITS,
                )
            )
            self._feed(rounds.RanksChanged(self.ranks()))

        self._worker.queue.put(restart)

    def save(self, name: str) -> Any:
        """A view asks for a checkpoint; its answer."""
        self._post(rounds.SaveRequested(name, "", 1))
        return self._answers.get(timeout=60)

    # ---- between the threads

    def from_node(self, node: Node, message: Any) -> None:
        self.watch("from", node.name, message)
        if isinstance(message, NodeLog):
            self.told.append((message.level, message.text))
        elif node.unlinked:
            node.waiting.append(lambda: self._feed(rounds.FromMember(node.name, node.incarnation, message)))
        else:
            self._post(rounds.FromMember(node.name, node.incarnation, message))

    def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
        node = self.nodes.get(receiver)
        cut = sender.unlinked or (node is not None and node.unlinked)
        if node is not None and not cut and not self.lose(sender.name, receiver, header):
            node.deliver_frame(sender.name, header, payload)

    def _let_arrive(self, nodes: list[Node]) -> None:
        """Until what the coordinator said so far is heard: a cell comes from it, after all that."""
        heard: set[str] = set()

        def say() -> None:
            for node in nodes:
                node.call_soon(lambda name=node.name: heard.add(name))  # type: ignore[misc]

        self._worker.queue.put(say)
        assert self.wait_for(lambda: all(node.dead or node.name in heard for node in nodes)), "a node hears nothing"

    def left(self, cell: int, node: Node, status: str) -> None:
        if not node.dead:
            self._post(rounds.CellLeft(cell, node.name, status))

    def joined(self, cell: int, node: Node) -> None:
        self._post(rounds.NodeJoinedCell(cell, node.name))

    def _post(self, event: Any) -> None:
        self._worker.queue.put(lambda: self._feed(event))

    def _roster_changed(self) -> None:
        self._post(rounds.RanksChanged(self.ranks()))
        rows = [
            NodeAddress(
                name=node.name, incarnation=node.incarnation, rank=rank, local_rank=rank, peer="here", machine="here",
                device="cpu", hosts=[], mesh_key="", mesh_port=0, mesh_ipc="", master_port=0,
            )
            for rank, node in enumerate(self.nodes.values())
        ]  # fmt: skip
        for node in self.nodes.values():
            node.deliver(Roster(cluster="test", generation=sum(self._incarnations.values()), nodes=rows))

    def _feed(self, event: Any) -> None:
        self._state, effects = rounds.apply(self._state, event)
        for effect in effects:
            match effect:
                case rounds.Log():
                    self.records.append(msgspec.to_builtins(effect.record))
                    self.synced = len(self.records) if effect.durable else self.synced
                case rounds.SaveAnswer():
                    self._answers.put(effect)
                case rounds.Tell():
                    self.told.append((effect.level, effect.text))
                case rounds.Send():
                    self.watch("to", effect.node, effect.message)
                    node = self.nodes.get(effect.node)
                    if node is not None and node.unlinked:
                        node.waiting.append(lambda to=node, message=effect.message: to.deliver(message))  # type: ignore[misc]
                    elif node is not None:
                        node.deliver(effect.message)


class Cell:
    """One cell on several nodes, each on a thread of its own (one may be this thread)."""

    def __init__(self, cluster: Cluster, number: int, function: Callable[[Node], Any]) -> None:
        self.number = number
        self._cluster = cluster
        self._function = function
        self._threads: dict[str, threading.Thread] = {}
        self._results: dict[str, Any] = {}

    def begin(self, node: Node) -> None:
        thread = threading.Thread(target=self._run, args=(node,), name=f"main {node.name}", daemon=True)
        self._threads[node.name] = thread

    def join(self, name: str) -> None:
        """A node that came later runs this cell too."""
        node = self._cluster.nodes[name]
        self._cluster.joined(self.number, node)
        self.begin(node)
        self._threads[name].start()

    def go(self, main: str | None = None) -> None:
        for name, thread in self._threads.items():
            if name != main and thread.ident is None:
                thread.start()
        if main is not None:
            self._run(self._cluster.nodes[main])

    def wait(self, main: str | None = None, timeout: float = 180.0) -> dict[str, Any]:
        self.go(main)
        deadline = time.monotonic() + timeout
        for name, thread in list(self._threads.items()):
            if name != main:
                thread.join(max(0.0, deadline - time.monotonic()))
                assert not thread.is_alive(), f"{name} is still in its cell; told: {self._cluster.told}"
        return self._results

    def _run(self, node: Node) -> None:
        _here.runtime = node
        node.current_cell = self.number
        result: Any = None
        status = "ok"
        try:
            result = self._function(node)
        except KeyboardInterrupt as error:
            result, status = error, "interrupted"
        except Killed as error:
            self._results[node.name] = error
            return
        except Exception as error:
            result, status = error, f"error: {type(error).__name__}: {error}"
        try:
            node.end_cell(status)
        except Killed as error:
            result = error
        except (Exception, KeyboardInterrupt) as error:
            result, status = error, f"error: {error}"
        node.current_cell = 0
        self._results[node.name] = result
        self._cluster.left(self.number, node, status.partition(":")[0])
