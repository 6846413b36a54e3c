"""The collectives of a cell: ``nc.all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, ``barrier``,
``send`` and ``recv`` between the nodes that run it.

- :mod:`.values`: what may travel (arrays of numpy, torch and mlx, numbers, plain data) how it becomes
  bytes, and memory of the caller for a result (``out=``)
- :mod:`.reduction`: sum, mean, max and min in rank order, pure functions of arrays
- :mod:`.chunked_messages`: one value on its way: its chunks, and what of it is here
- :mod:`.sent_messages`: what was sent, kept until the other side has it; on the I/O thread
- :mod:`.receiver`: what came from the others, who is lost, what is waited for; on the I/O thread
- :mod:`.expectations`: a wait of the main thread, and whether another node's header is what it expects
- :mod:`.steps`: send a phase, wait for a phase; on the main thread, as all below
- :mod:`.algorithms`, :mod:`.hierarchical`: ways to add up an array in such steps, and which one is taken
- :mod:`.shared_group`, :mod:`.shared_reduce`: the same through memory that nodes of one peer share
- :mod:`.operations`: the collectives as people call them

May import: ``mesh``, ``security``, ``protocol``, ``memory``. Called by: ``node``. Importing this room imports neither
numpy nor torch.
"""

from notebook_cluster.collectives.chunked_messages import CellWorld, CollectiveSettings, Transport
from notebook_cluster.collectives.expectations import Deadlock, PeerLost
from notebook_cluster.collectives.operations import Collectives
from notebook_cluster.collectives.receiver import CellReceiver

__all__ = ["CellReceiver", "CellWorld", "CollectiveSettings", "Collectives", "Deadlock", "PeerLost", "Transport"]
