"""Finding peers on the local network over mDNS, and saying why one is not found.

May import: ``security``, ``protocol``. Called by: ``agent`` (Advertiser), ``coordinator`` and ``cli`` (Browser).

Both classes run zeroconf in a thread of their own, so they may be made and used in an asyncio process; their callbacks
come on that thread. Nothing that arrives is trusted: a record names a key, and only CURVE shows who holds it.

- :mod:`.records`: what a peer says about itself, checked when it comes in
- :mod:`.multicast`: the thread, and following the machine's network interfaces
- :mod:`.advertiser`, :mod:`.browser`
"""

from notebook_cluster.discovery.advertiser import Advertiser
from notebook_cluster.discovery.browser import Browser
from notebook_cluster.discovery.multicast import local_addresses
from notebook_cluster.discovery.records import SERVICE_TYPE, FoundPeer

__all__ = ["SERVICE_TYPE", "Advertiser", "Browser", "FoundPeer", "local_addresses"]
