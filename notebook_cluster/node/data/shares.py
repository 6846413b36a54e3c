"""The ledgers of this node's ``nc.shard`` loops: batches to the main thread, messages to and from the other nodes.

The main thread takes from its part under a lock and asks nobody; the I/O thread tells the others what was taken, and
answers them also while no loop of this node runs.
"""

import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_cluster.node.data.ledger import Ledger, ShardPart, members_of, part_of
from notebook_cluster.protocol.mesh import SHARD_JOB, JobFrame, ShardBody, ShardKey, ShardState, ShardTaken
from notebook_cluster.protocol.node import Roster
from notebook_cluster.protocol.wire import MAX_MESSAGE_BYTES, Message, decode, encode

if TYPE_CHECKING:
    from notebook_cluster.node.data.ledger import Positions

MAX_COUNT = 8 * (MAX_MESSAGE_BYTES - (1 << 20))
"""Elements of a data set that is followed: one bit for each must fit into a message. A larger one is divided once."""

_PIECE = 128 << 10
_ASK_AGAIN = 1.0
"""Seconds after which a state that did not come is asked for."""
_MAX_UNASKED = 64 << 20
"""Bytes of ledgers that other nodes may make this one keep."""
_MAX_PARTS = 256
_SPEED_SECONDS = 10.0
ANSWER_SECONDS = 60.0
"""A node that does not answer and is not taken out of the cluster for so long ends the loops that wait for it."""


