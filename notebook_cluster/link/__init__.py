"""The encrypted, resumable message channel between a coordinator and an agent.

May import: ``sockets``, ``security``, ``protocol``. Called by: ``agent`` (Listener), ``coordinator`` (Dialer,
InboundListener) and ``pairing``.

A :class:`Dialer` (DEALER) connects to a :class:`Listener` (ROUTER), which has one :class:`Session` per cluster. Where
nobody can connect to the agent, its Listener connects (:class:`DialOut`) to an :class:`InboundListener` of the
coordinator, and the Dialer talks over that connection; everything else stays the same.
Messages are numbered, acknowledged once processed, and kept until then, so that a connection may break for minutes:

- :mod:`.frames`: headers on the wire, and the count of what is dropped
- :mod:`.channel`: numbering, order, large messages in pieces, the bounded outbox; pure
- :mod:`.conversation`: acknowledgements, heartbeats, asking again; the same for both sides
- :mod:`.connection`, :mod:`.dialer`: the side that connects
- :mod:`.listener`, :mod:`.session`: the side that is connected to
- :mod:`.tcp`: the connections below
- :mod:`.authenticated_router`: a ROUTER that only lets known keys in
- :mod:`.inbound_listener`, :mod:`.dial_out`: the same link over a connection that the agent makes
"""

from notebook_cluster.link.channel import Condition, LinkSettings
from notebook_cluster.link.dial_out import DialOut
from notebook_cluster.link.dialer import Dialer
from notebook_cluster.link.frames import Drops
from notebook_cluster.link.inbound_listener import Enlisting, InboundListener
from notebook_cluster.link.listener import Listener
from notebook_cluster.link.session import Session

__all__ = [
    "Condition",
    "DialOut",
    "Dialer",
    "Drops",
    "Enlisting",
    "InboundListener",
    "LinkSettings",
    "Listener",
    "Session",
]
