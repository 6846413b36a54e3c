"""Two machines get to trust each other with a short code: SPAKE2 over a socket of its own, before any link.

May import: ``link`` (Connection, Drops), ``sockets``, ``security``, ``protocol``. Called by: ``agent``,
``coordinator``, ``peering`` and ``cli``.

- :mod:`.guest`: the side that connects: :func:`pair` with a code, :func:`ask` who is there
- :mod:`.enlisting`: without a code, with the key of a launch
- :mod:`.host`: the side that shows the code; :mod:`.port`: its socket, and who is connected to it for how long
"""

from notebook_cluster.pairing.enlisting import NobodyThere, enlist
from notebook_cluster.pairing.guest import PairingError, ask, first_that_answers, pair
from notebook_cluster.pairing.host import PairingHost, Partner

__all__ = ["NobodyThere", "PairingError", "PairingHost", "Partner", "ask", "enlist", "first_that_answers", "pair"]
