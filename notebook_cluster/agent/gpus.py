"""GPUs with memory of their own: of NVIDIA, through NVML, and of AMD, through the files that the amdgpu driver keeps in
sysfs.

No CUDA context is made, so the agent takes no memory on the GPU.
"""

import importlib
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from notebook_cluster.protocol.peer import Device, DeviceSample

log = logging.getLogger(__name__)


class CudaProbe:
    """Devices ``cuda:0``, ``cuda:1`` ... in NVML's order, which is PCI order.

    A GPU in MIG mode is listed as its MIG instances, the only way in which CUDA can use it. Where this process has
    ``CUDA_VISIBLE_DEVICES`` (a scheduler gave it some of the GPUs) only those are listed.
    """

    def __init__(self, nvml: ModuleType | None = None, visible: str | None = None) -> None:
        self._given = nvml
        self._visible = visible if visible is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._identifiers: dict[str, str] = {}

    def probe(self) -> list[Device]:
        """The GPUs that NVML lists; empty without an NVIDIA driver."""
        self._handles.clear()
        self._identifiers.clear()
        if not self._start():
            return []
        devices = []
        for index, handle in enumerate(self._listed()):
            uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
            if not _is_visible(self._visible, index, uuid):
                continue
            identifier = f"cuda:{index}"
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            name = _text(self._ask(self._nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU")
            self._handles[identifier] = handle
            self._identifiers[identifier] = uuid
            devices.append(
                Device(id=identifier, kind="cuda", name=name, memory_bytes=memory.total if memory is not None else 0)
            )
        return devices

    def sample(self) -> list[DeviceSample]:
        """Memory, utilisation and temperature of each GPU; what the driver does not tell is None."""
        samples = []
        for identifier, handle in self._handles.items():
            memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, handle)
            load = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, handle)
            temperature = self._ask(self._nvml.nvmlDeviceGetTemperature, handle, self._nvml.NVML_TEMPERATURE_GPU)
            samples.append(
                DeviceSample(
                    id=identifier,
                    memory_used=memory.used if memory is not None else 0,
                    memory_total=memory.total if memory is not None else 0,
                    load=load.gpu / 100 if load is not None else None,
                    temperature=float(temperature) if temperature is not None else None,
                )
            )
        return samples

    def process_memory(self) -> dict[int, int]:
        """Process id -> bytes of GPU memory. Inside a container NVML tells the host's ids, which match no kernel."""
        used: dict[int, int] = {}
        for handle in self._handles.values():
            for process in self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []:
                if process.usedGpuMemory is not None:
                    used[process.pid] = used.get(process.pid, 0) + process.usedGpuMemory
        return used

    def environment(self, device: str) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES with the GPU's UUID: CUDA's own numbers are in another order (fastest first)."""
        return {"CUDA_VISIBLE_DEVICES": self._identifiers[device]}

    def _start(self) -> bool:
        if self._nvml is not None:
            return True
        try:
            nvml = self._given or importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception as error:
            # No driver is the usual case; an unusable one (wrong version) deserves a line in the log.
            log.info("no NVIDIA GPU is used: %s", error)
            return False
        self._nvml = nvml
        return True

    def _listed(self) -> list[Any]:
        handles = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
            mode = self._ask(self._nvml.nvmlDeviceGetMigMode, handle)
            if mode is None or mode[0] != self._nvml.NVML_DEVICE_MIG_ENABLE:
                handles.append(handle)
                continue
            for number in range(self._ask(self._nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
                part = self._ask(self._nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
                if part is not None:
                    handles.append(part)
        return handles

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None where this GPU or driver does not tell."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _is_visible(visible: str | None, index: int, uuid: str) -> bool:
    if visible is None:
        return True
    return any(word == str(index) or (word and uuid.startswith(word)) for word in map(str.strip, visible.split(",")))


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


_AMD = "0x1002"
_CARD = re.compile(r"card(\d+)")


class RocmProbe:
    """Devices ``rocm:0``, ``rocm:1`` ... in the order of their cards.

    Args:
        drm: the folder with ``card0``, ``card1`` ...
        kfd: the device file of ROCm's driver; without it nothing can compute there, so nothing is listed.
    """

    def __init__(self, drm: Path = Path("/sys/class/drm"), kfd: Path = Path("/dev/kfd")) -> None:
        self._drm = drm
        self._kfd = kfd
        self._folders: dict[str, Path] = {}

    def probe(self) -> list[Device]:
        """Cards of AMD that have memory of their own; empty where there are none."""
        self._folders.clear()
        if not self._kfd.exists() or not self._drm.is_dir():
            return []
        cards = sorted(
            (int(match.group(1)), card) for card in self._drm.iterdir() if (match := _CARD.fullmatch(card.name))
        )
        devices: list[Device] = []
        for _, card in cards:
            folder = card / "device"
            total = _number(folder / "mem_info_vram_total")
            if _line(folder / "vendor") != _AMD or not total:
                continue
            identifier = f"rocm:{len(devices)}"
            self._folders[identifier] = folder
            name = _line(folder / "product_name") or "AMD GPU"
            devices.append(Device(id=identifier, kind="rocm", name=name, memory_bytes=total))
        return devices

    def sample(self) -> list[DeviceSample]:
        """VRAM in use, busy fraction and edge temperature of each card."""
        samples = []
        for identifier, folder in self._folders.items():
            busy = _number(folder / "gpu_busy_percent")
            sensors = sorted(folder.glob("hwmon/hwmon*/temp1_input"))
            millidegrees = _number(sensors[0]) if sensors else None
            samples.append(
                DeviceSample(
                    id=identifier,
                    memory_used=_number(folder / "mem_info_vram_used") or 0,
                    memory_total=_number(folder / "mem_info_vram_total") or 0,
                    load=busy / 100 if busy is not None else None,
                    temperature=millidegrees / 1000 if millidegrees is not None else None,
                )
            )
        return samples

    def environment(self, device: str) -> dict[str, str]:
        """HIP_VISIBLE_DEVICES with the card's number; torch then calls it ``cuda:0``.

        HIP also honours CUDA_VISIBLE_DEVICES, so that one says the same instead of hiding the card.
        """
        number = device.partition(":")[2]
        return {"HIP_VISIBLE_DEVICES": number, "CUDA_VISIBLE_DEVICES": number}

    def process_memory(self) -> dict[int, int]:
        """Empty: sysfs does not tell by process."""
        return {}


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _line(path)
    return int(text) if text.isdigit() else None
