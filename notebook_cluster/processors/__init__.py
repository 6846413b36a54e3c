"""What a node has of this machine: threads, which are its processors divided by the nodes that run on it, and memory.

Every library that computes on the processor takes all of its cores. Two nodes that do so on one machine take turns
on each core and wait for each other's threads at each operation, which makes small models 20 to 35 times slower. So
each node gets ``cores // nodes`` threads, see :func:`threads_for`, and environment variables by which libraries learn
their part.

Each agent tells how many nodes it runs in a locked file with its number in it. The lock is an flock, so the operating
system gives it back when the agent ends in whatever way, and what it had is not counted any more. Whoever wants to know
reads the files that are locked.

A container has less memory than its machine: :func:`free_memory`, :func:`machine_memory`.

May import: nothing of this package. Called by: ``agent`` (which counts, and starts kernels), ``node`` (which looks at
the start of each cell), ``training`` and ``magics`` (what rounds take).
"""

import contextlib
import fcntl
import functools
import os
import sys
import uuid
import warnings
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

__all__ = [
    "PLACE", "NodeCount", "count_nodes", "free_memory", "machine_memory", "thread_variables", "threads_for",
    "usable_cores", "variables_of_ours",
]  # fmt: skip

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
    """The performance cores of an Apple processor: torch leaves the efficiency cores out as well."""
    import ctypes

    value, size = ctypes.c_int32(0), ctypes.c_size_t(4)
    ask = ctypes.CDLL(None).sysctlbyname
    failed = ask(b"hw.perflevel0.physicalcpu", ctypes.byref(value), ctypes.byref(size), None, 0)
    return None if failed or value.value < 1 else value.value


def _quota(root: Path) -> float | None:
    """The smallest processor quota of the control groups that this process is in, in cores; None without one."""
    quotas = [_quota_of(folder) for folder, _ in _control_groups("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _control_groups(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of this process's control groups for ``cpu`` or ``memory``, and of those above them, each with its
    version: 1 or 2."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # In a container the path may be that of the host, of which only the last part, the root, can be seen.
        mount = root / (f"sys/fs/cgroup/{controller}" if controllers else "sys/fs/cgroup")
        inner, version = Path(path.lstrip("/")), 1 if controllers else 2
        yield from ((mount / folder, version) for folder in (inner, *inner.parents) if ".." not in folder.parts)


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
    """What a file of the system says, without the space around it; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def free_memory(root: Path = _ROOT) -> int:
    """Bytes of RAM that programs can still take, or of this process's control group where that allows less."""
    import psutil

    return int(min([psutil.virtual_memory().available, *(max(0, most - used) for most, used in _memory_limits(root))]))


def machine_memory(root: Path = _ROOT) -> tuple[int, int]:
    """(bytes that programs can still take, bytes for all of them): of RAM and swap, or of this process's control group
    (a container, a job of Slurm) where that allows less. macOS moves what rests to disk by itself: there all that is
    not wired counts as free."""
    import psutil

    ram = psutil.virtual_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # containers may not say how much was swapped, which nobody asks here
        swap = psutil.swap_memory()
    free, total = ram.available + swap.free, ram.total + swap.total
    if sys.platform == "darwin":
        free = max(free, ram.total - ram.wired)
    for limit, used in _memory_limits(root):
        free, total = min(free, max(0, limit - used)), min(total, limit)
    return free, total


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use less what the system can drop) of this process's control groups and those above them."""
    for folder, version in _control_groups("memory", root):
        limit, used = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
        most, now = (_text(folder / f"memory.{name}") for name in (limit, used))
        if most.isdigit() and now.isdigit():
            rows = [row.split() for row in _text(folder / "memory.stat").splitlines()]
            files = sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "active_file"))
            yield int(most), max(0, int(now) - files)


