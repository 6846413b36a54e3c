"""The encrypted, resumable message channel between a coordinator and an agent.

May import: ``security``, ``protocol``. Called by: ``agent`` (Listener), ``coordinator`` (Dialer); both, and ``client``,
use :class:`Pump` for their other sockets.

A :class:`Dialer` (DEALER) connects to a :class:`Listener` (ROUTER), which has one :class:`Session` per cluster.
Messages are numbered, acknowledged once processed, and kept until then, so that a connection may break for minutes:

- :mod:`.pump`: a zmq socket on an asyncio loop
- :mod:`.frames`: headers on the wire
- :mod:`.channel`: numbering, order, large messages in pieces, the bounded outbox; pure
- :mod:`.conversation`: acknowledgements, heartbeats, asking again; the same for both sides
- :mod:`.connection`, :mod:`.dialer`: the side that connects
- :mod:`.listener`, :mod:`.session`: the side that is connected to
"""

from notebook_cluster.link.dialer import Dialer
from notebook_cluster.link.listener import Listener
from notebook_cluster.link.pump import Pump
from notebook_cluster.link.session import Session
from notebook_cluster.link.settings import Condition, LinkSettings

__all__ = ["Condition", "Dialer", "LinkSettings", "Listener", "Pump", "Session"]
