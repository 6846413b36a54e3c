"""Says on the local network that a peer or a cluster is here."""

import ipaddress
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from notebook_cluster.discovery import records
from notebook_cluster.discovery.addresses import reachable_addresses
from notebook_cluster.discovery.multicast import OLD_RECORDS_STAY, MulticastThread
from notebook_cluster.discovery.records import Record, RecordKind

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

_TTL_SECONDS = 60
"""How long others believe in a peer that ended without a goodbye; zeroconf's default is over an hour."""


class RecordAdvertiser:
    """Advertises one record from ``start()`` to ``close()``; ``start`` returns at once.

    The record is public. ``hosts`` fixes the addresses; by default they are those of all interfaces, kept up to date,
    and 127.0.0.1 when there is no other.
    """

    def __init__(
        self,
        kind: RecordKind[Record],
        name: str,
        public_key: str,
        port: int,
        texts: Mapping[str, str],
        pairing_port: int,
        hosts: tuple[str, ...] | None,
    ) -> None:
        """Raises ValueError for a name, key or port that others would refuse."""
        self._what, self._service_type = kind.what, kind.service_type
        self._properties = records.properties(kind, name, public_key, texts, pairing_port)
        self._lock = threading.Lock()
        self.instance = records.instance_name(name, public_key)
        self._name = name
        self._port = port
        self._hosts = hosts
        self._thread = MulticastThread(
            "mdns-advertiser", opened=self._register, looked=self._look, closing=self._unregister
        )
        self._advertised: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """Why it cannot be seen now, or empty."""
        return self._thread.problem

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell the network that it is gone. Takes up to a few seconds; may be called again."""
        self._thread.close()

    def set_pairing_port(self, port: int) -> None:
        """Say from now on that a code is accepted at ``port``, or (0) that none is. From any thread; returns at once.

        Raises:
            ValueError: not between 0 and 65535.
        """
        records.check_pairing_port(port)
        with self._lock:
            if self._properties["pair"] == str(port):
                return
            self._properties = self._properties | {"pair": str(port)}
        self._thread.post(self._announce)

    def _register(self, zeroconf: "Zeroconf") -> None:
        from zeroconf import NonUniqueNameException

        try:
            zeroconf.register_service(self._info())
        except NonUniqueNameException:
            way_out = "another --name" if self._what == "peer" else "another name"
            raise RuntimeError(
                f"{self._what} {self._name!r} with the same key is on this network already: stop it, or use {way_out}"
            ) from None

    def _look(self, zeroconf: "Zeroconf") -> None:
        if self._reachable() != self._advertised:
            self._announce(zeroconf)

    def _announce(self, zeroconf: "Zeroconf") -> None:
        if not zeroconf.registry.async_get_info_name(self._full_name.lower()):
            # It could not be registered so far; when it can, it is with what holds then.
            return
        # RFC 6762, 10.2: who heard the old record less than a second ago keeps it beside this one.
        zeroconf.update_service(self._info())
        self._thread.post_later(OLD_RECORDS_STAY, self._update)

    def _update(self, zeroconf: "Zeroconf") -> None:
        if zeroconf.registry.async_get_info_name(self._full_name.lower()):
            zeroconf.update_service(self._info())

    def _unregister(self, zeroconf: "Zeroconf") -> None:
        zeroconf.unregister_all_services()

    @property
    def _full_name(self) -> str:
        return f"{self.instance}.{self._service_type}"

    def _info(self) -> "ServiceInfo":
        from zeroconf import ServiceInfo

        self._advertised = self._reachable()
        with self._lock:
            properties = self._properties
        return ServiceInfo(
            self._service_type,
            self._full_name,
            port=self._port,
            properties=properties,
            server=f"{self.instance}.local.",
            addresses=[ipaddress.IPv4Address(host).packed for host in self._advertised],
            host_ttl=_TTL_SECONDS,
            other_ttl=_TTL_SECONDS,
        )

    def _reachable(self) -> tuple[str, ...]:
        return self._hosts if self._hosts is not None else reachable_addresses()


class Advertiser(RecordAdvertiser):
    """Advertises a peer: name, public key, port, protocol version, device, and where its code is accepted."""

    def __init__(
        self,
        name: str,
        public_key: str,
        port: int,
        device: str,
        *,
        hosts: tuple[str, ...] | None = None,
        pairing_port: int = 0,
    ) -> None:
        super().__init__(records.PEER, name, public_key, port, {"device": device}, pairing_port, hosts)


class ClusterAdvertiser(RecordAdvertiser):
    """Advertises a cluster that invites peers; ``port`` is that of its reception."""

    def __init__(
        self,
        name: str,
        owner: str,
        public_key: str,
        port: int,
        pairing_port: int,
        *,
        hosts: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(records.CLUSTER, name, public_key, port, {"owner": owner}, pairing_port, hosts)
