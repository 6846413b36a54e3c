"""The Python API of a view: start, attach to and steer a cluster.

May import: coordinator (to know how it is started), discovery, security, protocol. Called by: magics, widgets, server,
cli, and by people: ``Cluster`` blocks, ``AsyncCluster`` is the same with ``await``.
"""

from notebook_cluster.client.asynchronous import AsyncCluster
from notebook_cluster.client.cluster import CellStream, Cluster
from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.start import find_peers, list_clusters

__all__ = ["AsyncCluster", "CellStream", "Cluster", "ClusterError", "find_peers", "list_clusters"]
