"""The collectives of a cell: ``nc.all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``barrier``,
``send`` and ``recv`` between the nodes that run it.

- :mod:`.values`: what may travel (arrays of numpy, torch and mlx, numbers, plain data) and how it becomes bytes
- :mod:`.reduction`: sum, mean, max and min in rank order, a pure function of arrays
- :mod:`.parcels`: one value on its way: chunks, what of it is here, what is kept until the other side has it
- :mod:`.inbox`: what came from the others in this cell, and who is lost; lives on the I/O thread
- :mod:`.checks`: whether another node's header is what this operation expects
- :mod:`.operations`: the collectives as people call them, on the main thread

May import: ``mesh``, ``security``, ``protocol``. Called by: ``node``. Importing this room imports neither
numpy nor torch.
"""

from notebook_cluster.collectives.errors import PeerLost
from notebook_cluster.collectives.inbox import Inbox
from notebook_cluster.collectives.operations import Collectives
from notebook_cluster.collectives.parcels import CellWorld, CollectiveSettings, Transport

__all__ = ["CellWorld", "CollectiveSettings", "Collectives", "Inbox", "PeerLost", "Transport"]
