"""Pairing: how two machines that share a short code come to trust each other's CURVE keys.

On a socket of its own whose CURVE pair is public (it only encrypts); each message is one frame of at most
:data:`MAX_PAIRING_BYTES`. The *host* has the code open (an agent, or a coordinator that invites peers), the *guest*
was told the code. SPAKE2 (RFC 9382; the ``spake2`` package) with the guest as side A and the host as side B, each
side's identity being its CURVE public key, gives both the same secret only when both have the same code::

    guest -> host   Who                       who is there? (a typed HOST:PORT has no key)
    host  -> guest  Here                      name, key, port of the link
    guest -> host   Begin(key, message A)     counts as an attempt from here on
    host  -> guest  Challenge(message B)
    guest -> host   Prove(proof of the guest) wrong: Denied, the attempt stays counted
    host  -> guest  Accepted(proof of the host)

A proof is HMAC-SHA256, keyed with the SPAKE2 secret, over the side's letter and both ``Here`` and ``Begin`` as they
were sent, so that a changed key, name or port fails it. The guest proves first: whoever guesses learns one bit a try.
"""

from typing import Literal

from notebook_cluster.protocol.wire import Message

MAX_PAIRING_BYTES = 4096


class Who(Message, frozen=True):
    """Guest: first frame. ``protocol`` stays in this place in every version."""

    protocol: int


class Here(Message, frozen=True):
    """Host: what it is. A claim until Accepted was checked."""

    protocol: int
    role: Literal["peer", "cluster"]
    name: str
    """The name of the peer or the cluster."""
    owner: str
    """``user@machine``, for people."""
    key: str
    """CURVE public key of its link, Z85."""
    port: int
    """TCP port of its link: an agent's listener, or a coordinator's reception for peers that dial."""
    device: str = ""


class Begin(Message, frozen=True):
    """Guest: what it is, and its SPAKE2 message (33 bytes)."""

    role: Literal["peer", "cluster"]
    name: str
    owner: str
    key: str
    message: bytes


class Challenge(Message, frozen=True):
    """Host: its SPAKE2 message (33 bytes). ``attempt`` (16 random bytes) names this try."""

    attempt: bytes
    message: bytes


class Prove(Message, frozen=True):
    attempt: bytes
    proof: bytes
    """32 bytes."""


class Accepted(Message, frozen=True):
    """Host: it has pinned the guest's key."""

    attempt: bytes
    proof: bytes
    """32 bytes."""


class Denied(Message, frozen=True):
    """Host: not paired. ``reason`` is one line with the way out."""

    reason: str
    tries_left: int | None = None
    """Wrong codes that are left before the code is dead; None when the code was not the trouble."""
    retry_after: float | None = None
    """Seconds after which another Begin makes sense; None when the same one would be denied again."""


FromGuest = Who | Begin | Prove
FromHost = Here | Challenge | Accepted | Denied
