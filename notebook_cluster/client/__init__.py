"""The Python API of a view: start, attach to and steer a cluster.

May import: coordinator (to know how it is started), discovery, security, protocol. Called by: magics, widgets, server,
cli, and by people: ``Cluster`` blocks, ``AsyncCluster`` is the same with ``await``.
"""

from notebook_cluster.client.asynchronous import AsyncCluster
from notebook_cluster.client.cluster import Cluster, how_to_join
from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.peers import find_peers
from notebook_cluster.client.start import list_clusters
from notebook_cluster.client.stream import CellStream

__all__ = ["AsyncCluster", "CellStream", "Cluster", "ClusterError", "find_peers", "how_to_join", "list_clusters"]
