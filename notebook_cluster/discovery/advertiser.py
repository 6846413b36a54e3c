"""Says on the local network that a peer is here."""

import ipaddress
from typing import TYPE_CHECKING

from notebook_cluster.discovery import records
from notebook_cluster.discovery.multicast import MulticastThread, local_addresses

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

_TTL_SECONDS = 60
"""How long others believe in a peer that ended without a goodbye; zeroconf's default is over an hour."""


class Advertiser:
    """Advertises one peer from ``start()`` to ``close()``; ``start`` returns at once.

    The record is public: name, public key, port, protocol version, device. ``hosts`` fixes the addresses; by default
    they are those of all interfaces, kept up to date, and 127.0.0.1 when there is no other.
    """

    def __init__(
        self, name: str, public_key: str, port: int, device: str, *, hosts: tuple[str, ...] | None = None
    ) -> None:
        """Raises ValueError for a name or key that others would refuse."""
        self._properties = records.properties(name, public_key, device)
        self.instance = records.instance_name(name, public_key)
        self._name = name
        self._port = port
        self._hosts = hosts
        self._thread = MulticastThread(
            "mdns-advertiser", opened=self._register, looked=self._update, closing=self._unregister
        )
        self._advertised: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """Why the peer cannot be seen now, or empty."""
        return self._thread.problem

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Tell the network that the peer is gone. Takes up to a few seconds; may be called again."""
        self._thread.close()

    def _register(self, zeroconf: "Zeroconf") -> None:
        from zeroconf import NonUniqueNameException

        try:
            zeroconf.register_service(self._info())
        except NonUniqueNameException:
            raise RuntimeError(
                f"peer {self._name!r} with the same key is on this network already: stop it, or use another --name"
            ) from None

    def _update(self, zeroconf: "Zeroconf") -> None:
        if self._reachable() != self._advertised:
            zeroconf.update_service(self._info())

    def _unregister(self, zeroconf: "Zeroconf") -> None:
        zeroconf.unregister_all_services()

    def _info(self) -> "ServiceInfo":
        from zeroconf import ServiceInfo

        self._advertised = self._reachable()
        return ServiceInfo(
            records.SERVICE_TYPE,
            f"{self.instance}.{records.SERVICE_TYPE}",
            port=self._port,
            properties=self._properties,
            server=f"{self.instance}.local.",
            addresses=[ipaddress.IPv4Address(host).packed for host in self._advertised],
            host_ttl=_TTL_SECONDS,
            other_ttl=_TTL_SECONDS,
        )

    def _reachable(self) -> tuple[str, ...]:
        if self._hosts is not None:
            return self._hosts
        addresses = local_addresses()
        return tuple(address for address in addresses if address != "127.0.0.1") or addresses
