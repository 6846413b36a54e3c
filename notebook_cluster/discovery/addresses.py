"""This machine's network interfaces and their IPv4 addresses, and whether a TCP port of another machine answers."""

import asyncio
import contextlib
import errno
import os
import re
import socket
from collections.abc import Mapping, Sequence

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


TIMEOUT_S = 2.0
MAX_TARGETS = 64
"""(host, port) pairs that :func:`reach` tries in one call."""
NO = "no: "
"""Begins every answer that is a reason."""
_MAX_SHOWN = 60
_HOST = re.compile(r"[A-Za-z0-9.:-]{1,253}")
_NO_ROUTE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES}


async def reach(targets: Mapping[str, Sequence[tuple[str, int]]]) -> dict[str, str]:
    """For each label the ``host:port`` that accepts a TCP connection, or ``no: `` and why none does (refused, silent,
    no route). All are tried at once, each for :data:`TIMEOUT_S`; labels beyond :data:`MAX_TARGETS` pairs are not tried.
    """
    left, tried, answers = MAX_TARGETS, {}, {}
    for label, pairs in targets.items():
        if left >= len(pairs) > 0:
            tried[label] = pairs
            left -= len(pairs)
        else:
            answers[label] = NO + (
                f"not tried, {MAX_TARGETS} addresses are the most at once" if pairs else "no address"
            )
    results = await asyncio.gather(*(_reach_any(pairs) for pairs in tried.values()))
    return answers | dict(zip(tried, results, strict=True))


async def _reach_any(pairs: Sequence[tuple[str, int]]) -> str:
    attempts = [asyncio.ensure_future(_connect(host, port)) for host, port in pairs]
    reasons = []
    try:
        for attempt in asyncio.as_completed(attempts):
            place, reason = await attempt
            if not reason:
                return place
            reasons.append(f"{place} {reason}")
    finally:
        for one in attempts:
            one.cancel()
    return NO + "; ".join(sorted(reasons))


async def _connect(host: str, port: int) -> tuple[str, str]:
    """``host:port`` and why there is no connection, or an empty text."""
    if not _HOST.fullmatch(host):
        return f"{host[:_MAX_SHOWN]!r}", "is not an address"
    place = f"{host}:{port}"
    if not 0 < port < 65536:
        return place, "has no usable port"
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), TIMEOUT_S)
    except TimeoutError:
        return place, f"did not answer in {TIMEOUT_S:g} s"
    except ConnectionRefusedError:
        return place, "refused the connection"
    except socket.gaierror:
        return place, "has a name that nobody here knows"
    except OSError as error:
        words = os.strerror(error.errno) if error.errno else str(error)
        return place, f"cannot be reached: {words.lower()}" if error.errno in _NO_ROUTE else f"failed: {words}"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return place, ""
