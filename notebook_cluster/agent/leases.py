"""Who uses which accelerator of this machine: one locked file for each device in use.

The lock is an flock, so the operating system gives it back when the agent ends in whatever way; the file's text names
the cluster. Agents of the same user share the folder, so a GPU serves one cluster at a time although several agents
may run on one machine.
"""

import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path

_TRIES = 4
_PAUSE_S = 0.005


class DeviceLeases:
    """The leases that this agent holds, and a look at those of others.

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
