"""NVIDIA GPUs, through NVML: no CUDA context is made, so the agent takes no memory on the GPU."""

import importlib
import logging
import os
from collections.abc import Callable
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
