"""What this machine can compute on, and how full and busy it is. Never imports torch.

Each kind of device is a class with the methods of :class:`Probe`: what is there, how full and busy it is now, which
variables make a kernel see one device alone. What computes in the machine's RAM, the processor and the GPU of Apple's
processors, is at the end; :mod:`.gpus` has the others. A kind of device that this machine lacks is an empty list, never
an error. Calls may block for some milliseconds: the agent makes them in a worker thread.
"""

import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from notebook_cluster.agent.gpus import CudaProbe, RocmProbe
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


class CpuProbe:
    """Always finds exactly one device, ``cpu``; its memory is the machine's RAM."""

    def __init__(self, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
        self._cpuinfo = cpuinfo

    def probe(self) -> list[Device]:
        """The processor, with its name and the bytes of RAM."""
        return [Device(id="cpu", kind="cpu", name=self._name(), memory_bytes=psutil.virtual_memory().total)]

    def sample(self) -> list[DeviceSample]:
        """RAM in use and load since the last call (0 at the first call)."""
        memory = psutil.virtual_memory()
        return [
            DeviceSample(
                id="cpu",
                memory_used=memory.total - memory.available,
                memory_total=memory.total,
                load=psutil.cpu_percent(None) / 100,
            )
        ]

    def environment(self, device: str) -> dict[str, str]:
        """Nothing: a kernel always sees the processor."""
        return {}

    def process_memory(self) -> dict[int, int]:
        """Empty: resident memory is sampled by the agent for every kernel anyway."""
        return {}

    def _name(self) -> str:
        try:
            for line in self._cpuinfo.read_text(errors="replace").splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine() or "cpu"


def read_sysctl(name: str) -> str:
    """The value of a sysctl variable of macOS, or empty."""
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


class MpsProbe:
    """Finds ``mps`` on macOS with an arm64 processor, nothing elsewhere."""

    def __init__(
        self,
        system: str = sys.platform,
        machine: str = platform.machine(),
        sysctl: Callable[[str], str] = read_sysctl,
    ) -> None:
        self._here = system == "darwin" and machine == "arm64"
        self._sysctl = sysctl

    def probe(self) -> list[Device]:
        """The GPU, with the processor's name and the bytes of unified memory."""
        if not self._here:
            return []
        size = self._sysctl("hw.memsize")
        total = int(size) if size.isdigit() else psutil.virtual_memory().total
        name = self._sysctl("machdep.cpu.brand_string") or "Apple GPU"
        return [Device(id="mps", kind="mps", name=name, memory_bytes=total, unified=True)]

    def sample(self) -> list[DeviceSample]:
        """The machine's memory in use: unified memory has no other number without administrator's rights."""
        if not self._here:
            return []
        memory = psutil.virtual_memory()
        return [DeviceSample(id="mps", memory_used=memory.total - memory.available, memory_total=memory.total)]

    def environment(self, device: str) -> dict[str, str]:
        """Nothing: there is one such device and it cannot be hidden."""
        return {}

    def process_memory(self) -> dict[int, int]:
        """Empty: the system does not tell by process."""
        return {}
