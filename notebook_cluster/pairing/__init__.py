"""Two machines get to trust each other with a short code: SPAKE2 over a socket of its own, before any link.

May import: ``link`` (Connection, Drops), ``sockets``, ``security``, ``protocol``. Called by: ``agent``,
``coordinator``, ``peering`` and ``cli``.

- :mod:`.guest`: the side that connects: :func:`pair` with a code, :func:`ask` who is there
- :mod:`.host`: the side that shows the code; :mod:`.port`: its socket, and who is connected to it for how long
"""

from notebook_cluster.pairing.guest import PairingError, ask, first_that_answers, pair
from notebook_cluster.pairing.host import PairingHost, Partner

__all__ = ["PairingError", "PairingHost", "Partner", "ask", "first_that_answers", "pair"]
