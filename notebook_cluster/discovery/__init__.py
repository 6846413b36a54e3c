"""Finding peers and clusters on the local network over mDNS, and saying why a peer is not found.

May import: ``security``, ``protocol``. Called by: ``agent`` (Advertiser), ``coordinator`` (Browser, ClusterAdvertiser)
and ``cli`` (Browser, ClusterBrowser).

All classes run zeroconf in a thread of their own, so they may be made and used in an asyncio process; their callbacks
come on that thread. Nothing that arrives is trusted: a record names a key, and only CURVE shows who holds it.

- :mod:`.records`: what a peer or a cluster says about itself, checked when it comes in
- :mod:`.addresses`: this machine's network interfaces, and for the doctor: does multicast work here, does a TCP port
  of another machine answer
- :mod:`.multicast`: the thread that follows the interfaces
- :mod:`.advertiser` and :mod:`.browsers`: being found, and finding
"""

from notebook_cluster.discovery.addresses import local_addresses, reachable_addresses
from notebook_cluster.discovery.advertiser import Advertiser, ClusterAdvertiser
from notebook_cluster.discovery.browsers import Browser, ClusterBrowser
from notebook_cluster.discovery.records import (
    CLUSTER_SERVICE_TYPE,
    GROUP_VARIABLE,
    IN_GROUP,
    SERVICE_TYPE,
    FoundCluster,
    FoundPeer,
)

__all__ = [
    "CLUSTER_SERVICE_TYPE",
    "GROUP_VARIABLE",
    "IN_GROUP",
    "SERVICE_TYPE",
    "Advertiser",
    "Browser",
    "ClusterAdvertiser",
    "ClusterBrowser",
    "FoundCluster",
    "FoundPeer",
    "local_addresses",
    "reachable_addresses",
]
