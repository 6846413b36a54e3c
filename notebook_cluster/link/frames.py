"""What stands in front of each message on a link: the headers, as MessagePack arrays.

On the wire: ``[header]``, and for :class:`Data` ``[header, struct, *buffers]`` or, for a piece of a large message,
``[header, bytes]``. Every header begins with (cluster, epoch, session). ``session`` holds the dialer's random number in
its upper bits and its count of connections in the lower 32, so what belongs to an older connection is recognised.
"""

import msgspec

SESSION_SHIFT = 32


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Common to all: which cluster, which start of its coordinator, which connection."""

    cluster: str
    epoch: int
    session: int


class Hello(Header, frozen=True, array_like=True, tag="hello"):
    """Dialer, first on each connection. ``protocol`` stays in this place in every version, so that a mismatch can
    be told apart from garbage."""

    protocol: int
    sender: str
    """Name of the coordinator's machine or cluster, for messages to people."""
    cluster_name: str
    received: int
    """Last incoming sequence number that is processed: the listener forgets up to here."""
    held: int
    """Last one that has arrived (the beginning of a large message counts): no need to send up to here again."""
    first: int
    """The lowest sequence number that the dialer can still send."""


class Welcome(Header, frozen=True, array_like=True, tag="welcome"):
    """Listener: the session is on. Fields as in Hello, in the other direction."""

    received: int
    held: int
    first: int
    fresh: bool
    """True: the listener knew nothing of this cluster (new, or its process was restarted)."""


class Refusal(Header, frozen=True, array_like=True, tag="refusal"):
    """Listener: no session, for this reason. ``protocol`` is the listener's."""

    protocol: int
    reason: str


class Data(Header, frozen=True, array_like=True, tag="data"):
    """One numbered message, or one piece of a large one."""

    sequence: int
    ack: int
    sizes: tuple[int, ...] = ()
    """First piece of a large message: lengths of its struct and buffers. Empty otherwise."""
    pieces_left: int = 0
    """Pieces of the same message that follow this one."""
    piece: bool = False


class Ack(Header, frozen=True, array_like=True, tag="ack"):
    """Everything up to ``ack`` is processed."""

    ack: int


class Resend(Header, frozen=True, array_like=True, tag="resend"):
    """``first`` to ``last`` did not arrive though later ones did."""

    first: int
    last: int


class Beat(Header, frozen=True, array_like=True, tag="beat"):
    """The dialer's heartbeat, and the listener's answer to it.

    ``time`` is the dialer's clock in seconds and comes back as ``echo``; ``sent`` is the last sequence number sent.
    """

    sent: int
    ack: int
    time: float = 0.0
    echo: float = 0.0


AnyHeader = Hello | Welcome | Refusal | Data | Ack | Resend | Beat
