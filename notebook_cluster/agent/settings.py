"""How an agent is asked to run, and what it says when it does."""

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from notebook_cluster.security import same_user_keys

DEFAULT_LEASE_S = 600.0


@dataclass(frozen=True)
class AgentSettings:
    """How an agent runs.

    ``directory``: its data folder (working folders, kernel logs and, when shared, its identity). ``private``: it
    serves the one coordinator that started it: a new identity, no mDNS, and it ends with its last cluster.
    ``lease``: seconds of awake time without its coordinator after which a cluster's kernels are ended.
    """

    name: str
    directory: Path
    private: bool = False
    bind: str = "*"
    port: int = 0
    lease: float = DEFAULT_LEASE_S

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise ValueError(f"lease {self.lease}: it must be above 0 seconds")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port}: it must be between 0 (any free one) and 65535")


class Ready(msgspec.Struct, frozen=True):
    """How to reach a running agent."""

    public_key: str
    port: int
    pid: int
    name: str


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
