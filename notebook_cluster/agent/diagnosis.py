"""What an agent tells the doctor about its machine: interfaces, multicast, whom it reaches, versions, clock."""

import asyncio
import importlib
import importlib.metadata
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from notebook_cluster.agent import machine
from notebook_cluster.discovery.addresses import interfaces, multicast_problem, reach
from notebook_cluster.protocol import VERSION
from notebook_cluster.protocol.names import distribution_name, is_distribution
from notebook_cluster.protocol.peer import Diagnose, Diagnosis

MAX_PACKAGES = 500
_MAX_LINE = 100
_ROCM_FILES = ("/opt/rocm/.info/version", "/sys/module/amdgpu/version")


async def diagnose(message: Diagnose) -> Diagnosis:
    """Everything that ``message`` asks for, looked at in parallel: takes about 2 s at most. Raises nothing."""
    if message.only_bytes:
        return Diagnosis(ticket=message.ticket, time=time.time())
    multicast, reached, packages, facts, found = await asyncio.gather(
        asyncio.to_thread(_guarded_multicast),
        reach(message.reach),
        asyncio.to_thread(package_versions, message.packages),
        asyncio.to_thread(machine_facts),
        asyncio.to_thread(interfaces),
    )
    # The clock last: the coordinator takes it as the time at which the answer left.
    return Diagnosis(
        ticket=message.ticket, time=time.time(), interfaces=found, multicast=multicast, reached=reached,
        packages=packages, facts=facts,
    )  # fmt: skip


def _guarded_multicast() -> str:
    try:
        return multicast_problem()
    except OSError as error:
        return f"it cannot be tested: {error}"


def package_versions(names: Sequence[str] = ()) -> dict[str, str]:
    """Version by normalised distribution name (PEP 503) of those of ``names`` that are installed here, without names
    all; at most :data:`MAX_PACKAGES`. Names that cannot be a distribution's are passed over."""
    if names:
        return machine.package_versions([name for name in names if is_distribution(name)][:MAX_PACKAGES])
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # A damaged installation has no name, or no metadata at all.
        name = distribution.metadata["Name"] if distribution.metadata is not None else None
        if name is not None and is_distribution(name) and distribution.version:
            # The first one on sys.path is the one that an import finds.
            versions.setdefault(distribution_name(name), distribution.version)
    return dict(sorted(versions.items())[:MAX_PACKAGES])


def machine_facts() -> dict[str, str]:
    """``python``, ``platform``, ``notebook-cluster``, and ``glibc``, ``cuda`` (driver), ``rocm`` where they are."""
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "notebook-cluster": VERSION,
        "glibc": platform.libc_ver()[1] if platform.system() == "Linux" else "",
        "cuda": _cuda_driver(),
        "rocm": next((text for path in _ROCM_FILES if (text := _first_line(Path(path)))), ""),
    }
    return {name: value for name, value in facts.items() if value}


def _cuda_driver() -> str:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no driver is the usual case, whatever it raises
        return ""
    try:
        version = nvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = nvml.nvmlSystemGetDriverVersion()
    except nvml.NVMLError:
        return ""
    finally:
        nvml.nvmlShutdown()
    driver = driver.decode() if isinstance(driver, bytes) else driver
    return f"{version // 1000}.{version % 1000 // 10} (driver {driver})"


def _first_line(path: Path) -> str:
    try:
        return path.read_text("utf-8").splitlines()[0].strip()[:_MAX_LINE]
    except (OSError, ValueError, IndexError):
        return ""