OURS = "NOTEBOOK_CLUSTER_THREADS"
"""``2:OMP_NUM_THREADS,MKL_NUM_THREADS``: what was set by an agent, and to what. A program that a node starts has it
too, so that another agent below it does not take these for the user's."""
_ALL = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Either of them, set by the user, is meant for everything: torch follows both, OpenBLAS the first."""
_OTHERS = ("OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def thread_variables(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """What to put on top of ``environment`` for ``threads`` threads; what the user has set in it stays.

    Empty when the user has set OMP_NUM_THREADS or MKL_NUM_THREADS.
    """
    ours = variables_of_ours(environment)
    if any(name in environment and name not in ours for name in _ALL):
        return {}
    names = [name for name in (*_ALL, *_OTHERS) if name not in environment or name in ours]
    return dict.fromkeys(names, str(threads)) | {OURS: f"{threads}:{','.join(names)}"}


def variables_of_ours(environment: Mapping[str, str]) -> list[str]:
    """The variables in ``environment`` that an agent has set and nobody has changed since."""
    threads, _, names = environment.get(OURS, "").partition(":")
    ours = [name for name in names.split(",") if name in (*_ALL, *_OTHERS) and environment.get(name) == threads]
    # Whoever has set one of these for everything has set it for the others as well.
    changed = any(name in names.split(",") and name not in ours for name in _ALL)
    return [] if changed else ours


PLACE = "NOTEBOOK_CLUSTER_NODES"
"""The variable that tells a node where all agents of its user say how many nodes they run."""
_WIDTH = 8
_MOST = 10_000


class NodeCount:
    """The nodes of one agent, told to the others.

    Args:
        directory: the folder of the files, the same for all agents of a user; made 0700 when it is missing.
        machine: in front of every file name, for home folders that several machines share.
    """

    def __init__(self, directory: Path, machine: str) -> None:
        self._directory = directory
        self._machine = machine
        self._nodes: set[Hashable] = set()
        self._path: Path | None = None
        self._file: int | None = None

    @property
    def place(self) -> str:
        """What :func:`count_nodes` takes, in whatever process."""
        return str(self._directory / self._machine)

    def add(self, node: Hashable) -> None:
        """``node`` is about to start.

        Raises:
            OSError: the others cannot be told: the folder is not there to be written, or takes no locks.
        """
        self._nodes.add(node)
        self._tell()

    def drop(self, node: Hashable) -> None:
        """``node`` is gone; nothing when it never was."""
        if node in self._nodes:
            self._nodes.discard(node)
            with contextlib.suppress(OSError):
                self._tell()

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None and self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _tell(self) -> None:
        if self._file is None:
            self._file = self._open()
        os.pwrite(self._file, f"{len(self._nodes):<{_WIDTH}}".encode(), 0)

    def _open(self) -> int:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(self.place)
        while True:
            self._path = Path(f"{self.place}-{os.getpid()}-{uuid.uuid4().hex[:8]}.nodes")
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                os.close(file)
                self._path.unlink(missing_ok=True)
                raise
            if os.fstat(file).st_nlink:
                return file
            os.close(file)  # another agent took it for an abandoned one, before it was locked


def count_nodes(place: str) -> int:
    """Nodes of all agents that run and tell it at ``place`` (:attr:`NodeCount.place`); 0 when there are none."""
    count = 0
    for path in _files(place):
        with contextlib.suppress(OSError, ValueError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if not _is_abandoned(file):
                    count += min(max(int(os.pread(file, _WIDTH, 0) or b"0"), 0), _MOST)
            finally:
                os.close(file)
    return count


def _files(place: str) -> list[Path]:
    base = Path(place)
    with contextlib.suppress(OSError):
        return [path for path in base.parent.iterdir() if path.name.startswith(base.name) and path.suffix == ".nodes"]
    return []


def _is_abandoned(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_abandoned(place: str) -> None:
    """Files of agents that were killed."""
    for path in _files(place):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _is_abandoned(file):
                    path.unlink()
            finally:
                os.close(file)
