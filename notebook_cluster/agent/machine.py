"""What this machine is (identity for 127.0.0.1, addresses, versions), and about once a second how full it is.

All calls are short.
"""

import hashlib
import importlib.metadata
import ipaddress
import os
import platform
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.sharing.presence import Sensors
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION
from notebook_cluster.protocol.names import distribution_name
from notebook_cluster.protocol.peer import Device, DeviceSample, NodeSample, PeerInfo

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


class OwnAddresses:
    """:func:`host_addresses` for coordinators. Those of a machine that is on no network now are the last ones that it
    had: nobody can reach it meanwhile, and what is said of it arrives when it can be reached again, most likely
    there."""

    def __init__(self) -> None:
        self._last: list[str] = []

    def read(self) -> list[str]:
        """127.0.0.1 last."""
        found = host_addresses()
        if len(found) > 1 or not self._last:
            self._last = found
        return self._last


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
    hosts: Sequence[str],
    portable: bool,
    limits: Sequence[str],
) -> PeerInfo:
    """The PeerInfo of peer ``name``, reached at ``hosts``. ``leased``: device id -> name of the cluster using it."""
    return PeerInfo(
        name=name,
        machine=machine_id(),
        devices=list(devices),
        hosts=list(hosts),
        python=platform.python_version(),
        platform=f"{sys.platform} {platform.machine()}",
        version=VERSION,
        protocol=PROTOCOL_VERSION,
        packages=packages,
        leased=dict(leased),
        portable=portable,
        limits=list(limits),
    )


class KernelSampler:
    """Memory and load of one kernel's process.

    Attributes:
        peak: the most resident memory so far, in bytes.
    """

    def __init__(self, pid: int, proc: Path = Path("/proc")) -> None:
        self._status = proc / str(pid) / "status"
        self._pid = pid
        self._process: psutil.Process | None = None
        self.peak = 0

    def sample(self, node: str, device_memory: Mapping[int, int]) -> NodeSample | None:
        """The kernel now, or None when it is gone. ``device_memory``: process id -> bytes."""
        try:
            if self._process is None:
                self._process = psutil.Process(self._pid)
            with self._process.oneshot():
                rss: int = self._process.memory_info().rss
                # Since the last call; the first call says 0.
                cpu = self._process.cpu_percent(None) / 100
                times = self._process.cpu_times()
                stopped = self._process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:
            return None
        self.peak = max(self.peak, rss, self._peak_of_system())
        return NodeSample(
            node=node, rss=rss, rss_peak=self.peak, device_memory=device_memory.get(self._pid), cpu=cpu,
            cpu_seconds=times.user + times.system, stopped=stopped,
        )  # fmt: skip

    def _peak_of_system(self) -> int:
        """Linux keeps the peak itself (VmHWM), so one between two samples is not missed; 0 elsewhere."""
        try:
            for line in self._status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            pass
        return 0


class MachineSample:
    """One look at the machine and its devices, shared by all clusters on this peer."""

    def __init__(self, devices: Devices) -> None:
        memory = psutil.virtual_memory()
        self.time = time.time()
        self.ram_used: int = memory.total - memory.available
        self.ram_total: int = memory.total
        self.devices: list[DeviceSample] = devices.sample()
        # psutil keeps one "since the last call" for the whole process, so the processor's own sample is used.
        self.cpu = next((sample.load or 0.0 for sample in self.devices if sample.id == "cpu"), 0.0)
        self.process_memory = devices.process_memory()
        self.battery = Sensors().battery()


def memory_of_trees(roots: Iterable[int]) -> dict[int, int]:
    """Resident bytes of each of ``roots`` (children of this process) with everything that it started.

    Of what it started only the memory that is its own: workers share most of theirs with whom they were forked from.
    """
    used = dict.fromkeys(roots, 0)
    try:
        processes = {process.pid: process for process in psutil.Process().children(recursive=True)}
    except psutil.Error:
        return used
    parents: dict[int, int] = {}
    for pid, process in processes.items():
        try:
            parents[pid] = process.ppid()
        except psutil.Error:
            continue
    for pid in parents:
        root: int | None = pid
        while root is not None and root not in used:
            root = parents.get(root)
        if root is not None:
            used[root] += _resident(processes[pid], whole=pid == root)
    return used


def _resident(process: psutil.Process, *, whole: bool) -> int:
    try:
        if not whole:
            try:
                return int(process.memory_full_info().uss)
            except psutil.AccessDenied:
                pass
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
