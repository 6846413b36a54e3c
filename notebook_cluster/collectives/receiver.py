"""What came from the other nodes in this cell, who is lost, and what the main thread waits for.

Everything here runs on the I/O thread; the main thread hands in a :class:`~.expectations.Wait` and sleeps on its queue.
So there is no lock that a KeyboardInterrupt could leave taken.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from notebook_cluster.collectives.chunked_messages import (
    ACKNOWLEDGE,
    WANT,
    CellWorld,
    Channel,
    ChunkedMessage,
    CollectiveSettings,
    Landing,
    Payload,
    Transport,
    channel_of,
    is_usable,
    may_be_kept,
    place_for,
)
from notebook_cluster.collectives.expectations import REFUSED, PeerLost, Refusals, Wait
from notebook_cluster.collectives.sent_messages import SentMessages
from notebook_cluster.protocol.mesh import CellFrame
from notebook_cluster.protocol.node import CellDone

_Key = tuple[str, Channel, int, int]
_FRAME_COST = 1024
"""Bytes that a held frame may take beside its payload."""
_MOST_MESSAGES = 100_000
"""Values on their way or not asked for yet; more are dropped, and asked for again when they are waited for."""


class CellReceiver:
    """One node's side of the collectives of one cell after the other.

    Attributes:
        dropped: frames that were old, unusable or over a limit.
        places: (sender, operation, phase) -> where the bytes of that message go; put there by the main thread before it
            sends anything of the operation. Elsewhere, or of another size, messages get memory of their own.
        on_waiting: called with what the main thread waits for (``all_reduce #3 for desk``), or ``""``, when that has
            taken longer than half a second.
        on_lost: called with ``desk raised ValueError: ...`` when a node leaves a hole in the running cell.
    """

    def __init__(self, transport: Transport, settings: CollectiveSettings) -> None:
        self.dropped = 0
        self.on_waiting: Callable[[str], None] = lambda text: None
        self.on_lost: Callable[[str], None] = lambda text: None
        self.places: dict[tuple[str, int, int], Landing] = {}
        self.sent = SentMessages(transport)
        self._transport = transport
        self._settings = settings
        self._world: CellWorld | None = None
        self._wait: Wait | None = None
        self._said = ""
        self._early: deque[tuple[str, CellFrame, bytes]] = deque()
        self._early_bytes = 0
        self._early_done: deque[CellDone] = deque(maxlen=1000)
        self._senders_waiting: deque[tuple[str, int, SimpleQueue[None]]] = deque()
        self._silent: dict[str, tuple[int, str]] = {}
        """Node -> (incarnation, reason): it makes no progress for now."""
        self._reset()

    def _reset(self) -> None:
        self._messages: dict[_Key, ChunkedMessage] = {}
        self._message_bytes = 0
        self._consumed: dict[tuple[str, Channel], tuple[int, int]] = {}
        self._floor = 0
        self._refusals = Refusals()
        self._holes: dict[str, str] = {}
        self._finished: dict[str, float] = {}
        self._progress: dict[str, float] = {}
        self._asked: dict[str, float] = {}
        self._senders_waiting.clear()
        self.sent.clear()

    # ---- the cell

    def begin(self, world: CellWorld) -> None:
        """A cell starts: forget the one before, take in what came early."""
        self._world, self._wait = world, None
        self._reset()
        early, self._early, self._early_bytes = self._early, deque(), 0
        for sender, header, payload in early:
            if header.cell > world.cell:
                self._hold(sender, header, payload)
            else:
                self.on_frame(sender, header, memoryview(payload))
        done = list(self._early_done)
        self._early_done.clear()
        for message in done:
            self.on_cell_done(message)

    def on_cell_done(self, message: CellDone) -> None:
        """``message.node`` has left its cell and will answer no further collective of it."""
        if self._world is None or message.cell > self._world.cell:
            self._early_done.append(message)  # it failed before this node began
            return
        if message.cell != self._world.cell or message.node == self._transport.name:
            return
        reasons = {"error": "raised an error", "interrupted": "was interrupted", "lost": "was lost"}
        if message.status == "ok":
            self._finished.setdefault(message.node, time.monotonic())
        else:
            self.lose(message.node, message.reason or reasons[message.status])

    def lose(self, node: str, reason: str) -> None:
        """``node`` leaves a hole in the running cell: whoever needs it gets PeerLost(``node reason``)."""
        if self._world is None or node not in self._world.nodes or node == self._transport.name:
            return
        if node not in self._holes:
            self._holes[node] = reason
            self.on_lost(f"{node} {reason}")
        self._judge()
        self._let_senders_go()

    def silent(self, node: str, incarnation: int, reason: str) -> None:
        """``node`` makes no progress: whoever misses something of it gets PeerLost(``node reason``), and the cell goes
        on with it when it does again (``reason`` empty)."""
        if not reason:
            self._silent.pop(node, None)
        elif node != self._transport.name:
            self._silent[node] = (incarnation, reason)
            self._judge()
            self._let_senders_go()

    def keep_silent(self, incarnations: dict[str, int]) -> None:
        """Forget which nodes make no progress, but for these with these incarnations."""
        self._silent = {name: row for name, row in self._silent.items() if incarnations.get(name) == row[0]}

    def hole(self, node: str) -> PeerLost | None:
        """The error for an operation that needs ``node``, if it is lost or makes no progress."""
        reason = self._holes.get(node) or self._silent.get(node, (0, None))[1]
        return PeerLost(f"{node} {reason}") if reason is not None else None

    # ---- frames

    def on_frame(self, sender: str, header: CellFrame, payload: memoryview) -> None:
        """A frame of another node; the memory of ``payload`` may be kept."""
        world = self._world
        if not is_usable(header):
            self.dropped += 1
        elif world is None or header.cell > world.cell:
            self._hold(sender, header, bytes(payload))
        elif (header.cell, header.generation) != (world.cell, world.generation) or sender not in world.nodes:
            self.dropped += 1
        elif header.name == WANT:
            if self._wait is not None and header.dtype not in ("", self._wait.name):  # where it waits itself
                self._refuse_now(sender, CellFrame(header.cell, header.generation, header.operation, header.dtype))
            self.sent.send_again(sender, header)
        elif header.name == ACKNOWLEDGE:
            self.sent.forget(sender, "message", header.operation + 1)
            self._let_senders_go()
        else:
            self._progress[sender] = time.monotonic()
            if header.kind.startswith(REFUSED):
                self._refusals.note(sender, header, payload)
                self._judge()
            else:
                self._take(sender, header, payload)

    def _hold(self, sender: str, header: CellFrame, payload: bytes) -> None:
        size = len(payload) + _FRAME_COST
        if self._early_bytes + size > self._settings.held_bytes:
            self.dropped += 1  # asked for again when the cell is there
            return
        self._early.append((sender, header, payload))
        self._early_bytes += size

    def _take(self, sender: str, header: CellFrame, payload: memoryview) -> None:
        channel = channel_of(header)
        if channel == "collective":
            self.sent.forget(sender, channel, header.operation)
        key = (sender, channel, header.operation, header.phase)
        old = self._consumed.get((sender, channel), (0, 0)) >= (header.operation, header.phase)
        if old or (channel == "collective" and header.operation < self._floor):
            if channel == "message":
                self._acknowledge(sender)
            return
        message = self._messages.get(key)
        if message is None:
            if self._refuse_now(sender, header):
                return
            room = self._settings.limit - self._message_bytes
            if not may_be_kept(header, room) or len(self._messages) >= _MOST_MESSAGES:
                self.dropped += 1
                return
            place = self.places.pop((sender, header.operation, header.phase), None) if channel == "collective" else None
            if place is None or len(place.data) != header.total:
                place = place_for(header, payload)
            message = self._messages[key] = ChunkedMessage(sender, header, place.data, place.may_stay)
            self._message_bytes += header.total
        if not message.add(header, payload):
            self.dropped += 1
        elif message.complete:
            if channel == "message":
                self._acknowledge(sender)
            self._judge()

    def _refuse_now(self, sender: str, header: CellFrame) -> bool:
        """Fail the wait, before anything is allocated, when this message is not what it is for."""
        wait = self._wait
        if wait is None or not wait.concerns(sender, header):
            return False
        error = wait.check(sender, header)
        if error is None:
            return False
        self._settle(wait, ValueError(error))
        return True

    # ---- messages

    def _acknowledge(self, sender: str) -> None:
        """Tell ``sender`` up to which message we have all, unless too much lies here unread."""
        assert self._world is not None
        last = self._consumed.get((sender, "message"), (0, 0))[0]
        unread = 0
        while (message := self._messages.get((sender, "message", last + 1, 0))) is not None and message.complete:
            unread += len(message.data)
            if unread > self._settings.unread_bytes:
                break
            last += 1
        if last:
            header = CellFrame(
                cell=self._world.cell, generation=self._world.generation, operation=last, name=ACKNOWLEDGE
            )
            self._transport.send(sender, header)

    def post_message(self, node: str, header: CellFrame, data: Payload, gone: "SimpleQueue[None]") -> None:
        """Send a message; ``gone`` gets None when the next one may follow."""
        self.sent.post(node, header, data)
        self._senders_waiting.append((node, len(data), gone))
        self._let_senders_go()

    def _let_senders_go(self) -> None:
        waiting = list(self._senders_waiting)
        self._senders_waiting.clear()
        for node, size, gone in waiting:
            on_the_way = self.sent.unacknowledged(node)
            if on_the_way <= max(self._settings.unacknowledged_bytes, size) or self.hole(node) is not None:
                gone.put(None)
            else:
                self._senders_waiting.append((node, size, gone))

    # ---- waiting

    def expect(self, wait: Wait) -> None:
        """The main thread waits now. An earlier wait that it gave up (Stop button) is forgotten."""
        self._wait = wait
        if wait.channel == "collective":
            self._floor = max(self._floor, wait.operation)
            self._refusals.forget_before(wait.operation)
            self._drop_messages(key for key in self._messages if key[1] == "collective" and key[2] < wait.operation)
        for message in list(self._messages.values()):
            if self._wait is wait:
                self._refuse_now(message.sender, message.header)
        self._judge()
        if wait.ask and self._wait is wait:
            for node in self._missing(wait):
                self._ask(wait, node, time.monotonic())

    def blocked(self) -> tuple[Wait, list[str]] | None:
        """The collective that the main thread waits in, and the nodes of which something is missing."""
        wait = self._wait
        return (wait, self._missing(wait)) if wait is not None and wait.channel == "collective" else None

    def fail(self, operation: int, error: Exception) -> None:
        """Raise ``error`` where the main thread waits in the collective ``operation``, if it still does."""
        if self._wait is not None and self._wait.channel == "collective" and self._wait.operation == operation:
            self._settle(self._wait, error)

    def drop_operation(self, operation: int) -> None:
        """The main thread has left the collective ``operation``: what has come or still comes for it goes nowhere."""
        self.places.clear()
        self._floor = max(self._floor, operation + 1)
        self._drop_messages(key for key in self._messages if key[1] == "collective" and key[2] <= operation)

    def _judge(self) -> None:
        """Settle the wait when everything is here, or when it can never be."""
        wait = self._wait
        if wait is None:
            return
        missing = self._missing(wait)
        if not missing:
            found = {sender: self._messages[self._key(wait, sender)] for sender in wait.senders}
            self._drop_messages(self._key(wait, sender) for sender in wait.senders)
            for sender in wait.senders:
                self._consumed[sender, wait.channel] = (wait.operation, wait.phase)
                if wait.channel == "message":
                    self._acknowledge(sender)
            self._settle(wait, found)
            return
        if wait.channel == "collective" and (refused := self._refusals.error(wait.operation)) is not None:
            self._settle(wait, refused)
            return
        needed = missing if wait.channel == "message" else list(self._world.nodes if self._world else ())
        for node in needed:
            if (error := self.hole(node)) is not None:
                if node in self._silent:  # it has missed this one: it is out of step for the rest of the cell
                    self._holes.setdefault(node, self._silent[node][1])
                self._settle(wait, error)
                return

    def _settle(self, wait: Wait, outcome: "dict[str, ChunkedMessage] | Exception") -> None:
        self._wait = None
        self._asked.clear()
        self._say("")
        wait.outcome.put(outcome)

    def tick(self, now: float) -> None:
        """About ten times a second: ask again for what does not come, give up on who has finished."""
        wait, world = self._wait, self._world
        if wait is None or world is None:
            return
        missing = self._missing(wait)
        for node in missing:
            quiet_since = max(wait.started, self._progress.get(node, 0.0))
            finished = self._finished.get(node)
            if finished is not None and now - max(quiet_since, finished) > self._settings.give_up_after:
                self._settle(wait, PeerLost(f"{node} finished the cell without this {wait.label}"))
                return
            if now - max(quiet_since, self._asked.get(node, 0.0)) > self._settings.want_after:
                self._ask(wait, node, now)
        if missing and now - wait.started > self._settings.want_after:
            self._say(f"{wait.label} #{wait.operation} for {', '.join(missing)}")

    def _ask(self, wait: Wait, node: str, now: float) -> None:
        assert self._world is not None
        self._asked[node] = now
        message = self._messages.get(self._key(wait, node))
        header = CellFrame(
            self._world.cell, self._world.generation, wait.operation, WANT, phase=wait.phase, kind=wait.channel,
            dtype=wait.name, offset=message.first_missing() if message is not None else 0,
        )  # fmt: skip
        self._transport.send(node, header)

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self.on_waiting(text)

    @staticmethod
    def _key(wait: Wait, sender: str) -> _Key:
        return (sender, wait.channel, wait.operation, wait.phase)

    def _missing(self, wait: Wait) -> list[str]:
        messages = ((sender, self._messages.get(self._key(wait, sender))) for sender in wait.senders)
        return [sender for sender, message in messages if message is None or not message.complete]

    def _drop_messages(self, keys: Iterable[_Key]) -> None:
        for key in list(keys):
            message = self._messages.pop(key, None)
            if message is not None:
                self._message_bytes -= len(message.data)
