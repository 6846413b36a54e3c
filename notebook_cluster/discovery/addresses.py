"""This machine's network interfaces and their IPv4 addresses."""

import socket

_SOMEWHERE = "192.0.2.1"
"""An address that belongs to nobody (RFC 5737)."""


def networks() -> list[tuple[str, str, str]]:
    """(interface, IPv4 address, netmask) of what is up and not loopback, sorted; a point-to-point one is among them."""
    import psutil

    running = {name for name, status in psutil.net_if_stats().items() if status.isup}
    return sorted(
        (name, entry.address, entry.netmask or "")
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in running and entry.family == socket.AF_INET and not entry.address.startswith("127.")
    )


def interfaces() -> list[tuple[str, str]]:
    """(interface, IPv4 address) of :func:`networks`."""
    return [(name, address) for name, address, _ in networks()]


def local_addresses() -> tuple[str, ...]:
    """IPv4 addresses of this machine's running interfaces: that of the default route first, 127.0.0.1 last."""
    first = _default_address()
    # A machine has many networks (virtual machines, containers, VPN); where it reaches the world is the likely one.
    outside = sorted({address for _, address in interfaces()}, key=lambda address: (address != first, address))
    return (*outside, "127.0.0.1")


def reachable_addresses() -> tuple[str, ...]:
    """:func:`local_addresses` for other machines: without 127.0.0.1 where there is another one."""
    addresses = local_addresses()
    return tuple(address for address in addresses if address != "127.0.0.1") or addresses


def _default_address() -> str:
    """The address from which this machine would send to the world, or empty. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((_SOMEWHERE, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return ""
