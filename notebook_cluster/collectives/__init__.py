"""The collectives of a cell: ``nc.all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``barrier``,
``send`` and ``recv`` between the nodes that run it.

- :mod:`.values`: what may travel (arrays of numpy, torch and mlx, numbers, plain data) and how it becomes bytes
- :mod:`.reduction`: sum, mean, max and min in rank order, pure functions of arrays
- :mod:`.parcels`: one value on its way: chunks, what of it is here, what is kept until the other side has it
- :mod:`.waits`, :mod:`.inbox`: what came from the others, who is lost, what is waited for; on the I/O thread
- :mod:`.checks`: whether another node's header is what this operation expects
- :mod:`.steps`: send a phase, wait for a phase; on the main thread, as all below
- :mod:`.algorithms`, :mod:`.hierarchical`: ways to add up an array in such steps; :mod:`.choosing`: which one
- :mod:`.shared_group`, :mod:`.shared_reduce`: the same through memory that nodes of one peer share
- :mod:`.outputs`: ``out=``, memory of the caller for a result
- :mod:`.operations`: the collectives as people call them

May import: ``mesh``, ``security``, ``protocol``, ``memory``. Called by: ``node``. Importing this room imports neither
numpy nor torch.
"""

from notebook_cluster.collectives.errors import Deadlock, PeerLost
from notebook_cluster.collectives.inbox import Inbox
from notebook_cluster.collectives.operations import Collectives
from notebook_cluster.collectives.parcels import CellWorld, CollectiveSettings, Transport

__all__ = ["CellWorld", "CollectiveSettings", "Collectives", "Deadlock", "Inbox", "PeerLost", "Transport"]
