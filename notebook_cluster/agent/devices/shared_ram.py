"""What computes in the machine's RAM: the processor, and the GPU of Apple's processors."""

import platform
import subprocess
import sys
from collections.abc import Callable
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
