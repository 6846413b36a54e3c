"""AMD GPUs, through the files that the amdgpu driver keeps in sysfs."""

import re
from pathlib import Path

from notebook_cluster.protocol.peer import Device, DeviceSample

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
