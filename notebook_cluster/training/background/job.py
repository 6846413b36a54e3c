"""A job's background: drives the member's machine (:mod:`notebook_cluster.rounds`) with what arrives and passes on what
it asks for.

Two threads meet here. The background's thread, which is the runtime's, or for a large model one of its own
(:mod:`.worker`), owns the member's state, serves it to joiners and late nodes while the main thread computes, and
collects checkpoints. The main thread (``training.loop``) posts events and takes notices; only it touches the model.
Everything handed from one to the other is immutable.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from notebook_cluster.codecs import Vector
from notebook_cluster.protocol.awake import AwakeClock
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.node import EndWait, NodeLog, Roster
from notebook_cluster.protocol.rounds import (
    Applied,
    CheckpointRequest,
    Close,
    Commit,
    PartMissing,
    RoundQuery,
    Save,
    Saved,
)
from notebook_cluster.protocol.runs import Register
from notebook_cluster.protocol.wire import Message
from notebook_cluster.rounds.member import events_effects as types
from notebook_cluster.rounds.member import machine as member
from notebook_cluster.rounds.member.state import MemberState
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import state_hash
from notebook_cluster.rounds.numerics.vectors import TensorLayout
from notebook_cluster.training.background.state_transfers import StateTransfers
from notebook_cluster.training.background.worker import BackgroundThread, Notice, Resting, memory_of
from notebook_cluster.training.checkpointing.optimizer_bytes import StateRequest
from notebook_cluster.training.checkpointing.resuming import Start
from notebook_cluster.training.checkpointing.saving import (
    CheckpointWriter,
    Description,
    TrainingSnapshot,
    TransferError,
    frames_of,
    kept_writer,
)
from notebook_cluster.training.runtime import Runtime


class Job:
    """Implements ``runtime.JobHandler`` for one job of this node; survives the sync objects made for it."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime = runtime
        self.name = name
        self.owner: object | None = None
        """The sync object that was made last: an older one must not go on."""
        self.step = 0
        """Steps of its training loop at the boundary that was reached last."""
        self.checkpoint_part: Callable[[str, int, frozenset[str]], bytes | None] = lambda node, rank, used: None
        """Optimiser state of a node, from the checkpoint that this node resumed from."""
        self.restored_optimizer: Callable[[str], bytes | None] = lambda state_hash: None
        """The state of an optimiser that all share, from that checkpoint; empty where it has none. None: the state with
        that hash is not the checkpoint's."""
        self.resting_optimizer_bytes: Callable[[], bytes] | None = None
        """Set while the main thread is in no training loop: a checkpoint then need not wait for its next sync call."""
        self.own: object | None = None
        """What a strategy keeps on this node alone and the next sync object goes on with; main thread only."""
        self.made_with: tuple[Callable[[], object], Callable[[], object]] = (lambda: None, lambda: None)
        """Weak references to the model and the optimizer that the last sync object was given; main thread only."""
        self.stopped: object | None = None  # what a Stop has left of its run for the next one; main thread only
        self.applied = (0, False)  # the last round committed here, and whether this node's work is in it
        self._runs = (0, 0)
        """The cell in which a sync object registered last, and how many did in it."""
        self._member = member.new_member(name, runtime.name, runtime.incarnation)
        self._description: Description | None = None
        self._notices: deque[Notice] = deque()
        self._noticed = threading.Event()
        self._states = StateTransfers(
            runtime,
            name,
            member=lambda: self._member,
            apply_event=self.apply_event,
            optimizer_bytes=self._give_optimizer_bytes,
        )
        self._waiting_saves: list[Save] = []
        self._requested: set[str] = set()
        """Checkpoints that this node asked for and was not told of yet."""
        self._ranks: dict[str, int] = {}
        self._incarnations: dict[str, int] = {}
        self._arrived_at = 0.0
        self._clock = AwakeClock()
        self._thread, self.resting = BackgroundThread(runtime, name), Resting()
        self._tick_waits = False
        self.dropped = 0
        """Frames of states and parts that could not be right."""
        self._writer = CheckpointWriter(runtime.checkpoint_directory, runtime.send_control)

    @property
    def member(self) -> MemberState:
        """This node's side of the rounds; on the background's thread only."""
        return self._member

    # ---- main thread ----------------------------------------------------------------------------------------

    def next_run(self, cell: int) -> int:
        """The number of one more sync object in this cell: 1, 2, ..., the same on every node."""
        count = self._runs[1] if self._runs[0] == cell else 0
        self._runs = cell, count + 1
        return count + 1

    def register(
        self, register: Register, fragments: Fragments, theta: Vector, momentum: Vector, description: Description
    ) -> None:
        """Register (again). ``theta`` and ``momentum``: what this node would start from."""

        def start() -> None:
            self._description, self._states.optimizer_bytes = description, None
            self.apply_event(types.BeginRun(register=register, fragments=fragments, theta=theta, momentum=momentum))

        def begin() -> None:
            self._thread.prepare(fragments.size)
            self._thread.do(start)

        self.runtime.call_soon(begin)

    def held(self, layout: TensorLayout) -> Start | None:
        """The state that this node holds of such a model, whatever codec its rounds were sent with."""
        state, before, about = self._member, self._member.register, self._description
        same = before is not None and (before.schema, before.buffers) == (layout.schema, layout.buffers)
        if not (same and state.holds) or state.theta is None or state.momentum is None or state.fragments is None:
            return None
        # without the optimiser's step that belongs to the last round it is another state than that of the others
        own = state.state_hash if state.advanced else state_hash(state.theta, state.momentum)
        frozen, keeps = str(about.settings.get("frozen") or "") if about else "", state.fragments.keeps
        return Start(state.round, state.theta, state.momentum, own, held=True, frozen=frozen, keeps=keeps)

    def fetched_optimizer_bytes(self) -> bytes | None:
        """The optimiser's state that came with the state this node fetched last; empty: none did. None: this node has
        not fetched a state since it registered."""
        return self._states.optimizer_bytes

    def saved_optimizer_bytes(self) -> bytes:
        """This node's own part of the checkpoint that the job resumed from; empty when there is none."""
        own = self.checkpoint_part(self.runtime.name, self.runtime.rank(), frozenset(self._ranks))
        return self._states.optimizer_bytes or own or b""

    def post_event(self, event: types.Event, owner: object | None = None) -> None:
        """Hand ``event`` to the member (any thread); not what an ``owner`` has made that is no longer the job's."""

        def handle() -> None:
            if owner is None or self.owner is owner:
                self.apply_event(event)

        self._thread.soon(handle)

    def has_notices(self) -> bool:
        """True when :meth:`next_notice` would return a notice: cheap enough for every step."""
        return bool(self._notices)

    def next_notice(self) -> Notice | None:
        """The oldest notice, or None. Call with interrupts deferred, so that none is taken and lost."""
        return self._notices.popleft() if self._notices else None

    def wait_for_notice(self, seconds: float) -> None:
        """Until there may be a notice, at most ``seconds``; an interrupt ends it and loses nothing."""
        if not self._notices:
            self._noticed.wait(seconds)
        self._noticed.clear()

    def request_checkpoint(self, name: str) -> None:
        """Ask the coordinator, and whoever takes its place meanwhile, for a checkpoint; a Saved notice answers."""
        self._requested.add(name)
        self.runtime.send_control(CheckpointRequest(job=self.name, name=name))

    def send_part(self, order: Save, data: bytes) -> None:
        """This node's part of a checkpoint to its writer (any thread)."""
        for offset, total, payload in frames_of(data):
            header = JobFrame(
                job=self.name, incarnation=self.runtime.incarnation, kind="part", ticket=order.ticket,
                round=order.round, offset=offset, total=total,
            )  # fmt: skip
            self.runtime.send_mesh(order.writer, header, payload)

    # ---- runtime's thread -----------------------------------------------------------------------------------

    def on_control(self, message: Message) -> None:
        self._thread.do(lambda: self._on_control(message))

    def on_mesh(self, sender: str, header: JobFrame, payload: memoryview) -> None:
        self._thread.do(lambda: self._on_mesh(sender, header, payload), len(payload))

    def on_tick(self, now: float) -> None:
        if not self._tick_waits:
            self._tick_waits = True
            self._thread.do(self._on_tick)

    def on_roster(self, roster: Roster) -> None:
        self._thread.do(lambda: self._on_roster(roster))

    # ---- background's thread --------------------------------------------------------------------------------

    def _on_control(self, message: Message) -> None:
        match message:
            case Save():
                self._save(message)
            case PartMissing():
                self._writer.part_missing(message)
            case EndWait():
                self.notify(message)
            case Saved() | Close():
                if isinstance(message, Saved):
                    self._requested.discard(message.name)
                self.notify(message)
            case RoundQuery():  # a restarted coordinator knows of no request
                self.apply_event(types.FromLeader(message))
                for name in sorted(self._requested):
                    self.runtime.send_control(CheckpointRequest(job=self.name, name=name))
            case Commit():
                with self.resting.lock:
                    alone = self.resting.gives_way(self._member, self.runtime.name, message)
                    self.apply_event(types.FromLeader(message, alone))
            case _:
                self.apply_event(types.FromLeader(message))

    def _on_mesh(self, sender: str, header: JobFrame, payload: memoryview) -> None:
        try:
            match header.kind:
                case "state_request":
                    self._states.on_request(sender, header)
                case "state":
                    self._states.on_frame(sender, header, payload)
                case "sent" if header.name == "state":
                    self._states.on_sent(sender, header)
                case "part":
                    self._writer.part(sender, header, payload)
                case _:
                    self.apply_event(types.Frame(sender=sender, header=header, payload=payload))
        except TransferError as error:
            self.dropped += 1
            if self.dropped & (self.dropped - 1) == 0:  # of many, fewer and fewer are worth a line
                self.tell("warning", f"{self.name}: dropped frame {self.dropped}, of {sender!r}: {error}")

    def _on_tick(self) -> None:
        self._tick_waits, now = False, time.monotonic()
        self._states.on_tick(now)
        # After a pause (this process was stopped, or the thread added up numbers) nobody else is late.
        self.apply_event(types.Tick(now=self._clock.read(now)))

    def _on_roster(self, roster: Roster) -> None:
        self._ranks = {node.name: node.rank for node in roster.nodes}
        self._incarnations = {node.name: node.incarnation for node in roster.nodes}
        memory = functools.partial(memory_of, self.runtime)
        self._member = member.sending(self._member, self.runtime.lending.readers(), memory)
        self._states.on_roster(self._incarnations)

    def apply_event(self, event: types.Event) -> None:
        if isinstance(event, types.Boundary):
            self._arrived_at = time.monotonic()
        self._member, effects = member.apply(self._member, event)
        for effect in effects:
            self._do(effect)
        moved = bool(effects) or isinstance(event, types.Advance)
        if self._waiting_saves and moved:
            saves, self._waiting_saves = self._waiting_saves, []
            for order in saves:
                self._save(order)
        if moved:
            self._states.serve_waiting()

    def _do(self, effect: types.Effect) -> None:
        match effect:
            case types.SendControl():
                self.runtime.send_control(effect.message)
            case types.SendChunk():
                self.runtime.send_mesh(effect.node, effect.header, effect.payload)
            case types.FetchState():
                self._states.fetch(effect)
            case types.CancelFetch():
                self._states.cancel()
            case types.Log():
                self.tell(effect.level, effect.text)
            case types.Apply():
                self.applied = (effect.round, effect.counted)
                self._say_applied(effect)
                self.notify(effect)
            case _:
                self.notify(effect)

    def _say_applied(self, effect: types.Apply) -> None:
        wait = time.monotonic() - self._arrived_at if self._arrived_at else 0.0
        self._arrived_at = 0.0
        applied = Applied(
            job=self.name, round=effect.round, state_hash=effect.state_hash, bytes_sent=effect.bytes_sent,
            steps=effect.steps, wait=wait, step=self.step,
        )  # fmt: skip
        self.runtime.send_control(applied)

    def notify(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._noticed.set()

    def tell(self, level: str, text: str) -> None:
        """A line for the event list."""
        self.runtime.send_control(NodeLog(level=level, text=text))  # type: ignore[arg-type]

    # ---- checkpoints ----------------------------------------------------------------------------------------

    def _save(self, order: Save) -> None:
        if not self._member.advanced and self._member.round == order.round:
            self._waiting_saves.append(order)
            return
        if order.writer == self.runtime.name:
            self._writer.order(order, self._snapshot(), dict(self._ranks))
        if self.runtime.name not in order.members:
            return
        resting = self.resting_optimizer_bytes
        if resting is None:
            self.notify(order)
        else:
            threading.Thread(
                target=lambda: self.send_part(order, resting()), name="checkpoint-part", daemon=True
            ).start()

    def keep(self) -> Callable[[], Path] | None:
        """See ``runtime.JobHandler``: for a node that is about to end without its cluster."""
        with self.resting.lock:  # nothing is written to what is taken here
            snapshot, resting = self._snapshot(), self.resting_optimizer_bytes
        if snapshot is None:
            return None
        wanted = StateRequest()
        if resting is None:
            self.notify(wanted)
        rank = self._ranks.get(self.runtime.name, 0)
        return kept_writer(self.runtime, self.name, snapshot, rank, resting or wanted.wait)

    def _give_optimizer_bytes(self, node: str, give: Callable[[bytes], None]) -> None:
        """The optimiser's state that goes with the state held here when ``node`` takes that over; empty: none."""
        fragments, resting = self._member.fragments, self.resting_optimizer_bytes
        if fragments is None or not fragments.gradients:  # each node has its own: what it saved, if it did
            rank, used = self._ranks.get(node, -1), frozenset(self._ranks)
            give(self.checkpoint_part(node, rank, used) or b"")
        elif fragments.central_optimizer:  # the node that steps keeps it; before its first step it is on disk
            give(self.restored_optimizer(self._member.state_hash) or b"")
        elif resting is not None:
            give(resting())
        else:  # the optimiser's state after that round, which the main thread has
            self.notify(StateRequest(lambda optimizer: self._thread.soon(lambda: give(optimizer))))

    def _snapshot(self) -> TrainingSnapshot | None:
        state, about = self._member, self._description
        if not state.holds or state.theta is None or state.momentum is None or about is None:
            return None
        return TrainingSnapshot(
            state.round, state.state_hash, state.theta, state.momentum, about.layout, about.settings, about.beside
        )
