"""The ledgers of this node's ``nc.shard`` loops: batches to the main thread, messages to and from the other nodes.

The main thread takes from its part under a lock and asks nobody; the I/O thread tells the others what was taken, and
answers them also while no loop of this node runs.
"""

import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from notebook_cluster.node.data.dealing import MeasuredSpeed, part_of
from notebook_cluster.node.data.ledger import KeptEpoch, Ledger, ShardPart, members_of
from notebook_cluster.node.data.loop_registry import FirstLoops, LoopRegistry
from notebook_cluster.node.data.pieces import ShardPieces
from notebook_cluster.node.data.position import Fetched
from notebook_cluster.node.data.source import is_order
from notebook_cluster.node.data.taken import MAX_COUNT
from notebook_cluster.protocol.mesh import JobFrame, ShardBody, ShardKey, ShardState, ShardTaken
from notebook_cluster.protocol.node import Roster
from notebook_cluster.protocol.wire import Message, decode, encode

if TYPE_CHECKING:
    from notebook_cluster.node.data.taken import Positions

_ASK_AGAIN = 1.0
"""Seconds after which a state that did not come is asked for."""
_MAX_UNASKED = 64 << 20
"""Bytes of ledgers that other nodes may make this one keep."""
ANSWER_SECONDS = 60.0
"""A node that does not answer and is not taken out of the cluster for so long ends the loops that wait for it."""


