"""The processor and its RAM, through psutil."""

import platform
from pathlib import Path

import psutil

from notebook_cluster.protocol.peer import Device, DeviceSample


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
