"""This machine's network interfaces: their IPv4 addresses, whether mDNS works on each; and whether a TCP port of
another machine answers.

Whether mDNS works is tried with small packets to the mDNS group on each interface, and a wait for their return. The
system gives a packet that is sent to a group back to the members on the same machine, through the same firewall rules
as one from outside: what does not return here is not heard by others either. Two ways are tried for each interface, so
that the reason can be named: a question on the mDNS port, and the same group on a port of our own.
"""

import asyncio
import contextlib
import errno
import os
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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


GROUP = "224.0.0.251"
MDNS_PORT = 5353
_REPEAT_SECONDS = 0.3
_QUESTION_HEAD = struct.pack(">6H", 0, 0, 1, 0, 0, 0)
_QUESTION_TAIL = b"\x0b_nbcluster\x04_tcp\x05local\x00" + struct.pack(">2H", 12, 1)


def multicast_problem(seconds: float = 1.0) -> str:
    """Why mDNS does not work on this machine, naming the interface; empty when it works or no interface is up.

    Waits at most ``seconds`` for packets to return: call it in a thread. Interfaces that carry no multicast by nature
    (point to point) are left out.
    """
    wanted = [pair for pair in interfaces() if _carries_multicast(pair[0])]
    if not wanted:
        return ""
    tries = [_Try(name, address, *_tokens()) for name, address in wanted]
    with contextlib.ExitStack() as stack:
        try:
            mdns = stack.enter_context(_group_socket(MDNS_PORT))
        except OSError as error:
            return f"UDP port {MDNS_PORT} cannot be opened ({_words(error)}): another program holds it for itself"
        own = stack.enter_context(_group_socket(0))
        for one in tries:
            one.join(mdns)
            one.join(own)
        _play(tries, mdns, own, seconds)
    return "; ".join(reason for one in tries if (reason := one.reason()))


@dataclass
class _Try:
    """What happened on one interface. The tokens tell its packets from those of others."""

    name: str
    address: str
    question: bytes
    packet: bytes
    trouble: dict[str, str] = field(default_factory=dict)
    returned: set[bytes] = field(default_factory=set)

    def join(self, member: socket.socket) -> None:
        request = socket.inet_aton(GROUP) + socket.inet_aton(self.address)
        try:
            member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
        except OSError as error:
            # The second address of one interface: it is a member already.
            if error.errno != errno.EADDRINUSE:
                self.trouble["join"] = f"the group {GROUP} cannot be joined: {_words(error)}"

    def send(self, sender: socket.socket, data: bytes, port: int) -> None:
        if data in self.returned:
            return
        try:
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(self.address))
            sender.sendto(data, (GROUP, port))
        except OSError as error:
            self.trouble[str(port)] = f"sending to {GROUP}, UDP port {port}, fails: {_words(error)}"

    def is_done(self) -> bool:
        return {self.question, self.packet} <= self.returned

    def reason(self) -> str:
        if self.question in self.returned:
            return ""
        place = f"{self.name} ({self.address})"
        if self.trouble:
            return f"{place}: {next(iter(self.trouble.values()))}"
        if self.packet in self.returned:
            return f"{place}: UDP port {MDNS_PORT} is blocked, other multicast passes"
        return f"{place}: multicast is blocked, nothing sent to {GROUP} comes back"


def _play(tries: list[_Try], mdns: socket.socket, own: socket.socket, seconds: float) -> None:
    """Send, again every 0.3 s, and note what returns, until all did or the time is over."""
    port = own.getsockname()[1]
    end, send_at = time.monotonic() + seconds, 0.0
    while (now := time.monotonic()) < end and not all(one.is_done() for one in tries):
        if now >= send_at:
            send_at = now + _REPEAT_SECONDS
            for one in tries:
                one.send(mdns, one.question, MDNS_PORT)
                one.send(own, one.packet, port)
        ready, _, _ = select.select([mdns, own], [], [], max(min(send_at, end) - time.monotonic(), 0.0))
        for receiver in ready:
            data = receiver.recv(2048)
            for one in tries:
                if data in (one.question, one.packet):
                    one.returned.add(data)


def _tokens() -> tuple[bytes, bytes]:
    """A question of our own that nobody answers, and a packet."""
    name = secrets.token_hex(8).encode()
    return _QUESTION_HEAD + bytes([len(name)]) + name + _QUESTION_TAIL, b"notebook-cluster " + secrets.token_bytes(16)


@contextlib.contextmanager
def _group_socket(port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if port and hasattr(socket, "SO_REUSEPORT"):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        made.setblocking(False)
        made.bind(("", port))
        yield made


def _carries_multicast(name: str) -> bool:
    """False for what says that it does not, as VPN tunnels do; psutil does not know it everywhere."""
    import psutil

    flags = getattr(psutil.net_if_stats().get(name), "flags", "").split(",")
    return "pointopoint" not in flags and (flags == [""] or "multicast" in flags)


def _words(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
