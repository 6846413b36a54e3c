"""What a node has sent: cut into chunks, and kept until the other side has it."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from notebook_cluster.collectives.chunked_messages import Channel, Payload, Transport, channel_of
from notebook_cluster.protocol.mesh import CellFrame

_MOST_QUESTIONS = 1000
_MOST_REACHED = 64
"""Operations in shared memory of which a node that is behind may ask: broadcasts lie between, which one leaves without
the others."""
NOTHING_ELSE = 1 << 25
"""The phase of a message that answers for every phase of its operation, of which nothing else is sent."""


@dataclass
class _Sent:
    header: CellFrame
    data: Payload


class SentMessages:
    """What this node has sent in this cell and may have to send again. Used on the I/O thread only.

    A message of a collective is forgotten when its receiver shows a later operation (nobody can be in operation n + 1
    without all of n), one of ``send`` when its receiver acknowledges it.

    Attributes:
        holding: messages of collectives are kept that :meth:`forget_before` could let go.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.holding = False
        self._sent: dict[tuple[str, Channel], dict[tuple[int, int], _Sent]] = {}
        self._reached: dict[int, CellFrame] = {}
        self._asked: set[tuple[str, int, int]] = set()

    def clear(self) -> None:
        self._sent.clear()
        self._reached.clear()
        self._asked.clear()

    def reach(self, header: CellFrame) -> None:
        """This node has come to the phase of ``header``; who asks for it gets the header, everybody else sees it in
        shared memory. Called on the main thread, which alone writes here."""
        self._reached[header.operation] = header
        if len(self._reached) > _MOST_REACHED:
            del self._reached[next(iter(self._reached))]
        if self._asked:
            self._transport.call_soon(self._answer_all)

    def _answer_all(self) -> None:
        for question in list(self._asked):
            self._answer(*question)

    def _answer(self, node: str, operation: int, phase: int) -> None:
        """Answer a question that was noted; it stays noted while this node has not come that far."""
        reached = self._reached.get(operation)
        if (operation, phase) in self._sent.get((node, "collective"), {}):
            self._asked.discard((node, operation, phase))  # it was sent since then
        elif reached is not None and reached.phase >= phase:
            self._asked.discard((node, operation, phase))
            self._transport.send(node, msgspec.structs.replace(reached, phase=phase))
        elif operation < max(self._reached, default=0) - 1:
            self._asked.discard((node, operation, phase))

    def post(self, node: str, header: CellFrame, data: Payload) -> None:
        """Send ``data`` to ``node`` in chunks; ``data`` must not change any more."""
        header = msgspec.structs.replace(header, total=len(data))
        key = (header.operation, header.phase)
        self._sent.setdefault((node, channel_of(header)), {})[key] = _Sent(header, data)
        self.holding = True
        self._transmit(node, header, data, 0)

    def send_again(self, node: str, want: CellFrame) -> None:
        """Answer a WANT, unless what it asks for waits in line anyway or is not there yet."""
        channel: Channel = "message" if want.kind == "message" else "collective"
        kept = self._sent.get((node, channel), {})
        sent = kept.get((want.operation, want.phase)) or kept.get((want.operation, NOTHING_ELSE))
        if sent is not None and not self._transport.waiting(node):
            self._transmit(node, sent.header, sent.data, want.offset)
        elif sent is None and channel == "collective":
            if len(self._asked) >= _MOST_QUESTIONS:
                self._asked.clear()  # whoever still waits asks again
            # Noted first and looked at then: the main thread does it the other way round, so one of the two sees it.
            self._asked.add((node, want.operation, want.phase))
            self._answer(node, want.operation, want.phase)

    def forget(self, node: str, channel: Channel, before: int) -> None:
        """``node`` has every message of operations below ``before``."""
        sent = self._sent.get((node, channel), {})
        for key in [key for key in sent if key[0] < before]:
            del sent[key]

    def forget_parts(self, operation: int, before: int | None = None) -> None:
        """Nobody gets any more of the collective ``operation`` from here, or of its phases below ``before``."""
        for (_, channel), sent in self._sent.items():
            for key in [key for key in sent if channel == "collective" and key[0] == operation]:
                if before is None or key[1] < before:
                    del sent[key]

    def forget_before(self, nodes: Sequence[str], operation: int) -> None:
        """All of ``nodes`` are in ``operation``, as shared memory says."""
        self.holding = False
        for node in nodes:
            self.forget(node, "collective", operation)

    def unacknowledged(self, node: str) -> int:
        """Bytes of messages to ``node`` that it has not acknowledged."""
        return sum(len(sent.data) for sent in self._sent.get((node, "message"), {}).values())

    def _transmit(self, node: str, header: CellFrame, data: Payload, start: int) -> None:
        chunk = self._transport.chunk_bytes(node)
        if not len(data):
            self._transport.send(node, header)
            return
        view = memoryview(data)
        start = max(0, start) // chunk * chunk
        for offset in range(start, len(data), chunk):
            piece = msgspec.structs.replace(header, offset=offset)
            self._transport.send(node, piece, view[offset : offset + chunk])
