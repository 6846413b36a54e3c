"""Frames over the links, where two nodes have no way to each other: how many are on their way, and what has come.

Coordinator and agents pass them on between their own messages, so few bytes may be on the way: at most the window,
and less of it on a slow link, where a full window would make a Stop wait behind it.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from notebook_cluster.protocol.node import RelayFrame, RelayTaken
from notebook_cluster.protocol.wire import Message

MOST_BYTES = 4 << 20
"""Bytes that may be on the way from one node to another by the links."""
LEAST_BYTES = 512 * 1024
FIRST_BYTES = 1 << 20
SLOW_SECONDS = 0.5
"""A frame that takes longer to come through stands in a queue: fewer of them are put into it."""
ACKNOWLEDGE_BYTES = 256 * 1024
"""Taken before the sender is told so; what is less is told at the next tick."""

SendRelay = Callable[[Message], None]


class Credit:
    """What one way has given to the relay, and what of it was taken. ``window`` follows the time that frames take."""

    def __init__(self) -> None:
        self.window = FIRST_BYTES
        self._given = 0
        self._taken = 0
        self._on_the_way: deque[tuple[int, float]] = deque()

    @property
    def frames(self) -> int:
        """Frames on the way."""
        return len(self._on_the_way)

    @property
    def is_open(self) -> bool:
        """Whether one more frame may go."""
        return self._given - self._taken < self.window

    def give(self, size: int) -> int:
        """One more frame of ``size`` bytes goes; its position."""
        self._given += size
        self._on_the_way.append((self._given, time.monotonic()))
        return self._given

    def take(self, position: int) -> None:
        """The receiver has everything up to ``position``; one that is not ours (an earlier way's) counts as all."""
        position = min(position, self._given)
        if position <= self._taken:
            return
        gained, self._taken, delay = position - self._taken, position, 0.0
        while self._on_the_way and self._on_the_way[0][0] <= position:
            delay = time.monotonic() - self._on_the_way.popleft()[1]
        if delay > SLOW_SECONDS:
            self.window = max(LEAST_BYTES, self.window // 2)
        else:
            self.window = min(MOST_BYTES, self.window + gained)

    def forget(self) -> None:
        """What is on the way is not waited for any more: it may be gone with a coordinator that ended."""
        self._taken = self._given
        self._on_the_way.clear()


@dataclass
class _Came:
    """What came from one sender by the relay."""

    incarnation: int
    position: int = 0
    untold: int = 0


class RelayAcknowledgements:
    """The receiver's side: tells senders what was taken. ``send`` gets RelayTaken messages."""

    def __init__(self, send: SendRelay) -> None:
        self._send = send
        self._senders: dict[str, _Came] = {}

    def count(self, frame: RelayFrame) -> None:
        """``frame`` was taken, whether its content was usable or not."""
        came = self._senders.get(frame.node)
        if came is None or came.incarnation != frame.incarnation:
            came = self._senders[frame.node] = _Came(frame.incarnation)
        came.position = frame.position
        came.untold += max(1, len(frame.header) + len(frame.payload))
        if came.untold >= ACKNOWLEDGE_BYTES:
            self._tell(frame.node, came)

    def tell(self) -> None:
        """Tell every sender that has not heard of its last frames."""
        for node, came in self._senders.items():
            if came.untold:
                self._tell(node, came)

    def keep(self, incarnations: dict[str, int]) -> None:
        """Forget senders other than these (name -> incarnation)."""
        self._senders = {
            node: came for node, came in self._senders.items() if incarnations.get(node) == came.incarnation
        }

    def _tell(self, node: str, came: _Came) -> None:
        came.untold = 0
        self._send(RelayTaken(node=node, incarnation=came.incarnation, total=came.position))
