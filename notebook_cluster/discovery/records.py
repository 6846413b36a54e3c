"""What a peer or a cluster says about itself over mDNS, and the checks for what others say."""

import hashlib
import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from notebook_cluster.protocol import PROTOCOL_VERSION, check_name
from notebook_cluster.protocol.names import is_name
from notebook_cluster.security import fingerprint, is_key

GROUP_VARIABLE = "NOTEBOOK_CLUSTER_MDNS_GROUP"
"""Environment variable: two classes on one network, each with a text of its own in it, do not see each other."""
GROUP = os.environ.get(GROUP_VARIABLE, "").strip()
IN_GROUP = f" (group {GROUP!r} of {GROUP_VARIABLE})" if GROUP else ""
"""What people are told of the group: only who is in it hears this process, and is heard."""


def service_types(group: str) -> tuple[str, str]:
    """The DNS-SD types of peers and of clusters in ``group``, any text; empty: of those that are in none.

    A type has at most 15 letters, digits and hyphens (RFC 6335, section 5.1), so it names the text by a hash.
    """
    name = f"nbc-{hashlib.sha256(group.encode()).hexdigest()[:6]}" if group else "nbcluster"
    return f"_{name}._tcp.local.", f"_{name}-hub._tcp.local."


SERVICE_TYPE, CLUSTER_SERVICE_TYPE = service_types(GROUP)
_MAX_TEXT = 120
_MAX_HOSTS = 16
_MAX_TEXT_BYTES = 1000


@dataclass(frozen=True)
class FoundPeer:
    """A peer as its mDNS record describes it: claims, until CURVE has shown that it holds ``public_key``."""

    name: str
    public_key: str
    hosts: tuple[str, ...]
    """IPv4 addresses at which it may be reached, in the order it gave them."""
    port: int
    protocol: int
    device: str
    """Short text for people: ``NVIDIA RTX 4070``, ``cpu``."""
    instance: str
    """The mDNS instance name: the peer's name and 4 hex digits of its key, unique on the network."""
    pairing_port: int = 0
    """Where a code is accepted, or 0 while none is open."""

    @property
    def address(self) -> str:
        """``HOST:PORT`` to dial first."""
        return f"{self.hosts[0]}:{self.port}"


@dataclass(frozen=True)
class FoundCluster:
    """A cluster that invites peers, as its mDNS record describes it: claims as well."""

    name: str
    owner: str
    """``user@machine``, for people."""
    public_key: str
    """The key of its coordinator."""
    hosts: tuple[str, ...]
    port: int
    """The port where peers dial in."""
    pairing_port: int
    """Where its code is accepted, or 0 while none is open."""
    protocol: int
    instance: str


class NetworkRecord(Protocol):
    """What every record has."""

    @property
    def name(self) -> str: ...
    @property
    def public_key(self) -> str: ...
    @property
    def hosts(self) -> tuple[str, ...]: ...
    @property
    def port(self) -> int: ...
    @property
    def instance(self) -> str: ...


Record = TypeVar("Record", bound=NetworkRecord)


@dataclass(frozen=True)
class _Claims:
    """The checked fields that records of both kinds have, and the other texts, cleaned."""

    name: str
    public_key: str
    hosts: tuple[str, ...]
    port: int
    pairing_port: int
    protocol: int
    instance: str
    texts: dict[str, str]


@dataclass(frozen=True)
class RecordKind(Generic[Record]):
    """One kind of record. ``what``: the word for people; ``texts``: the TXT fields that are shown and nothing more."""

    service_type: str
    what: str
    texts: tuple[str, ...]
    make: Callable[[_Claims], Record]


def _peer(claims: _Claims) -> FoundPeer:
    return FoundPeer(
        claims.name, claims.public_key, claims.hosts, claims.port, claims.protocol, claims.texts["device"],
        claims.instance, claims.pairing_port,
    )  # fmt: skip


