"""What stands in front of each message on a link: the headers, as MessagePack arrays.

On the wire: ``[header]``, and for :class:`Data` ``[header, struct, *buffers]`` or, for a piece of a large message,
``[header, bytes]``. Every header begins with (cluster, epoch, session). ``session`` holds the dialer's random number in
its upper bits and its count of connections in the lower 32, so what belongs to an older connection is recognised.
Limits stand in the types: a header with a number, text or list out of bounds is never made.
"""

import logging
from collections import Counter
from typing import Annotated, Any

import msgspec

SESSION_SHIFT = 32
MAX_FRAMES = 4096
"""Frames of one message: its struct and buffers."""
MAX_TEXT = 1000

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Arrival(msgspec.Struct, frozen=True, array_like=True, tag="arrival"):
    """An agent that dials out, first on each connection: a ROUTER knows who is there only once something was said.

    ``protocol`` stays in this place in every version; an agent of another version answers Hello with its
    SessionRefusal.
    """

    protocol: Number


class FrameHeader(msgspec.Struct, frozen=True, array_like=True):
    """Common to all that follow: which cluster, which start of its coordinator, which connection."""

    cluster: Text
    epoch: Number
    session: Number


class Hello(FrameHeader, frozen=True, array_like=True, tag="hello"):
    """Dialer, first on each connection. ``protocol`` stays in this place in every version, so that a mismatch can
    be told apart from garbage."""

    protocol: Number
    sender: Text
    """Name of the coordinator's machine or cluster, for messages to people."""
    cluster_name: Text
    received: Number
    """Last incoming sequence number that is processed: the listener forgets up to here."""
    held: Number
    """Last one that has arrived (the beginning of a large message counts): no need to send up to here again."""
    first: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    """The lowest sequence number that the dialer can still send."""


class Welcome(FrameHeader, frozen=True, array_like=True, tag="welcome"):
    """Listener: the session is on. Fields as in Hello, in the other direction."""

    received: Number
    held: Number
    first: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    fresh: bool
    """True: the listener knew nothing of this cluster (new, or its process was restarted)."""


class SessionRefusal(FrameHeader, frozen=True, array_like=True, tag="refusal"):
    """Listener: no session, for this reason. ``protocol`` is the listener's. ``newer``: the epoch of the coordinator
    that it follows instead; 0: that is not why."""

    protocol: Number
    reason: Text
    newer: Number = 0


class Data(FrameHeader, frozen=True, array_like=True, tag="data"):
    """One numbered message, or one piece of a large one."""

    sequence: Number
    ack: Number
    sizes: Annotated[tuple[Number, ...], msgspec.Meta(max_length=MAX_FRAMES)] = ()
    """First piece of a large message: lengths of its struct and buffers. Empty otherwise."""
    pieces_left: Number = 0
    """Pieces of the same message that follow this one."""
    piece: bool = False


class Ack(FrameHeader, frozen=True, array_like=True, tag="ack"):
    """Everything up to ``ack`` is processed."""

    ack: Number


class Resend(FrameHeader, frozen=True, array_like=True, tag="resend"):
    """``first`` to ``last`` did not arrive though later ones did."""

    first: Number
    last: Number


class Beat(FrameHeader, frozen=True, array_like=True, tag="beat"):
    """The dialer's heartbeat, and the listener's answer to it.

    ``time`` is the dialer's clock in seconds and comes back as ``echo``; ``sent`` is the last sequence number sent.
    """

    sent: Number
    ack: Number
    time: float = 0.0
    echo: float = 0.0


AnyHeader = Hello | Welcome | SessionRefusal | Data | Ack | Resend | Beat


_log = logging.getLogger(__name__)


class Drops(Counter[str]):
    """Number of frames dropped, by cause."""

    def note(self, cause: str, text: str, *values: Any) -> None:
        """Count one more of ``cause`` and log it, but only the first, second, fourth, eighth ... of each cause."""
        self[cause] += 1
        count = self[cause]
        if count & (count - 1) == 0:
            _log.warning(text + " (%d of this kind so far)", *values, count)
