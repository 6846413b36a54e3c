"""What a node says of the machine and the packages that its numbers come from: told when nodes compute unlike."""

import platform
import sys
from pathlib import Path

_PACKAGES = ("numpy", "torch", "mlx.core")


def about_this_process(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """``processor``, ``python``, and the versions of those of numpy, torch and mlx that are loaded."""
    found = {"processor": _processor(cpuinfo), "python": platform.python_version()}
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name.partition(".")[0]] = str(version)
    return found


def _processor(cpuinfo: Path) -> str:
    try:
        with cpuinfo.open(errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return " ".join(filter(None, (platform.system(), platform.processor() or platform.machine())))
