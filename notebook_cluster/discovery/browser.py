"""Sees which peers are on the local network, and explains why one is not seen."""

import difflib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from notebook_cluster.discovery import records
from notebook_cluster.discovery.multicast import MulticastThread
from notebook_cluster.discovery.records import SERVICE_TYPE, FoundPeer

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

_RESOLVE_MILLISECONDS = 2000
_MAX_RECORDS = 500
"""More peers than this on one network are somebody's mistake or attack."""
_log = logging.getLogger(__name__)


class Browser:
    """Keeps the list of peers that advertise themselves, from ``start()`` (which returns at once) to ``close()``.

    ``on_change(peers)`` is called with a new dict instance -> FoundPeer after each change, on the browser's own thread:
    an asyncio caller hands it over with ``loop.call_soon_threadsafe``.
    """

    def __init__(self, on_change: Callable[[dict[str, FoundPeer]], None] | None = None) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._peers: dict[str, FoundPeer] = {}
        self._gone: dict[str, tuple[FoundPeer, float]] = {}
        self._ignored: dict[str, str] = {}
        self._browser: Any = None
        self._thread = MulticastThread("mdns-browser", opened=self._browse, looked=self._refresh, closing=self._cancel)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop looking; may be called again."""
        self._thread.close()

    def peers(self) -> dict[str, FoundPeer]:
        """Instance -> peer, as of now."""
        with self._lock:
            return dict(self._peers)

    def why_not(self, name: str) -> str:
        """One line that explains why no peer called ``name`` is in :meth:`peers`, with the way out."""
        with self._lock:
            found = sorted({peer.name for peer in self._peers.values()})
            gone = [(peer, seen) for peer, seen in self._gone.values() if peer.name == name]
            ignored = [reason for instance, reason in self._ignored.items() if instance.rpartition("-")[0] == name]
        if self._thread.problem:
            return f"mDNS does not work on this machine ({self._thread.problem}): add the peer by HOST:PORT"
        if name in found:
            return f"peer {name!r} is there"
        if ignored:
            return f"peer {name!r} was heard but ignored: {ignored[0]}; upgrade or restart notebook-cluster there"
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
            f"no peer called {name!r} answers ({others}): run 'notebook-cluster share --name {name}' there, on the "
            "same network (guest Wi-Fi and firewalls often block mDNS, UDP port 5353), or add it by HOST:PORT"
        )

    # ---- on the thread ---------------------------------------------------------------------------------------

    def _browse(self, zeroconf: "Zeroconf") -> None:
        from zeroconf import ServiceBrowser

        self._browser = ServiceBrowser(zeroconf, SERVICE_TYPE, handlers=[self._heard])

    def _cancel(self, zeroconf: "Zeroconf") -> None:
        if self._browser is not None:
            self._browser.cancel()

    def _heard(self, zeroconf: "Zeroconf", service_type: str, name: str, state_change: Any) -> None:
        """zeroconf's callback, on its thread, which must not wait: the work is done on ours."""
        from zeroconf import ServiceStateChange

        if state_change is ServiceStateChange.Removed:
            self._thread.post(lambda _: self._remove(_instance(name)))
        else:
            self._thread.post(lambda zeroconf: self._resolve(zeroconf, name))

    def _resolve(self, zeroconf: "Zeroconf", name: str) -> None:
        from zeroconf import ServiceInfo

        instance = _instance(name)
        info = ServiceInfo(SERVICE_TYPE, name)
        if not info.request(zeroconf, _RESOLVE_MILLISECONDS):
            self._ignore(instance, "it did not say its address")
        else:
            self._check(info)

    def _check(self, info: "ServiceInfo") -> None:
        """Take the peer that ``info`` describes, or note why not."""
        from zeroconf import IPVersion

        instance = _instance(info.name)
        try:
            hosts = info.parsed_addresses(IPVersion.V4Only)
            peer = records.parse(instance, info.properties, hosts, info.port, len(info.text or b""))
        except ValueError as error:
            self._ignore(instance, str(error))
            return
        self._add(peer)

    def _refresh(self, zeroconf: "Zeroconf") -> None:
        """Addresses that a peer gave up expire in zeroconf's cache without a callback."""
        from zeroconf import ServiceInfo

        for instance in self.peers():
            info = ServiceInfo(SERVICE_TYPE, f"{instance}.{SERVICE_TYPE}")
            if info.load_from_cache(zeroconf):
                self._check(info)

    def _add(self, peer: FoundPeer) -> None:
        with self._lock:
            if self._peers.get(peer.instance) == peer:
                return
            if peer.instance not in self._peers and len(self._peers) >= _MAX_RECORDS:
                _log.warning("ignored peer %s: %d are known already", peer.instance, _MAX_RECORDS)
                return
            self._peers[peer.instance] = peer
            self._gone.pop(peer.instance, None)
            self._ignored.pop(peer.instance, None)
        _log.info("found peer %s at %s:%d", peer.instance, peer.hosts[0], peer.port)
        self._tell()

    def _remove(self, instance: str) -> None:
        with self._lock:
            peer = self._peers.pop(instance, None)
            self._ignored.pop(instance, None)
            if peer is None:
                return
            if len(self._gone) >= _MAX_RECORDS:
                self._gone.pop(next(iter(self._gone)))
            self._gone[instance] = (peer, time.monotonic())
        _log.info("peer %s left", instance)
        self._tell()

    def _ignore(self, instance: str, reason: str) -> None:
        with self._lock:
            known = self._ignored.get(instance) == reason or len(self._ignored) >= _MAX_RECORDS
            if not known:
                self._ignored[instance] = reason
            changed = self._peers.pop(instance, None) is not None
        if not known:
            _log.warning("ignored mDNS record %.80r: %s", instance, reason)
        if changed:
            self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self.peers())


def _instance(name: str) -> str:
    return name.removesuffix(f".{SERVICE_TYPE}")


def _ago(moment: float) -> str:
    seconds = int(time.monotonic() - moment)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
