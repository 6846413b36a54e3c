"""What owners have granted: for a time, the key of a head is the coordinator of one of their clusters.

A grant gives nobody more than its owner has here: it ends with the trust in the owner, holds for the one cluster, and
what the head starts counts as the owner's.
"""

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from notebook_cluster.protocol import check_name
from notebook_cluster.protocol.awake import clock_through_sleep
from notebook_cluster.protocol.clock import roughly
from notebook_cluster.protocol.heads import MOST_SECONDS, Grant
from notebook_cluster.security import fingerprint, is_key, private_directory, write_private

MOST_GRANTS = 64
"""Clusters of one owner of which a serial is remembered."""
GRANTS_FILE = "grants.json"
_MAX_BYTES = 1_000_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldGrant:
    """``until``: Unix time; 0 for one that was withdrawn, of which only the serial counts. ``owner_key``: the owner's
    public key."""

    cluster: str
    owner_key: str
    head: str
    key: str
    serial: int
    until: float

    def __post_init__(self) -> None:
        check_name(self.cluster, "cluster")
        check_name(self.head, "peer")
        if not (is_key(self.owner_key) and is_key(self.key)):
            raise ValueError("a key is not a CURVE public key")
        if not (isinstance(self.serial, int) and 0 <= self.serial < 2**63 and 0 <= self.until < 1e11):
            raise ValueError(f"serial {self.serial!r} or end {self.until!r} is none")


class GrantRefused(ValueError):
    """A grant that is not taken; one line."""


class Grants:
    """The grants in ``directory``, one private file. ``trusted(key)``: that owner may use this agent now.

    Questions may be asked from any thread; each looks whether the file has changed. How long a grant holds is counted
    on the clock of this machine from its receipt; a clock that is set back prolongs none that this process has taken.
    """

    def __init__(self, directory: Path, trusted: Callable[[str], bool]) -> None:
        self._path = directory / GRANTS_FILE
        self._trusted = trusted
        self._lock = threading.Lock()
        self._held: list[HeldGrant] = []
        self._ends: dict[HeldGrant, float] = {}
        """When each is over, on a clock that nobody sets and that goes on while the machine sleeps."""
        self._stamp: tuple[int, ...] = ()

    def take(self, owner_key: str, grant: Grant) -> None:
        """Put ``grant`` of the owner with ``owner_key`` in force, on disk before this returns.

        Raises:
            GrantRefused: it is not newer than one that came before, is not usable, or cannot be written down.
        """
        if not 0 <= grant.seconds <= MOST_SECONDS:
            raise GrantRefused(f"a grant for {grant.seconds:g} s is not taken: at most {roughly(MOST_SECONDS)}")
        until = time.time() + grant.seconds if grant.seconds else 0.0
        try:
            held = HeldGrant(grant.cluster, owner_key, grant.head, grant.key, grant.serial, until)
        except ValueError as error:
            raise GrantRefused(f"the grant cannot be used: {error}") from None
        with self._lock:
            try:
                with _locked(self._path):
                    self._refresh()
                    self._write([*self._others(held), held])
            except OSError as error:
                raise GrantRefused(f"the grant cannot be written down ({error}): make room on that machine") from None
            self._refresh()
            self._ends[held] = clock_through_sleep() + grant.seconds

    def end(self, owner_key: str, cluster: str) -> None:
        """That owner leads the cluster themselves from now on."""
        if not self._path.exists():
            return
        with self._lock, _locked(self._path):
            self._refresh()
            ended = [row for row in self._held if _place(row) == (owner_key, cluster) and row.until]
            if ended:
                self._write([replace(row, until=0.0) if row in ended else row for row in self._held])

    def find(self, key: str) -> HeldGrant | None:
        """The grant in force under which ``key`` is a head now."""
        return next((held for held in self.in_force() if held.key == key), None)

    def in_force(self) -> list[HeldGrant]:
        """All that hold now."""
        with self._lock:
            self._refresh()
            now = clock_through_sleep()
            holding = [held for held in self._held if held.until and now < self._ends[held]]
        return [held for held in holding if self._trusted(held.owner_key)]

    def _others(self, held: HeldGrant) -> list[HeldGrant]:
        """What is kept beside ``held``, which takes the place of the one of its cluster. GrantRefused."""
        known = next((row for row in self._held if _place(row) == _place(held)), None)
        if known is not None and held.serial <= known.serial:
            raise GrantRefused(
                f"grant {held.serial} for cluster {held.cluster} is not taken: grant {known.serial} came before it"
            )
        others = [row for row in self._held if row is not known]
        if any(row.key == held.key and row.until for row in others):
            raise GrantRefused(f"key {fingerprint(held.key)} is the head of another cluster here")
        same_owner = [row for row in others if row.owner_key == held.owner_key]
        if len(same_owner) < MOST_GRANTS:
            return others
        over = [row for row in same_owner if not row.until or self._ends[row] <= clock_through_sleep()]
        if not over:
            raise GrantRefused(f"{MOST_GRANTS} clusters of this owner have a head here: stop one of them first")
        oldest = min(over, key=lambda row: row.serial)
        return [row for row in others if row is not oldest]

    def _refresh(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp, self._held, before = stamp, read_grants(self._path), self._ends
        now, date = clock_through_sleep(), time.time()
        self._ends = {held: before.get(held, now + min(held.until - date, MOST_SECONDS)) for held in self._held}

    def _write(self, held: list[HeldGrant]) -> None:
        _write(self._path, held)


def withdraw_grants(directory: Path, who: str, owner_keys: Collection[str] = ()) -> list[HeldGrant]:
    """End what an agent with this data ``directory`` grants to whoever has ``who`` as cluster, head or fingerprint, and
    what the owners with ``owner_keys`` have granted; returns it. In force at once, also in an agent that runs.

    Raises:
        OSError: the file cannot be written.
    """
    path = directory / GRANTS_FILE
    if not path.exists():
        return []
    with _locked(path):
        grants = read_grants(path)
        named = [row for row in grants if who in (row.cluster, row.head, fingerprint(row.key))]
        ended = [row for row in grants if row.until and (row in named or row.owner_key in owner_keys)]
        if ended:
            _write(path, [replace(row, until=0.0) if row in ended else row for row in grants])
    return ended


def read_grants(path: Path) -> list[HeldGrant]:
    """What the file at ``path`` says, also of grants that are over; nothing where it is missing or damaged (logged):
    then nobody is a head, and owners grant again."""
    try:
        content = path.read_bytes()
        if len(content) > _MAX_BYTES:
            raise ValueError(f"over {_MAX_BYTES} bytes")
        records: Any = json.loads(content)
        return [HeldGrant(**record) for record in records]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        _log.error("%s is not readable (%s): no head is obeyed until its owner grants it again", path, error)
        return []


def _place(held: HeldGrant) -> tuple[str, str]:
    return held.owner_key, held.cluster


def _write(path: Path, grants: list[HeldGrant]) -> None:
    private_directory(path.parent)
    write_private(path, json.dumps([asdict(held) for held in grants], indent=1).encode())


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return (0,)
    return status.st_mtime_ns, status.st_size, status.st_ino


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A file of its own carries the lock, because each change puts a new file in the place of the old one."""
    private_directory(path.parent)
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
