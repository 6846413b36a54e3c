"""What this machine is: its identity for 127.0.0.1, its addresses, the versions of what nodes import."""

import hashlib
import importlib.metadata
import ipaddress
import os
import platform
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION
from notebook_cluster.protocol.names import distribution_name
from notebook_cluster.protocol.peer import Device, PeerInfo

_PACKAGES = ("notebook-cluster", "ipykernel", "ipython", "numpy", "torch", "mlx", "safetensors")


def machine_id(boot: Path = Path("/proc/sys/kernel/random/boot_id"), network: Path = Path("/proc/self/ns/net")) -> str:
    """16 hex digits, the same for all processes that reach each other over 127.0.0.1.

    On Linux that is one boot of one kernel and one network namespace: two containers of one host differ. Elsewhere
    the name and the hardware address of the machine.
    """
    try:
        words = [boot.read_text().strip(), os.readlink(network)]
    except OSError:
        words = [platform.node(), f"{uuid.getnode():x}"]
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).hexdigest()


def host_addresses() -> list[str]:
    """IPv4 addresses of the interfaces that are up, 127.0.0.1 last."""
    states = psutil.net_if_stats()
    found = []
    for interface, addresses in psutil.net_if_addrs().items():
        if interface in states and not states[interface].isup:
            continue
        found += [entry.address for entry in addresses if entry.family.name == "AF_INET"]
    outside = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    # Addresses that a machine gave to itself for want of a router reach least.
    outside.sort(key=lambda address: ipaddress.ip_address(address).is_link_local)
    return list(dict.fromkeys(outside)) + ["127.0.0.1"]


def package_versions(names: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Version by normalised name (PEP 503) of ``names``, by default of the packages in which peers may usefully be
    compared; those that are missing are left out."""
    versions = {}
    for name in names:
        try:
            versions[distribution_name(name)] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def describe(
    name: str,
    devices: Sequence[Device],
    packages: dict[str, str],
    leased: Mapping[str, str],
    *,
    portable: bool,
    limits: Sequence[str],
) -> PeerInfo:
    """The PeerInfo of peer ``name``. ``leased``: device id -> name of the cluster that uses it."""
    return PeerInfo(
        name=name,
        machine=machine_id(),
        devices=list(devices),
        hosts=host_addresses(),
        python=platform.python_version(),
        platform=f"{sys.platform} {platform.machine()}",
        version=VERSION,
        protocol=PROTOCOL_VERSION,
        packages=packages,
        leased=dict(leased),
        portable=portable,
        limits=list(limits),
    )
