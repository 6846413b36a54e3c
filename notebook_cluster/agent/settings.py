"""How an agent is asked to run, and what the owner of its machine allows."""

import fcntl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from notebook_cluster.memory import amount
from notebook_cluster.protocol.launches import LaunchKey
from notebook_cluster.security import same_user_keys


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
            lines.append(f"{amount(self.memory_bytes)} of memory for all nodes together")
        if self.files_bytes is not None:
            lines.append(f"{amount(self.files_bytes)} of files from each cluster")
        if self.idle_only:
            lines.append("only while nobody uses the machine")
        if self.on_power is not None:
            lines.append(f"on battery only above {self.on_power:g} %")
        if self.confirm:
            lines.append("its owner is asked before each start")
        if self.until is not None:
            lines.append(f"until {time.strftime('%H:%M', time.localtime(self.until))}")
        return lines


DEFAULT_LEASE_S = 600.0
KEEP_AFTER_S = 20.0
"""Seconds without a coordinator, which may be gone for good, after which training is kept."""
DEFAULT_CODE_MINUTES = 120.0


@dataclass(frozen=True)
class LaunchedAs:
    """What an engine started this agent as: with the key of a launch, at one of its places (or ANY_PLACE), for the
    ``start``-th time after the first. ``lifeline``: the end of standard input is a reason to leave."""

    key: LaunchKey
    place: int
    start: int = 0
    lifeline: bool = False


@dataclass(frozen=True)
class AgentSettings:
    """How an agent runs.

    ``directory``: its data folder (working folders, kernel logs and, when shared, its identity and whom it trusts).
    ``private``: it serves the one coordinator that started it: a new identity, no mDNS, no pairing, and it ends with
    its last cluster. ``lease``: seconds of awake time without its coordinator after which a cluster's kernels are
    ended. ``keep_after``: such seconds after which their training is kept, once, while they wait on.

    ``code``: with which coordinators pair, any number of them for ``code_minutes``; empty: codes are made up, one for
    each coordinator. ``pairing``: False opens no code. ``dial``: ``HOST:PORT`` of a cluster to go to, with ``code``
    being that cluster's (empty: paired before); such an agent opens no code of its own. ``launch``: an engine started
    it for the cluster at ``dial`` (several addresses have commas between), which it serves alone, unseen by others, and
    with which it ends. ``head_key``: a window started this private agent, and the coordinator with that key has its
    reception at ``dial``. ``limits``: what its owner allows.
    """

    name: str
    directory: Path
    private: bool = False
    bind: str = "*"
    port: int = 0
    lease: float = DEFAULT_LEASE_S
    keep_after: float = KEEP_AFTER_S
    code: str = ""
    code_minutes: float = DEFAULT_CODE_MINUTES
    pairing: bool = True
    dial: str = ""
    launch: LaunchedAs | None = None
    head_key: str = ""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise ValueError(f"lease {self.lease}: it must be above 0 seconds")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port}: it must be between 0 (any free one) and 65535")
        if not self.code_minutes > 0:
            raise ValueError(f"a code that is valid for {self.code_minutes:g} minutes: it must be above 0")

    @property
    def serves_one(self) -> bool:
        """It is there for one cluster: nobody else is told of it, and it ends with it."""
        return self.private or self.launch is not None


def lock_data_folder(settings: AgentSettings) -> IO[bytes]:
    """Held for the life of a shared agent: two with one identity would take each other's clusters."""
    lock = (settings.directory / "agent.lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise OSError(
            f"an agent with data folder {settings.directory} runs already: stop it, or choose another --name"
        ) from None
    if settings.name in same_user_keys("agent").values():
        lock.close()
        raise OSError(f"you share this machine as {settings.name!r} already: stop that, or choose another --name")
    return lock