class Shares(LoopRegistry):
    """Implements :class:`notebook_cluster.training.runtime.JobHandler` for ``SHARD_JOB``.

    Args:
        send: a frame to a node of the roster.
        call_soon: runs something on the I/O thread.
        speed: samples per second that this node's training told; 0: none.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        *,
        send: Callable[[str, JobFrame, bytes], None],
        call_soon: Callable[[Callable[[], None]], None],
        speed: Callable[[], float],
        tell: Callable[[Message], None] = lambda message: None,
    ) -> None:
        super().__init__()
        self._first_loops = FirstLoops(name, lambda log: call_soon(lambda: tell(log)))
        self._name, self._incarnation = name, incarnation
        self._send, self._call_soon, self._told_speed = send, call_soon, speed
        self.speed = MeasuredSpeed()
        self.changed = threading.Condition()
        self._ledgers: dict[ShardKey, Ledger] = {}
        self._roster: Roster | None = None
        self._pieces = ShardPieces()
        self._ended_cell, self._asked_at = 0, 0.0

    # ---- the cell, on the main thread

    def begin_cell(self, cell: int, generation: int, *, joined: bool = False) -> None:
        """What belongs to earlier cells is over. ``generation``: of the roster with which it began, or with which this
        node ``joined`` it."""
        with self.changed:
            self._ledgers = {key: ledger for key, ledger in self._ledgers.items() if key.cell >= cell}
            self._first_loops.begin_cell(cell)
        self.forget_loops(cell, generation, joined)
        self.speed = MeasuredSpeed()

    def end_cell(self, cell: int) -> None:
        """Loops of this cell take nothing more here, also those that were never reached."""
        with self.changed:
            self._ended_cell = max(self._ended_cell, cell)
            self._first_loops.tell_unlike(None)
            for ledger in self._ledgers.values():
                ledger.open = ledger.open and ledger.key.cell > self._ended_cell

    def begin(
        self, key: ShardKey, alike_from: int | None, *, kept: KeptEpoch | None = None, asks: bool = False
    ) -> Ledger:
        """The ledger of an epoch that this node's loop has come to.

        Args:
            alike_from: generation with which all nodes began the cell: as long as it lasts the first parts need no
                exchange. None: they do.
            kept: where this node was in this epoch.
            asks: others may have been in this epoch before.
        """
        with self.changed:
            ledger = self._ledgers.get(key)
            if ledger is None:
                ledger = self._ledgers[key] = self._ledger(key)
            ledger.begun = True
            self._first_loops.began(key)
            self._first_loops.see(self._name, None if alike_from is None or kept is not None or asks else key)
            if kept is not None or asks:
                ledger.go_on(kept)
            if ledger.cut is not None and kept is not None:  # it was divided before this node came to it
                if ledger.cut is not kept.cut:  # in which each goes on from its own position
                    ledger.taken.join(kept.taken)
                ledger.kept = None
            if ledger.cut is None and not ledger.pending:
                asks = ledger.asks or ledger.others_go_on()
                if self._roster is not None and alike_from == self._roster.generation and not asks:
                    ledger.start_alike(alike_from, members_of(key, self._roster))
                else:
                    ledger.pending = True
                    self._call_soon(lambda: self._exchange(ledger))
            return ledger

    def take(
        self, ledger: Ledger, size: int, full_only: bool, fetched: Callable[[Fetched], None] | None = None
    ) -> "Positions | None":
        """The next positions of this node's part, at most ``size``; None when there are no more (for now).

        Waits while parts are cut anew: for one answer of each member's I/O thread, whatever its loop is doing.

        Args:
            fetched: gets the batch before anything is changed, so that no Stop comes between.

        Raises:
            RuntimeError: a member has not answered for ANSWER_SECONDS.
        """
        while True:
            part = self._part(ledger)
            with self.changed:
                if ledger.differing:
                    raise ValueError(f"shard: {self._first_loops.differs(ledger.differing)}")
                if ledger.pending or ledger.cut is not part.cut:
                    continue
                positions, end = ledger.next_of(part, size)
                if not len(positions) or (full_only and len(positions) < size):
                    part.done = True
                    return None
                if fetched is not None:
                    fetched(Fetched(ledger, part, end, positions))
                part.at = end
                ledger.taken.mark(positions.tolist())
                self._will_tell(ledger, positions)
                self.activity += 1
                return positions

    def _part(self, ledger: Ledger) -> ShardPart:
        deadline = time.monotonic() + ANSWER_SECONDS
        with self.changed:
            while ledger.pending or ledger.cut is None:
                self.changed.wait(0.2)
                if time.monotonic() < deadline:
                    continue
                who = ", ".join(ledger.missing()) or "the roster"
                if not ledger.asks:
                    raise RuntimeError(
                        f"shard: {who} did not answer within {ANSWER_SECONDS:g} s after the cluster changed, so "
                        "the rest of the data cannot be divided: run the cell again, or %cluster remove what does not "
                        "answer"
                    )
                deadline = float("inf")
                print(f"shard: waits for {who} to come to this loop, to go on together where all were", file=sys.stderr)
            cut = ledger.cut
        part = ledger.part
        if part is None or part.cut is not cut:
            part = ledger.part = ShardPart(cut, part_of(cut, ledger.key, self._name))
        return part

    def seen_of_stream(self, ledger: Ledger, end: int, first: str) -> None:
        """This node has read the first item, or come to the end, of the stream of this epoch."""
        with self.changed:
            new = (end, first) != (ledger.end, ledger.first)
            ledger.first = first or ledger.first
            if end >= 0 > ledger.end:
                ledger.end = end
            if new:
                self._will_tell(ledger, None)
            if first and not is_order(first):
                for sender, said in list(ledger.said.items()):
                    ledger.hear_of_stream(sender, *said)

    def _will_tell(self, ledger: Ledger, positions: "Positions | None") -> None:
        ledger.untold.append([] if positions is None else positions.tolist())
        if len(ledger.untold) == 1:
            self._call_soon(lambda: self._tell_taken(ledger))

    def close(self, ledgers: Sequence[Ledger]) -> bool:
        """Say that this loop takes nothing more of these; False when it got something new to take, or may soon."""
        with self.changed:
            for ledger in ledgers:
                if ledger.pending or ledger.part is None or ledger.part.cut is not ledger.cut:
                    return False
                self._first_loops.tell_stream(ledger.differing)
            self.abandon(ledgers)
            return True

    def abandon(self, ledgers: Sequence[Ledger]) -> None:
        """The loop was left before its end: what remains of its part is not given to others while this node is in."""
        for ledger in ledgers:
            ledger.open = False

    # ---- on the I/O thread

    def on_roster(self, roster: Roster) -> None:
        with self.changed:
            self._roster = roster
            self.hear_of_roster(roster.generation)
            ledgers = list(self._ledgers.values())
        for ledger in ledgers:
            nothing_to_divide = ledger.alike >= roster.generation or ledger.all_taken()
            if ledger.pending or not nothing_to_divide or self._is_asked(ledger):
                self._exchange(ledger)

    def on_mesh(self, sender: str, header: JobFrame, payload: memoryview) -> None:
        known = {row.name: row.incarnation for row in self._roster.nodes} if self._roster is not None else {}
        if header.incarnation < known.get(sender, 0):
            return
        body = self._pieces.assemble(sender, header, payload)
        if body is None:
            return
        message = decode(body, ShardBody)
        with self.changed:
            ledger = self._ledgers.get(message.key) or self._make(message.key)
            if ledger is None:
                return
            if isinstance(message, ShardTaken):
                self._first_loops.see(sender, message.key)
                ledger.taken.mark([message.base + position for position in array("I", message.positions)])
                self._hear_of_data(ledger, sender, message)
                ledger.alike = max(ledger.alike, message.alike)
                return
            ledger.hear(sender, message)
            self.hear_of_begin(message.key.cell, message.since)
            self._hear_of_data(ledger, sender, message)
        if message.want and ledger.told is not None and ledger.generation == message.generation:
            self._tell(sender, ledger.told)
        if self._is_asked(ledger):
            self._exchange(ledger)
        self._deal(ledger)

    def _hear_of_data(self, ledger: Ledger, sender: str, message: ShardTaken | ShardState) -> None:
        if not is_order(message.first):
            ledger.hear_of_stream(sender, message.end, message.first)
            if not ledger.open or ledger.read_through():  # no batch is asked for any more, which would end the loop
                self._first_loops.tell_stream(ledger.differing)
        elif self._roster is not None and (members := members_of(ledger.key, self._roster)):
            self._first_loops.compare(members[0], sender, ledger.first, message.first)

    def on_tick(self, now: float) -> None:
        with self.changed:
            self._first_loops.tell_unlike(now)
        if now - self._asked_at < _ASK_AGAIN:
            return
        self._asked_at = now
        for ledger in list(self._ledgers.values()):
            if ledger.pending and ledger.told is not None:
                for name in ledger.missing():
                    self._tell(name, msgspec.structs.replace(ledger.told, want=True))

    def on_control(self, message: Message) -> None:
        """Nothing of the coordinator's is for shards."""

    def keep(self) -> Callable[[], Path] | None:
        return None

    def _make(self, key: ShardKey) -> Ledger | None:
        """A ledger for a loop that this node has not come to, perhaps never will."""
        held = sum(len(ledger.taken.bits) for ledger in self._ledgers.values())
        if not 0 <= key.count <= MAX_COUNT or held + key.count // 8 > _MAX_UNASKED:
            return None
        ledger = self._ledgers[key] = self._ledger(key)
        ledger.open = key.cell > self._ended_cell
        return ledger

    def _ledger(self, key: ShardKey) -> Ledger:
        ledger = Ledger.empty(key, self._name)
        self._see_whether_over(ledger)
        return ledger

    def _see_whether_over(self, ledger: Ledger) -> None:
        if not ledger.begun and self.is_over(ledger.key):
            ledger.mark_over()
            ledger.begun = True  # this loop comes to it no more

    def _is_asked(self, ledger: Ledger) -> bool:
        """Whether another member is in the exchange of our roster's generation, and this node is not yet."""
        generation = self._roster.generation if self._roster is not None else -1
        return ledger.generation < generation and any(state.generation >= generation for state in ledger.heard.values())

    def look_again(self) -> None:
        """A cell begins, or what this node goes on from was said: others may wait for that."""
        with self.changed:
            ledgers = [ledger for ledger in self._ledgers.values() if self._is_asked(ledger)]
        for ledger in ledgers:
            self._call_soon(lambda ledger=ledger: self._exchange(ledger))  # type: ignore[misc]

    def _exchange(self, ledger: Ledger) -> None:
        with self.changed:
            roster = self._roster
            if roster is None or ledger.generation >= roster.generation:
                return
            members = members_of(ledger.key, roster)
            if self._name not in members:
                return
            self._see_whether_over(ledger)
            if self._waits_for_loop(ledger):
                # It is told on behalf of the loop, which may come only after a round that waits for those who ask.
                kept = self.kept_epoch(ledger.key)
                if kept is None:
                    return
                ledger.go_on(kept)
            if self.has_not_begun(ledger.key):
                ledger.join_alike(members)
            speed = self._told_speed() or self.speed.rate()
            state = ledger.freeze(roster.generation, members, speed, self.since(ledger.key.cell))
        for name in members:
            if name != self._name:
                self._tell(name, state)
        self._deal(ledger)

    def _waits_for_loop(self, ledger: Ledger) -> bool:
        """This node's loop goes on in this epoch, or may where others do, and has not said where."""
        if ledger.begun or ledger.key.cell <= self._ended_cell or not self.may_go_on(ledger.key):
            return False
        return self.is_about_to_begin(ledger.key.cell) or self.goes_on_in(ledger.key) or ledger.others_go_on()

    def _deal(self, ledger: Ledger) -> None:
        with self.changed:
            if ledger.deal_anew():
                self.changed.notify_all()

    def _tell_taken(self, ledger: Ledger) -> None:
        with self.changed:
            untold, ledger.untold = ledger.untold, []
            others = [name for name in ledger.members if name != self._name]
        if others:
            positions = [position for some in untold for position in some]
            base = min(positions, default=0) if not ledger.key.count else 0
            taken = ShardTaken(
                key=ledger.key, positions=array("I", [position - base for position in positions]).tobytes(), base=base,
                alike=ledger.alike, end=ledger.end, first=ledger.first,
            )  # fmt: skip
            for name in others:
                self._tell(name, taken)

    def _tell(self, name: str, message: ShardBody) -> None:
        for header, piece in self._pieces.cut(encode(message), self._incarnation):
            self._send(name, header, piece)
