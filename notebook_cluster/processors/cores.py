"""The cores that this process may use."""

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def threads_for(nodes: int, cores: int | None = None) -> int:
    """Threads of one of ``nodes`` nodes: ``max(1, cores // nodes)``; ``cores`` is by default :func:`usable_cores`."""
    return max(1, (usable_cores() if cores is None else cores) // max(1, nodes))


def usable_cores(root: Path = _ROOT) -> int:
    """Cores that this process may run on, at least 1.

    On Linux the cores of its affinity (two hardware threads of one core are one, as torch counts them), or the quota
    of its control group (``docker run --cpus 2``) where that is less. macOS knows neither: the performance cores.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = _physical(frozenset(os.sched_getaffinity(0)), root)
    else:
        cores = (_performance_cores() if sys.platform == "darwin" else None) or os.cpu_count() or 1
    quota = _quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


@functools.lru_cache(maxsize=16)
def _physical(processors: frozenset[int], root: Path) -> int:
    """How many cores ``processors`` are; each its own where the system does not say. One file each: not every cell."""
    found = set()
    for processor in processors:
        siblings = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        found.add(_text(siblings) or str(processor))
    return len(found)


def _performance_cores() -> int | None:
    """Of an Apple processor: torch leaves the efficiency cores out as well."""
    import ctypes

    value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(b"hw.perflevel0.physicalcpu", ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed or value.value < 1 else value.value


def _quota(root: Path) -> float | None:
    """The smallest processor quota of the control groups that this process is in, in cores; None without one."""
    quotas = [_quota_of(folder) for folder in _control_groups(root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of its control groups and of those above them, of version 2 and 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be that of the host, of which only the last part, the root, can be seen.
        mount = root / ("sys/fs/cgroup/cpu" if controllers else "sys/fs/cgroup")
        inner = Path(path.lstrip("/"))
        yield from (mount / folder for folder in (inner, *inner.parents) if ".." not in folder.parts)


def _quota_of(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / "cpu.cfs_quota_us"),
        _text(folder / "cpu.cfs_period_us"),
    ]
    try:
        quota, period = (float(word) for word in words)
    except ValueError:
        return None  # "max", or no such file
    return quota / period if quota > 0 and period > 0 else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""
