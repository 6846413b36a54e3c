"""What this machine can compute on, and how full and busy it is. Never imports torch.

One module per kind of device, all with the methods of :class:`Probe`: what is there, how full and busy it is now,
which variables make a kernel see one device alone. A kind of device that this machine lacks is an empty list, never an
error. Calls may block for some milliseconds: the agent makes them in a worker thread.

May import: protocol. Called by: agent.
"""

from collections.abc import Sequence
from typing import Protocol

from notebook_cluster.agent.devices.cuda import CudaProbe
from notebook_cluster.agent.devices.rocm import RocmProbe
from notebook_cluster.agent.devices.shared_ram import CpuProbe, MpsProbe
from notebook_cluster.protocol.peer import Device, DeviceSample

__all__ = ["CpuProbe", "CudaProbe", "Devices", "MpsProbe", "Probe", "RocmProbe"]

HIDE_ACCELERATORS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""A node sees no accelerator but the one that was leased for it."""


class Probe(Protocol):
    """What each kind of device answers."""

    def probe(self) -> list[Device]:
        """The devices of this kind; empty where there are none."""

    def sample(self) -> list[DeviceSample]:
        """Memory (bytes), load (0 to 1) and temperature (degrees Celsius) now, one for each device of ``probe``."""

    def environment(self, device: str) -> dict[str, str]:
        """Variables that show ``device`` to a kernel, for the kind that this probe looks for."""

    def process_memory(self) -> dict[int, int]:
        """Process id -> bytes on these devices; empty where the driver does not tell."""


class Devices:
    """All devices of this machine, accelerators first, ``cpu`` last."""

    def __init__(self, probes: Sequence[Probe] | None = None) -> None:
        every: list[Probe] = [CudaProbe(), RocmProbe(), MpsProbe(), CpuProbe()]
        self._probes = every if probes is None else list(probes)
        self._owner: dict[str, Probe] = {}
        self.found: list[Device] = []

    def probe(self) -> list[Device]:
        """Look once; the result is kept in ``found``."""
        self._owner.clear()
        self.found = []
        for probe in self._probes:
            for device in probe.probe():
                self.found.append(device)
                self._owner[device.id] = probe
        return self.found

    def sample(self) -> list[DeviceSample]:
        """One sample for each device found."""
        active = {id(probe): probe for probe in self._owner.values()}
        return [sample for probe in active.values() for sample in probe.sample()]

    def process_memory(self) -> dict[int, int]:
        """Process id -> bytes on accelerators, where the driver tells."""
        used: dict[int, int] = {}
        for probe in {id(probe): probe for probe in self._owner.values()}.values():
            for pid, size in probe.process_memory().items():
                used[pid] = used.get(pid, 0) + size
        return used

    def environment(self, device: str) -> dict[str, str]:
        """Variables with which a kernel sees ``device`` and no other accelerator."""
        return HIDE_ACCELERATORS | self._owner[device].environment(device)

    def accelerators(self) -> list[Device]:
        """Accelerators, the one with the most memory first."""
        return sorted((d for d in self.found if d.kind != "cpu"), key=lambda d: -d.memory_bytes)

    def summary(self) -> str:
        """Short text for people: ``2 x NVIDIA RTX 4070``, ``Apple M2``, or ``cpu``."""
        names = [device.name for device in self.found if device.kind != "cpu"]
        if not names:
            return "cpu"
        unlike = sorted(set(names))
        return ", ".join(name if names.count(name) == 1 else f"{names.count(name)} x {name}" for name in unlike)
