"""The pyzmq sockets node <-> node: frames from one node to another, in order, encrypted between machines.

Between nodes of one peer frames go over ipc in a 0700 folder, between peers over TCP with CURVE, where only the keys
of the roster come in. The mesh does not know what frames mean: :mod:`~notebook_cluster.collectives` and
:mod:`~notebook_cluster.training` do. Frames may be lost when a connection breaks; both of them ask again.

- :mod:`.io_thread`: the one thread that owns all sockets of a node
- :mod:`.outgoing`: the way to one other node
- :mod:`.mesh`: who is in, who may send, chunk sizes, counters

May import: ``security``, ``protocol``. Called by: ``node`` (and ``collectives`` through its own small Protocol).
"""

from notebook_cluster.mesh.io_thread import IOThread
from notebook_cluster.mesh.mesh import Mesh
from notebook_cluster.mesh.outgoing import MeshSettings

__all__ = ["IOThread", "Mesh", "MeshSettings"]