class Shares:
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
    ) -> None:
        self._name, self._incarnation = name, incarnation
        self._send, self._call_soon, self._told_speed = send, call_soon, speed
        self._measured = (0, 0.0)
        self._changed = threading.Condition()
        self._ledgers: dict[ShardKey, Ledger] = {}
        self._roster: Roster | None = None
        self._loops: Counter[Any] = Counter()
        self._ended_cell = 0
        self._tickets = 0
        self._pieces: dict[tuple[str, int, int], dict[int, bytes]] = {}
        self._asked_at = 0.0

    # ---- the cell, on the main thread

    def begin_cell(self, cell: int) -> None:
        """What belongs to earlier cells is over."""
        with self._changed:
            self._ledgers = {key: ledger for key, ledger in self._ledgers.items() if key.cell >= cell}
            self._loops.clear()
        self._measured = (0, 0.0)

    def end_cell(self, cell: int) -> None:
        """Loops of this cell take nothing more here, also those that were never reached."""
        with self._changed:
            self._ended_cell = max(self._ended_cell, cell)
            for ledger in self._ledgers.values():
                ledger.open = ledger.open and ledger.key.cell > self._ended_cell

    def next_loop(self, *what: Any) -> int:
        """How many loops over ``what`` this cell began before."""
        self._loops[what] += 1
        return self._loops[what] - 1

    def measured(self, samples: int, seconds: float) -> None:
        """The loop came back after so long: what counts where training tells no speed."""
        before = self._measured
        if before[1] > _SPEED_SECONDS:  # the older half fades
            before = before[0] // 2, before[1] / 2
        self._measured = before[0] + samples, before[1] + seconds

    def _speed(self) -> float:
        samples, seconds = self._measured
        return self._told_speed() or (samples / seconds if samples and seconds > 0 else 0.0)

    def begin(self, key: ShardKey, alike_from: int | None) -> Ledger:
        """The ledger of an epoch that this node's loop has come to.

        Args:
            alike_from: generation with which all nodes began the cell: as long as it lasts the first parts need no
                exchange. None: they do.
        """
        with self._changed:
            ledger = self._ledgers.setdefault(key, Ledger.empty(key, self._name))
            if ledger.cut is None and not ledger.pending:
                if self._roster is not None and alike_from == self._roster.generation:
                    ledger.start_alike(alike_from, members_of(key, self._roster))
                else:
                    ledger.pending = True
                    self._call_soon(lambda: self._exchange(ledger))
            return ledger

    def take(self, ledger: Ledger, size: int, full_only: bool) -> "Positions | None":
        """The next positions of this node's part, at most ``size``; None when there are no more (for now).

        Waits while parts are cut anew: for one answer of each member's I/O thread, whatever its loop is doing.

        Raises:
            RuntimeError: a member has not answered for ANSWER_SECONDS.
        """
        while True:
            part = self._part(ledger)
            with self._changed:
                if ledger.pending or ledger.cut is not part.cut:
                    continue
                positions = part.positions[part.at : part.at + size]
                if not len(positions) or (full_only and len(positions) < size):
                    part.done = True
                    return None
                part.at += len(positions)
                ledger.mark(positions.tolist())
                ledger.untold.append(positions.astype("<u4").tobytes())
                if len(ledger.untold) == 1:
                    self._call_soon(lambda: self._tell_taken(ledger))
                return positions

    def _part(self, ledger: Ledger) -> ShardPart:
        deadline = time.monotonic() + ANSWER_SECONDS
        with self._changed:
            while ledger.pending or ledger.cut is None:
                self._changed.wait(0.2)
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"shard: {', '.join(ledger.missing()) or 'the roster'} did not answer within "
                        f"{ANSWER_SECONDS:g} s after the cluster changed, so the rest of the data cannot be divided: "
                        "run the cell again, or %cluster remove what does not answer"
                    )
            cut = ledger.cut
        part = ledger.part
        if part is None or part.cut is not cut:
            part = ledger.part = ShardPart(cut, part_of(cut, ledger.key, self._name))
        return part

    def close(self, ledgers: Sequence[Ledger]) -> bool:
        """Say that this loop takes nothing more of these; False when it got something new to take, or may soon."""
        with self._changed:
            for ledger in ledgers:
                if ledger.pending or ledger.part is None or ledger.part.cut is not ledger.cut:
                    return False
            self.abandon(ledgers)
            return True

    def abandon(self, ledgers: Sequence[Ledger]) -> None:
        """The loop was left before its end: what remains of its part is not given to others while this node is in."""
        for ledger in ledgers:
            ledger.open = False

    # ---- on the I/O thread

    def on_roster(self, roster: Roster) -> None:
        with self._changed:
            self._roster = roster
            ledgers = list(self._ledgers.values())
        for ledger in ledgers:
            nothing_to_divide = ledger.alike >= roster.generation or ledger.all_taken()
            if ledger.pending or not nothing_to_divide or self._is_asked(ledger):
                self._exchange(ledger)

    def on_mesh(self, sender: str, header: JobFrame, payload: memoryview) -> None:
        known = {row.name: row.incarnation for row in self._roster.nodes} if self._roster is not None else {}
        if header.incarnation < known.get(sender, 0):
            return
        body = self._assembled(sender, header, payload)
        if body is None:
            return
        message = decode(body, ShardBody)
        with self._changed:
            ledger = self._ledgers.get(message.key) or self._make(message.key)
            if ledger is None:
                return
            if isinstance(message, ShardTaken):
                ledger.mark(array("I", message.positions))
                ledger.alike = max(ledger.alike, message.alike)
                return
            ledger.hear(sender, message)
        if message.want and ledger.told is not None and ledger.generation == message.generation:
            self._tell(sender, ledger.told)
        if self._is_asked(ledger):
            self._exchange(ledger)
        self._deal(ledger)

    def on_tick(self, now: float) -> None:
        if now - self._asked_at < _ASK_AGAIN:
            return
        self._asked_at = now
        for ledger in list(self._ledgers.values()):
            if ledger.pending and ledger.told is not None:
                for name in ledger.missing():
                    self._tell(name, _wanting(ledger.told))

    def on_control(self, message: Message) -> None:
        """Nothing of the coordinator's is for shards."""

    def keep(self) -> Callable[[], Path] | None:
        return None

    def _make(self, key: ShardKey) -> Ledger | None:
        """A ledger for a loop that this node has not come to, perhaps never will."""
        held = sum(len(ledger.taken) for ledger in self._ledgers.values())
        if not 0 < key.count <= MAX_COUNT or held + key.count // 8 > _MAX_UNASKED:
            return None
        ledger = self._ledgers[key] = Ledger.empty(key, self._name)
        ledger.open = key.cell > self._ended_cell
        return ledger

    def _is_asked(self, ledger: Ledger) -> bool:
        """Whether another member is in the exchange of our roster's generation, and this node is not yet."""
        generation = self._roster.generation if self._roster is not None else -1
        return ledger.generation < generation and any(state.generation >= generation for state in ledger.heard.values())

    def _exchange(self, ledger: Ledger) -> None:
        with self._changed:
            roster = self._roster
            if roster is None or ledger.generation >= roster.generation:
                return
            members = members_of(ledger.key, roster)
            if self._name not in members:
                return
            state = ledger.freeze(roster.generation, members, self._speed())
        for name in members:
            if name != self._name:
                self._tell(name, state)
        self._deal(ledger)

    def _deal(self, ledger: Ledger) -> None:
        with self._changed:
            if ledger.deal_anew():
                self._changed.notify_all()

    def _tell_taken(self, ledger: Ledger) -> None:
        with self._changed:
            untold, ledger.untold = ledger.untold, []
            others = [name for name in ledger.members if name != self._name]
        if others:
            taken = ShardTaken(key=ledger.key, positions=b"".join(untold), alike=ledger.alike)
            for name in others:
                self._tell(name, taken)

    def _tell(self, name: str, message: ShardBody) -> None:
        data = encode(message)
        self._tickets += 1
        for offset in range(0, len(data), _PIECE):
            header = JobFrame(
                job=SHARD_JOB, incarnation=self._incarnation, kind="shard", ticket=self._tickets, offset=offset,
                total=len(data),
            )  # fmt: skip
            self._send(name, header, data[offset : offset + _PIECE])

    def _assembled(self, sender: str, header: JobFrame, payload: memoryview) -> bytes | None:
        if len(payload) == header.total:
            return bytes(payload)
        if header.total > MAX_MESSAGE_BYTES or len(self._pieces) >= _MAX_PARTS:
            self._pieces.clear()  # of messages whose rest was lost: what is missing is asked for again
            return None
        which = (sender, header.incarnation, header.ticket)
        pieces = self._pieces.setdefault(which, {})
        pieces[header.offset] = bytes(payload)
        if sum(map(len, pieces.values())) < header.total:
            return None
        del self._pieces[which]
        return b"".join(pieces[offset] for offset in sorted(pieces))


def _wanting(state: ShardState) -> ShardState:
    return ShardState(
        key=state.key, generation=state.generation, taken=state.taken, open=state.open, speed=state.speed, want=True
    )