def _cluster(claims: _Claims) -> FoundCluster:
    return FoundCluster(
        claims.name, claims.texts["owner"], claims.public_key, claims.hosts, claims.port, claims.pairing_port,
        claims.protocol, claims.instance,
    )  # fmt: skip


PEER = RecordKind(SERVICE_TYPE, "peer", ("device",), _peer)
CLUSTER = RecordKind(CLUSTER_SERVICE_TYPE, "cluster", ("owner",), _cluster)


def instance_name(name: str, public_key: str) -> str:
    """``name`` and 4 hex digits of the key: at most 63 bytes, no dot, and different for two peers of one name."""
    return f"{name[:58].replace('.', '-')}-{fingerprint(public_key)[:4]}"


def properties(
    kind: RecordKind[Record], name: str, public_key: str, texts: Mapping[str, str], pairing_port: int
) -> dict[str, str]:
    """The TXT record. Nothing in it is a secret. ValueError for a name, key or port that others would refuse."""
    check_name(name, kind.what)
    if not is_key(public_key):
        raise ValueError(f"{public_key!r} is not a CURVE public key: it needs 40 characters of Z85")
    check_pairing_port(pairing_port)
    shown = {text: clean_text(texts[text]) for text in kind.texts}
    fixed = {"name": name, "key": public_key, "protocol": str(PROTOCOL_VERSION), "pair": str(pairing_port)}
    return fixed | shown


def check_pairing_port(port: int) -> None:
    """ValueError for what is neither a port nor 0, which says that no code is open."""
    if not 0 <= port < 65536:
        raise ValueError(f"pairing port {port} is not between 0 (no code is open) and 65535")


def clean_text(text: str) -> str:
    """``text`` without characters that cannot be shown, at most 120 bytes as UTF-8."""
    printable = "".join(character for character in text if character.isprintable())
    return printable.encode("utf-8")[:_MAX_TEXT].decode("utf-8", "ignore")


def parse(
    kind: RecordKind[Record],
    instance: str,
    values: Mapping[bytes, bytes | None],
    hosts: Sequence[str],
    port: int | None,
    text_bytes: int,
) -> Record:
    """What an mDNS record describes. ValueError with the reason when the record cannot be one of ours.

    A record of another protocol version is kept: the link names both versions.
    """
    if text_bytes > _MAX_TEXT_BYTES:
        raise ValueError(f"its text has {text_bytes} bytes, more than {_MAX_TEXT_BYTES}")
    name, key = _value(values, "name"), _value(values, "key")
    if not is_name(name):
        raise ValueError(f"its name {name[:80]!r} is not usable")
    if not is_key(key):
        raise ValueError(f"its key {key[:80]!r} is not a CURVE public key")
    if instance != instance_name(name, key):
        raise ValueError(f"instance {instance[:80]!r} does not belong to name {name!r} and its key")
    protocol = _number(_value(values, "protocol"), "protocol version")
    pairing_port = _number(_value(values, "pair") or "0", "pairing port")
    if pairing_port > 65535:
        raise ValueError(f"its pairing port {pairing_port} is not between 0 and 65535")
    if port is None or not 0 < port < 65536:
        raise ValueError(f"its port {port} is not between 1 and 65535")
    usable = tuple(host for host in hosts[:_MAX_HOSTS] if is_host(host))
    if not usable:
        raise ValueError(f"none of its addresses can be dialled: {', '.join(hosts[:_MAX_HOSTS]) or 'it has none'}")
    texts = {text: clean_text(_value(values, text)) for text in kind.texts}
    return kind.make(_Claims(name, key, usable, port, pairing_port, protocol, instance, texts))


def _value(values: Mapping[bytes, bytes | None], key: str) -> str:
    return (values.get(key.encode()) or b"").decode("utf-8", "replace")


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise ValueError(f"its {what} {text[:80]!r} is not a number")
    return int(text)


def is_host(text: str) -> bool:
    """True for the address of one machine (not a group, not "any")."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return not (address.is_multicast or address.is_unspecified or address == ipaddress.IPv4Address("255.255.255.255"))
