"""Sees which peers and clusters are on the local network, and explains why a peer is not seen."""

import difflib
import time
from collections.abc import Callable

from notebook_cluster.discovery import records
from notebook_cluster.discovery.record_browser import RecordBrowser
from notebook_cluster.discovery.records import FoundCluster, FoundPeer


class Browser(RecordBrowser[FoundPeer]):
    """Keeps the list of peers that advertise themselves, from ``start()`` (which returns at once) to ``close()``.

    ``on_change(peers)`` is called with a new dict instance -> FoundPeer after each change, on the browser's own thread:
    an asyncio caller hands it over with ``loop.call_soon_threadsafe``.
    """

    def __init__(self, on_change: Callable[[dict[str, FoundPeer]], None] | None = None) -> None:
        super().__init__(records.PEER, on_change)

    def peers(self) -> dict[str, FoundPeer]:
        """Instance -> peer, as of now."""
        return self.found()

    def same_name(self, name: str) -> list[FoundPeer]:
        """Every peer called ``name``: more than one when two machines chose the same, or one pretends."""
        return sorted((peer for peer in self.found().values() if peer.name == name), key=lambda peer: peer.instance)

    def why_not(self, name: str) -> str:
        """One line that explains why no peer called ``name`` is in :meth:`peers`, with the way out."""
        found = sorted({peer.name for peer in self.found().values()})
        if self.problem:
            return f"mDNS does not work on this machine ({self.problem}): add the peer by HOST:PORT"
        if name in found:
            return f"peer {name!r} is there"
        ignored = [reason for instance, reason in self.ignored().items() if instance.rpartition("-")[0] == name]
        if ignored:
            return f"peer {name!r} was heard but ignored: {ignored[0]}; upgrade or restart notebook-cluster there"
        gone = [(peer, seen) for peer, seen in self.gone() if peer.name == name]
        if gone:
            peer, seen = max(gone, key=lambda entry: entry[1])
            return (
                f"peer {name!r} left {_ago(seen)} ago (it was at {peer.hosts[0]}:{peer.port}): wake that machine, or "
                f"run 'notebook-cluster share --name {name}' on it again"
            )
        similar = difflib.get_close_matches(name, found, 1)
        if similar:
            return f"no peer is called {name!r}: did you mean {similar[0]!r}?"
        others = f"found are {', '.join(found)}" if found else "no peer at all is found"
        return (
            f"no peer called {name!r} answers{records.IN_GROUP} ({others}): run 'notebook-cluster share --name {name}' "
            "there, on the same network (guest Wi-Fi and firewalls often block mDNS, UDP port 5353), or add it by "
            "HOST:PORT"
        )


class ClusterBrowser(RecordBrowser[FoundCluster]):
    """Keeps the list of clusters that invite peers; ``on_change`` as for :class:`Browser`."""

    def __init__(self, on_change: Callable[[dict[str, FoundCluster]], None] | None = None) -> None:
        super().__init__(records.CLUSTER, on_change)

    def clusters(self) -> dict[str, FoundCluster]:
        """Instance -> cluster, as of now."""
        return self.found()


def _ago(moment: float) -> str:
    seconds = int(time.monotonic() - moment)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
