"""The pyzmq sockets node <-> node: frames from one node to another, in order, encrypted between machines.

Between nodes of one peer frames go over ipc in a 0700 folder, between peers over TCP with CURVE, where only the keys
of the roster come in. The mesh does not know what frames mean: :mod:`~notebook_cluster.collectives` and
:mod:`~notebook_cluster.training` do. Frames may be lost when a connection breaks; both of them ask again.

- :mod:`.listening`: the sockets on which a node hears the others
- :mod:`.connection`: the socket to one other node, and what the system holds of it over ipc
- :mod:`.outgoing`: the way to one other node, directly or over the links
- :mod:`.relay`: how much may be on its way over the links
- :mod:`.shared_memory`: files that nodes of a peer map
- :mod:`.lending`: what these read of each other in place of having it sent
- :mod:`.measuring`: how fast the way to another node is
- :mod:`.mesh`: who is in, who may send, chunk sizes, counters

May import: ``sockets``, ``security``, ``protocol``. Called by: ``node`` (and ``collectives`` through its own small
Protocol).
"""

from notebook_cluster.mesh.connection import MeshSettings
from notebook_cluster.mesh.lending import Lending
from notebook_cluster.mesh.mesh import Mesh

__all__ = ["Lending", "Mesh", "MeshSettings"]
