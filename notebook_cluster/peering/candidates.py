"""Peers that may be used: what is known about each, and which keys this user's clusters trust."""

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from notebook_cluster.discovery import FoundPeer
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import PROTOCOL_VERSION, mismatch
from notebook_cluster.security import Trusted, TrustStore, fingerprint, same_user_keys, trusted_peers


class Trust:
    """Answers from the files as they are now: what was removed is not trusted from the next question on."""

    def __init__(
        self, launched: Callable[[str], str | None] = lambda key: None, store: TrustStore | None = None
    ) -> None:
        """``launched(key)``: the name of the agent with ``key`` that an engine has started for this cluster.
        ``store``: of a head, whom alone it trusts; not this machine's user."""
        self.store: TrustStore = store or trusted_peers()
        self.launched = launched
        self._same_user = store is None

    def is_pinned(self, key: str) -> bool:
        """True for the key of a peer that was paired."""
        return self.store.find(key) is not None

    def is_trusted(self, key: str) -> bool:
        """True when code may be sent to whoever holds ``key``."""
        return self.is_pinned(key) or self.launched(key) is not None or key in self._own()

    def keys(self) -> set[str]:
        """All of them, for one pass over many peers."""
        return {entry.key for entry in self.store.entries()} | set(self._own())

    def _own(self) -> dict[str, str]:
        """Keys of this user's own agents on this machine."""
        return same_user_keys("agent") if self._same_user else {}

    def changed(self, name: str, key: str) -> str:
        """Why whoever calls itself ``name`` with ``key`` is not the peer that was paired under this name, or empty."""
        known = self.store.named(name)
        if not known or any(entry.key == key for entry in known) or key in self._own():
            return ""
        return (
            f"{name!r} was paired with key {fingerprint(known[0].key)}, but this one has key {fingerprint(key)}: "
            "somebody may pretend to be it. If it was really installed anew, run "
            f"`notebook-cluster trust remove {name}` and add it with its code again"
        )


FoundBy = Literal["mdns", "typed", "local", "remembered", "dialled"]


def known_peers(text: str) -> tuple[str, ...]:
    """The entries of NOTEBOOK_CLUSTER_PEERS, HOST:PORT or names with commas between, each once."""
    return tuple(dict.fromkeys(entry.strip() for entry in text.split(",") if entry.strip()))


@dataclass(frozen=True)
class Candidate:
    """Where a peer may be, and which key it must have there. All of it is a claim until CURVE or a pairing shows it."""

    name: str
    key: str
    hosts: tuple[str, ...]
    port: int
    """The port of its link."""
    found_by: FoundBy
    pairing_port: int = 0
    """Where its code is accepted; 0 while none is open."""
    protocol: int = PROTOCOL_VERSION
    device: str = ""
    instead: str = ""
    """That it is where another peer is remembered; ends with a space."""

    @property
    def address(self) -> str:
        """``HOST:PORT`` of its link."""
        return f"{self.hosts[0]}:{self.port}"

    def described(self) -> str:
        """Which one it is, when several have one name."""
        return f"{self.address} (key {fingerprint(self.key)})"


def heard(peer: FoundPeer) -> Candidate:
    """What an mDNS record says."""
    hosts = peer.hosts or ("127.0.0.1",)
    return Candidate(
        peer.name, peer.public_key, hosts, peer.port, "mdns", peer.pairing_port, peer.protocol, peer.device
    )


def remembered(entry: Trusted) -> Candidate | None:
    """A paired peer at the address where it was last; None when that is not known."""
    host, _, port = entry.address.rpartition(":")
    if not host:
        return None
    return Candidate(entry.name, entry.key, (host,), int(port), "remembered")


def answered(here: Here, host: str, port: int) -> Candidate:
    """What the pairing socket at ``host``:``port`` says."""
    return Candidate(here.name, here.key, (host,), here.port, "typed", port, here.protocol, here.device)


def collect(found: Iterable[Candidate], trust: Trust) -> list[Candidate]:
    """``found``, each key once (the first counts), and the paired peers of which nothing was heard."""
    by_key: dict[str, Candidate] = {}
    for candidate in found:
        by_key.setdefault(candidate.key, candidate)
    for entry in trust.store.entries():
        last = remembered(entry)
        if last is not None:
            by_key.setdefault(last.key, last)
    return list(by_key.values())


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, an IPv4 address or a host name.

    Raises:
        RequestError: it is not that; one line.
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise RequestError(f"{text!r} is not HOST:PORT: the port is a number from 1 to 65535")
    if ":" in host or host.startswith("["):
        raise RequestError(f"{text!r} is an IPv6 address: use the IPv4 address or the name of that machine")
    parts = host.split(".")
    if not all(part and len(part) < 64 and part.replace("-", "a").replace("_", "a").isalnum() for part in parts):
        raise RequestError(f"{text!r} is not HOST:PORT: {host!r} is not an address or a host name")
    if all(part.isdigit() for part in parts):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            raise RequestError(f"{text!r} is not HOST:PORT: {host!r} is not an IPv4 address") from None
    return host, int(port)


def how_to_pair(candidate: Candidate) -> str:
    """What makes an untrusted peer usable."""
    if candidate.pairing_port:
        return (
            f"it is not paired with you yet: %cluster add {candidate.name} --code CODE, with the code that "
            "`notebook-cluster share` shows there"
        )
    return (
        "it is not paired with you, and no code is open there: run `notebook-cluster share` on that machine again, "
        f"then %cluster add {candidate.name} --code CODE with the code that it shows"
    )


def found_view(candidate: Candidate, trust: Trust, trusted: set[str]) -> PeerView:
    """How a peer that is not in a cluster is shown; ``trusted`` is ``trust.keys()``."""
    usable = candidate.key in trusted
    reason = mismatch(candidate.name, candidate.protocol) or ""
    if not reason and not usable:
        reason = trust.changed(candidate.name, candidate.key) or how_to_pair(candidate)
    return PeerView(
        name=candidate.name,
        key=candidate.key,
        address=candidate.address,
        condition="found" if usable else "untrusted",
        found_by=candidate.found_by,
        trusted=usable,
        device=candidate.device,
        reason=reason,
        pairing=candidate.pairing_port > 0,
    )
