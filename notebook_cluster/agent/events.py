"""What a shared agent tells: the person at its machine, as it happens, and the same user's other programs.

A shared agent keeps ``<jupyter runtime>/notebook_cluster/sharing/<pid>.json`` (0600) up to date; whoever shows the code
elsewhere reads it there, so that the agent alone knows what is so.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from notebook_cluster.security import private_directory, runtime_directory, write_private

EventKind = Literal[
    "code-opened",
    "code-closed",
    "code-dead",
    "attempt",
    "paired",
    "dial",
    "cluster-started",
    "cluster-ended",
    "node-started",
    "node-ended",
    "node-refused",
    "confirm",
    "confirm-over",
    "kept",
    "head",
    "limit",
    "trust-removed",
    "slept",
    "warning",
]


@dataclass(frozen=True)
class SharingEvent:
    """One thing that happened; ``text`` says all of it in one line, the other fields are for those who want more.

    - ``code-opened``: coordinators may pair with ``code`` on ``port``; ``code-closed``: it was used, or its time is
      over; ``code-dead``: too many wrong tries, a new one must be asked for (:meth:`.service.Agent.new_code`)
    - ``attempt``: somebody tried to pair; ``paired``: with the coordinators of ``owner``
    - ``dial``: a connection to a cluster that this agent makes changed its condition
    - ``cluster-started``, ``cluster-ended``, ``node-started``, ``node-ended``, ``node-refused``: of ``owner``
    - ``confirm``: the person is asked whether ``node`` may start: :meth:`.service.Agent.answer` with ``ticket``, which
      ``confirm-over`` takes back (``text``: why)
    - ``kept``: a checkpoint was kept before kernels end; ``limit``: a limit ended something
    - ``head``: a cluster of ``owner`` is led from here, or is no more
    - ``trust-removed``: the kernels of ``owner`` end; ``slept``: this machine was asleep; ``warning``: the rest
    """

    kind: EventKind
    text: str
    owner: str = ""
    """``user@machine``, as paired; this user's own name for clusters of the same user."""
    cluster: str = ""
    node: str = ""
    code: str = ""
    port: int = 0
    ticket: int = 0


Tell = Callable[[SharingEvent], None]
"""Hears what happens, on the agent's loop; must not wait."""


class AgentReady(msgspec.Struct, frozen=True):
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


class SharedMachine(msgspec.Struct, frozen=True):
    """What the file holds. ``code`` and ``pairing_port`` are empty and 0 while no code is open."""

    name: str
    pid: int
    started: float
    """When the process was created, as the system says: another process may get its id later."""
    host: str
    port: int
    pairing_port: int
    code: str
    public_key: str = ""


class SharingFile:
    """The file of one agent; its methods take what the agent says. On its loop, until :meth:`close`."""

    def __init__(self) -> None:
        self._said: SharedMachine | None = None
        self._path: Path | None = None

    def ready(self, ready: AgentReady) -> None:
        """The agent can be reached. What agents left that were killed goes."""
        shared_machines()
        self._write(
            SharedMachine(
                name=ready.name, pid=ready.pid, started=psutil.Process(ready.pid).create_time(),
                host=ready.host, port=ready.port,
                pairing_port=ready.pairing_port, code=ready.code, public_key=ready.public_key,
            )
        )  # fmt: skip

    def happened(self, event: SharingEvent, host: str = "") -> None:
        """Another code is open, or none any more; ``host``: where this machine is reached now."""
        if self._said is None:
            return
        if event.kind == "code-opened":
            host = host or self._said.host
            self._write(msgspec.structs.replace(self._said, host=host, code=event.code, pairing_port=event.port))
        elif event.kind in ("code-closed", "code-dead"):
            self._write(msgspec.structs.replace(self._said, code="", pairing_port=0))

    def _write(self, said: SharedMachine) -> None:
        self._said = said
        self._path = _folder() / f"{said.pid}.json"
        write_private(self._path, msgspec.json.encode(said))

    def close(self) -> None:
        """This machine is not shared any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def shared_machines() -> list[SharedMachine]:
    """What this user's running agents say, the oldest first. Files of processes that have ended are removed."""
    found: list[SharedMachine] = []
    folder = _folder()
    for path in folder.glob(".[0-9]*.json.*"):
        # An agent was killed while it wrote.
        with contextlib.suppress(OSError, ValueError):
            if not psutil.pid_exists(int(path.name.split(".")[1])):
                path.unlink()
    for path in folder.glob("[0-9]*.json"):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            said = msgspec.json.decode(path.read_bytes(), type=SharedMachine)
            if _runs(said):
                found.append(said)
            else:
                path.unlink()
    return sorted(found, key=lambda said: said.started)


def _runs(said: SharedMachine) -> bool:
    try:
        process = psutil.Process(said.pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - said.started) < 1.0)
    except psutil.Error:
        return False


def _folder() -> Path:
    return private_directory(runtime_directory() / "sharing")
