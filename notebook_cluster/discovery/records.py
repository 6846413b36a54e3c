"""What a peer says about itself over mDNS, and the checks for what others say."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from notebook_cluster.protocol import PROTOCOL_VERSION, check_name
from notebook_cluster.protocol.names import is_name
from notebook_cluster.security import fingerprint, is_key

SERVICE_TYPE = "_nbcluster._tcp.local."
_MAX_DEVICE = 120
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

    @property
    def address(self) -> str:
        """The ZeroMQ address to dial first."""
        return f"tcp://{self.hosts[0]}:{self.port}"


def instance_name(name: str, public_key: str) -> str:
    """``name`` and 4 hex digits of the key: at most 63 bytes, no dot, and different for two peers of one name."""
    return f"{name[:58].replace('.', '-')}-{fingerprint(public_key)[:4]}"


def properties(name: str, public_key: str, device: str) -> dict[str, str]:
    """The TXT record. Nothing in it is a secret. ValueError for a name or key that others would refuse."""
    check_name(name, "peer")
    if not is_key(public_key):
        raise ValueError(f"{public_key!r} is not a CURVE public key: it needs 40 characters of Z85")
    return {"name": name, "key": public_key, "protocol": str(PROTOCOL_VERSION), "device": clean_device(device)}


def clean_device(text: str) -> str:
    """``text`` without characters that cannot be shown, at most 120 bytes as UTF-8."""
    printable = "".join(character for character in text if character.isprintable())
    return printable.encode("utf-8")[:_MAX_DEVICE].decode("utf-8", "ignore")


def parse(
    instance: str, values: Mapping[bytes, bytes | None], hosts: Sequence[str], port: int | None, text_bytes: int
) -> FoundPeer:
    """The peer in an mDNS record. ValueError with the reason when the record cannot be one of ours.

    A record of another protocol version is kept: the link names both versions.
    """
    if text_bytes > _MAX_TEXT_BYTES:
        raise ValueError(f"its text has {text_bytes} bytes, more than {_MAX_TEXT_BYTES}")
    name, key = _value(values, b"name"), _value(values, b"key")
    if not is_name(name):
        raise ValueError(f"its name {name[:80]!r} is not usable")
    if not is_key(key):
        raise ValueError(f"its key {key[:80]!r} is not a CURVE public key")
    if instance != instance_name(name, key):
        raise ValueError(f"instance {instance[:80]!r} does not belong to name {name!r} and its key")
    protocol = _value(values, b"protocol")
    if not (protocol.isascii() and protocol.isdigit() and len(protocol) <= 6):
        raise ValueError(f"its protocol version {protocol[:80]!r} is not a number")
    if port is None or not 0 < port < 65536:
        raise ValueError(f"its port {port} is not between 1 and 65535")
    usable = tuple(host for host in hosts[:_MAX_HOSTS] if _is_host(host))
    if not usable:
        raise ValueError(f"none of its addresses can be dialled: {', '.join(hosts[:_MAX_HOSTS]) or 'it has none'}")
    return FoundPeer(name, key, usable, port, int(protocol), clean_device(_value(values, b"device")), instance)


def _value(values: Mapping[bytes, bytes | None], key: bytes) -> str:
    return (values.get(key) or b"").decode("utf-8", "replace")


def _is_host(text: str) -> bool:
    """True for the address of one machine (not a group, not "any")."""
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return not (address.is_multicast or address.is_unspecified or address == ipaddress.IPv4Address("255.255.255.255"))
