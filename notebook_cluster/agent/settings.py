"""How an agent is asked to run, and what it says when it does."""

import fcntl
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from notebook_cluster.agent.limits import Limits
from notebook_cluster.security import same_user_keys

DEFAULT_LEASE_S = 600.0
DEFAULT_CODE_MINUTES = 120.0


@dataclass(frozen=True)
class AgentSettings:
    """How an agent runs.

    ``directory``: its data folder (working folders, kernel logs and, when shared, its identity and whom it trusts).
    ``private``: it serves the one coordinator that started it: a new identity, no mDNS, no pairing, and it ends with
    its last cluster. ``lease``: seconds of awake time without its coordinator after which a cluster's kernels are
    ended.

    ``code``: with which coordinators pair, any number of them for ``code_minutes``; empty: codes are made up, one for
    each coordinator. ``pairing``: False opens no code. ``dial``: ``HOST:PORT`` of a cluster to go to, with ``code``
    being that cluster's (empty: paired before); such an agent opens no code of its own. ``limits``: what its owner
    allows.
    """

    name: str
    directory: Path
    private: bool = False
    bind: str = "*"
    port: int = 0
    lease: float = DEFAULT_LEASE_S
    code: str = ""
    code_minutes: float = DEFAULT_CODE_MINUTES
    pairing: bool = True
    dial: str = ""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.lease > 0:
            raise ValueError(f"lease {self.lease}: it must be above 0 seconds")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port}: it must be between 0 (any free one) and 65535")
        if not self.code_minutes > 0:
            raise ValueError(f"a code that is valid for {self.code_minutes:g} minutes: it must be above 0")


class Ready(msgspec.Struct, frozen=True):
    """How to reach a running agent. ``pairing_port`` and ``code`` are 0 and empty when no code is open."""

    public_key: str
    port: int
    pid: int
    name: str
    pairing_port: int = 0
    code: str = ""
    hosts: list[str] = []
    """IPv4 addresses of this machine, 127.0.0.1 last."""
    fingerprint: str = ""

    @property
    def host(self) -> str:
        """The address of this machine that others are most likely to reach."""
        return self.hosts[0] if self.hosts else "127.0.0.1"


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
