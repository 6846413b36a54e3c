"""What the owner of a machine allows those who use it."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """All of them off by default.

    Attributes:
        max_nodes: kernels at a time, of all clusters together.
        devices: ids (``cuda:0``) or kinds (``cuda``, ``cpu``) that nodes may use; empty: all.
        memory_bytes: resident memory of all kernels together; over it the largest is ended.
        idle_only: kernels only while nobody uses the machine.
        on_power: battery level in percent; below it, and not on mains, there are no kernels.
        confirm: the person at the machine is asked before each start.
        until: wall-clock time (seconds since 1970) at which sharing ends.
        files_bytes: of files that each cluster may send here with ``%cluster send``.
        owners: whose clusters may have kernels at a time. All kernels run as one user of this machine, so those of
            several owners can read each other's files and run code in each other.
    """

    max_nodes: int | None = None
    devices: tuple[str, ...] = ()
    memory_bytes: int | None = None
    idle_only: bool = False
    on_power: float | None = None
    confirm: bool = False
    until: float | None = None
    files_bytes: int | None = None
    owners: int = 1

    def __post_init__(self) -> None:
        if self.max_nodes is not None and self.max_nodes < 1:
            raise ValueError(f"at most {self.max_nodes} nodes: it must be at least 1")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"{self.memory_bytes} bytes of memory: it must be above 0")
        if self.files_bytes is not None and self.files_bytes < 0:
            raise ValueError(f"{self.files_bytes} bytes of files: it must be 0 or more")
        if self.owners < 1:
            raise ValueError(f"{self.owners} owners at a time: it must be at least 1")
        if self.on_power is not None and not 0 <= self.on_power <= 100:
            raise ValueError(f"battery level {self.on_power:g}: it must be between 0 and 100 percent")

    def lines(self) -> list[str]:
        """For people, one line each; empty when nothing is limited."""
        lines = []
        if self.max_nodes is not None:
            lines.append(f"at most {self.max_nodes} {'node' if self.max_nodes == 1 else 'nodes'}")
        if self.owners > 1:
            lines.append(f"at most {self.owners} owners at a time, who can reach each other's kernels")
        if self.devices:
            lines.append(f"only on {', '.join(self.devices)}")
        if self.memory_bytes is not None:
            lines.append(f"{gigabytes(self.memory_bytes)} of memory for all nodes together")
        if self.files_bytes is not None:
            lines.append(f"{gigabytes(self.files_bytes)} of files from each cluster")
        if self.idle_only:
            lines.append("only while nobody uses the machine")
        if self.on_power is not None:
            lines.append(f"on battery only above {self.on_power:g} %")
        if self.confirm:
            lines.append("its owner is asked before each start")
        if self.until is not None:
            lines.append(f"until {time.strftime('%H:%M', time.localtime(self.until))}")
        return lines


def gigabytes(size: float) -> str:
    """``8 GB``, ``1.5 GB``, ``200 MB``: decimal units."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
