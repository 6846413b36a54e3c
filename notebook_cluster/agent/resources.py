"""What all clusters on one peer share: devices and who uses them, limits, folders, the watchdog."""

import asyncio
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.events import Tell
from notebook_cluster.agent.kernels.programs import Programs, Watchdog
from notebook_cluster.agent.machine import machine_id
from notebook_cluster.agent.sharing.admission import Admission, StartRefused
from notebook_cluster.processors import NodeCount
from notebook_cluster.protocol.peer import Device
from notebook_cluster.security import runtime_directory

_TRIES = 4
_PAUSE_S = 0.005


class DeviceLeases:
    """Who uses which accelerator of this machine: one locked file for each device in use.

    The lock is an flock, so the operating system gives it back when the agent ends in whatever way; the file's text
    names the cluster. Agents of the same user share the folder, so a GPU serves one cluster at a time although several
    agents may run on one machine.

    Args:
        directory: the folder of the lock files, made 0700 when it is missing.
        machine: in front of every file name, for home folders that several machines share.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self._directory = directory
        self._machine = machine
        self._held: dict[str, int] = {}

    def take(self, device: str, cluster: str) -> str | None:
        """Lease ``device`` for ``cluster``: None when that worked, else the name of the cluster that has it."""
        if device in self._held:
            return self._holder(device)
        descriptor = self._open(device)
        for attempt in range(_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Another agent that only looks (holders) has the file locked for a moment.
                if attempt == _TRIES - 1:
                    holder = _read(descriptor)
                    os.close(descriptor)
                    return holder
                time.sleep(_PAUSE_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, cluster.encode(), 0)
        self._held[device] = descriptor
        return None

    def give_back(self, device: str) -> None:
        """End the lease of ``device``; nothing when there is none."""
        descriptor = self._held.pop(device, None)
        if descriptor is not None:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)

    def holders(self, devices: Iterable[str]) -> dict[str, str]:
        """Device -> name of the cluster that uses it, for those of ``devices`` that are in use by any agent."""
        found = {}
        for device in devices:
            holder = self._holder(device)
            if holder is not None:
                found[device] = holder
        return found

    def close(self) -> None:
        """End all leases of this agent."""
        for device in list(self._held):
            self.give_back(device)

    def _holder(self, device: str) -> str | None:
        if device in self._held:
            return _read(self._held[device])
        if not self._path(device).exists():
            return None
        descriptor = self._open(device)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(descriptor)
        finally:
            os.close(descriptor)
        return None

    def _open(self, device: str) -> int:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(self._path(device), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _path(self, device: str) -> Path:
        return self._directory / f"{self._machine}-{device.replace(':', '-')}.lock"


def _read(descriptor: int) -> str:
    return os.pread(descriptor, 256, 0).decode(errors="replace") or "another cluster"


@dataclass
class Resources:
    """Of one agent. ``peer``: its name."""

    peer: str
    devices: Devices
    watchdog: Watchdog
    sockets: Path
    """The agent's 0700 socket folder."""
    directory: Path
    """The agent's data folder."""
    leases_changed: Callable[[], None]
    admission: Admission
    tell: Tell
    leases: DeviceLeases = field(default_factory=lambda: DeviceLeases(runtime_directory() / "leases", machine_id()))
    node_count: NodeCount = field(default_factory=lambda: NodeCount(runtime_directory() / "nodes", machine_id()))
    programs: Programs = field(default_factory=Programs)
    devices_known: asyncio.Event = field(default_factory=asyncio.Event)
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    """For the kernels' sockets: one I/O thread less in the way of the link."""

    def __post_init__(self) -> None:
        self.programs.own(self.watchdog.pid)

    def close(self) -> None:
        """End what is left, give everything back; call when no kernel runs."""
        self.programs.end_orphans()
        self.watchdog.close()
        self.leases.close()
        self.node_count.close()
        # Kernels that had to be killed leave sockets behind.
        shutil.rmtree(self.sockets, ignore_errors=True)
        self.context.destroy(linger=0)

    def shared_devices(self) -> list[Device]:
        """Those that nodes may use, with the memory that they may."""
        return [self.admission.limited(device) for device in self.devices.found if self.admission.permits(device)]

    def choose_device(self, wanted: str, cluster: str) -> str:
        """``wanted``, or without a wish the best that is free; leased for ``cluster`` unless it is the processor.

        Raises:
            StartRefused: there is no such device, it is not shared, or another cluster uses it.
        """
        shared = [device.id for device in self.shared_devices()]
        if wanted and wanted not in shared:
            if wanted in [device.id for device in self.devices.found]:
                raise StartRefused(
                    f"{self.peer} does not share {wanted}, only {', '.join(shared) or 'nothing'}: use one of those, or "
                    "ask its owner for other --devices"
                )
            raise StartRefused(f"{self.peer} has no device {wanted[:80]!r}: it has {', '.join(shared)}")
        if wanted == "cpu":
            return wanted
        accelerators = [device.id for device in self.devices.accelerators() if device.id in shared]
        for device in [wanted] if wanted else accelerators:
            holder = self.leases.take(device, cluster)
            if holder is None:
                self.leases_changed()
                return device
            if wanted:
                raise StartRefused(
                    f"{device} of {self.peer} is used by {holder}: remove that node there, or use device 'cpu'"
                )
        if "cpu" not in shared:
            raise StartRefused(
                f"{self.peer} shares only {', '.join(shared) or 'devices that it does not have'}, none of them free: "
                "remove a node there, or ask its owner for other --devices"
            )
        return "cpu"
