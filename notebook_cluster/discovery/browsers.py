"""Which peers and clusters are on the local network, and why a peer is not seen."""

import asyncio
import concurrent.futures
import difflib
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic

from notebook_cluster.discovery import records
from notebook_cluster.discovery.multicast import OLD_RECORDS_STAY, MulticastThread
from notebook_cluster.discovery.records import FoundCluster, FoundPeer, Record, RecordKind
from notebook_cluster.security.codes import is_a_new_code

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf


_RESOLVE_MILLISECONDS = 2000
_MAX_RECORDS = 500
"""More records than this on one network are somebody's mistake or attack."""
_MAX_RESOLVING = 50
_MAX_TRIES = 10
"""How often somebody who does not answer is asked; who is heard anew later is asked anew."""
_INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*-[0-9a-f]{4}")
_TXT, _IN = 16, 1
"""RFC 1035: a TXT record of the Internet class."""
_SILENT = "it did not say its address"
_log = logging.getLogger(__name__)


class RecordBrowser(Generic[Record]):
    """Listens from ``start()``, which returns at once, to ``close()``.

    ``on_change(found)`` is called with a new dict instance -> record after each change, on the browser's own thread.
    """

    def __init__(self, kind: RecordKind[Record], on_change: Callable[[dict[str, Record]], None] | None) -> None:
        self._kind = kind
        self._on_change = on_change
        self._lock = threading.Lock()
        self._found: dict[str, Record] = {}
        self._gone: dict[str, tuple[Record, float]] = {}
        self._ignored: dict[str, str] = {}
        self._resolving: set[str] = set()
        self._tries: dict[str, int] = {}
        self._looked_at_again: set[str] = set()
        self._browser: Any = None
        self._thread = MulticastThread("mdns-browser", opened=self._browse, looked=self._refresh, closing=self._cancel)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop looking; may be called again."""
        self._thread.close()

    @property
    def problem(self) -> str:
        """Why mDNS does not work now, or empty."""
        return self._thread.problem

    def found(self) -> dict[str, Record]:
        """Instance -> record, as of now."""
        with self._lock:
            return dict(self._found)

    def ignored(self) -> dict[str, str]:
        """Instance -> why its record is not believed."""
        with self._lock:
            return dict(self._ignored)

    def gone(self) -> list[tuple[Record, float]]:
        """Records that said goodbye or were not heard any more, each with the time (monotonic) of that."""
        with self._lock:
            return list(self._gone.values())

    # ---- on the thread ---------------------------------------------------------------------------------------

    def _browse(self, zeroconf: "Zeroconf") -> None:
        from zeroconf import ServiceBrowser

        self._browser = ServiceBrowser(zeroconf, self._kind.service_type, handlers=[self._heard])

    def _cancel(self, zeroconf: "Zeroconf") -> None:
        if self._browser is not None:
            self._browser.cancel()

    def _heard(self, zeroconf: "Zeroconf", service_type: str, name: str, state_change: Any) -> None:
        """zeroconf's callback, on its thread, which must not wait: the work is done on ours."""
        from zeroconf import ServiceStateChange

        instance = name.removesuffix(f".{self._kind.service_type}")
        if state_change is ServiceStateChange.Removed:
            self._thread.post(lambda _: self._remove(instance))
        else:
            self._thread.post(lambda zeroconf: self._resolve_twice(zeroconf, instance))

    def _resolve_twice(self, zeroconf: "Zeroconf", instance: str) -> None:
        """Now, and when older records have expired: one that came back meanwhile was in the cache still, and zeroconf
        tells only of those that were not."""
        self._resolve(zeroconf, instance)
        if instance in self.found() and instance not in self._looked_at_again:
            self._looked_at_again.add(instance)
            self._thread.post_later(OLD_RECORDS_STAY, lambda zeroconf: self._resolve_known(zeroconf, instance))

    def _resolve_known(self, zeroconf: "Zeroconf", instance: str) -> None:
        self._looked_at_again.discard(instance)
        if instance in self.found():
            self._resolve(zeroconf, instance)

    def _resolve(self, zeroconf: "Zeroconf", instance: str) -> None:
        """Ask for address and text, without waiting: somebody who never answers must not hold up the others."""
        if _INSTANCE.fullmatch(instance) is None:
            self._ignore(instance, "its instance is not a name and 4 hex digits")
            return
        info = self._info(instance)
        if info.load_from_cache(zeroconf):
            self._check(zeroconf, info)
            return
        if instance in self._resolving:
            return
        if len(self._resolving) >= _MAX_RESOLVING:
            # It is asked at one of the next looks.
            self._ignore(instance, _SILENT)
            return
        assert zeroconf.loop is not None
        self._resolving.add(instance)
        self._tries[instance] = self._tries.get(instance, 0) + 1
        asked = asyncio.run_coroutine_threadsafe(info.async_request(zeroconf, _RESOLVE_MILLISECONDS), zeroconf.loop)
        asked.add_done_callback(
            lambda done: self._thread.post(lambda zeroconf: self._answered(zeroconf, info, instance, done))
        )

    def _answered(
        self, zeroconf: "Zeroconf", info: "ServiceInfo", instance: str, done: "concurrent.futures.Future[bool]"
    ) -> None:
        self._resolving.discard(instance)
        if done.cancelled() or done.exception() is not None or not done.result():
            self._ignore(instance, _SILENT)
        else:
            self._check(zeroconf, info)

    def _info(self, instance: str) -> "ServiceInfo":
        from zeroconf import ServiceInfo

        return ServiceInfo(self._kind.service_type, f"{instance}.{self._kind.service_type}")

    def _check(self, zeroconf: "Zeroconf", info: "ServiceInfo") -> None:
        """Take the record that ``info`` describes, or note why not."""
        from zeroconf import IPVersion, ServiceInfo

        instance = info.name.removesuffix(f".{self._kind.service_type}")
        try:
            hosts = info.parsed_addresses(IPVersion.V4Only)
            text = _newest_text(zeroconf, info)
            properties = ServiceInfo(info.type, info.name, properties=text).properties
            record = records.parse(self._kind, instance, properties, hosts, info.port, len(text))
        except ValueError as error:
            self._ignore(instance, str(error))
            return
        self._add(record)

    def _refresh(self, zeroconf: "Zeroconf") -> None:
        """Addresses that a peer gave up expire in the cache without a callback; who was silent is asked again."""
        for instance in self.found():
            info = self._info(instance)
            if info.load_from_cache(zeroconf):
                self._check(zeroconf, info)
        for instance, reason in self.ignored().items():
            if reason == _SILENT and self._tries.get(instance, 0) < _MAX_TRIES:
                self._resolve(zeroconf, instance)

    def _add(self, record: Record) -> None:
        self._tries.pop(record.instance, None)
        with self._lock:
            if self._found.get(record.instance) == record:
                return
            if record.instance not in self._found and len(self._found) >= _MAX_RECORDS:
                _log.warning("ignored %s %s: %d are known already", self._kind.what, record.instance, _MAX_RECORDS)
                return
            self._found[record.instance] = record
            self._gone.pop(record.instance, None)
            self._ignored.pop(record.instance, None)
        _log.info("found %s %s at %s:%d", self._kind.what, record.instance, record.hosts[0], record.port)
        self._tell()

    def _remove(self, instance: str) -> None:
        self._tries.pop(instance, None)
        with self._lock:
            record = self._found.pop(instance, None)
            self._ignored.pop(instance, None)
            if record is None:
                return
            if len(self._gone) >= _MAX_RECORDS:
                self._gone.pop(next(iter(self._gone)))
            self._gone[instance] = (record, time.monotonic())
        _log.info("%s %s left", self._kind.what, instance)
        self._tell()

    def _ignore(self, instance: str, reason: str) -> None:
        with self._lock:
            known = self._ignored.get(instance) == reason or len(self._ignored) >= _MAX_RECORDS
            if not known:
                self._ignored[instance] = reason
            changed = self._found.pop(instance, None) is not None
        if not known:
            level = logging.INFO if reason == _SILENT else logging.WARNING  # who has just left is silent, too
            _log.log(level, "ignored mDNS record %.80r: %s", instance, reason)
        if changed:
            self._tell()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self.found())


def _newest_text(zeroconf: "Zeroconf", info: "ServiceInfo") -> bytes:
    """The TXT record in the cache that was heard last: for a second, a record that changed stands beside what it was
    (RFC 6762, 10.2), and ``info`` has any of them."""
    from zeroconf import DNSText

    cached = zeroconf.cache.get_all_by_details(info.name, _TXT, _IN)
    newest = max((one for one in cached if isinstance(one, DNSText)), key=lambda one: one.created, default=None)
    return newest.text if newest is not None else info.text or b""


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
        if records.is_host(name):
            return f"{name} needs the port that notebook-cluster share shows there: {name}:PORT ({others})"
        if is_a_new_code(name):
            return f"{name!r} looks like a code: say the machine's name, and --code {name} behind it ({others})"
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
