"""Which keys of other people and machines this user trusts: one private JSON file for each purpose, written by pairing
and by ``notebook-cluster trust``, read anew by everybody as soon as it changed.
"""

import contextlib
import fcntl
import getpass
import json
import logging
import os
import platform
import re
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from notebook_cluster.protocol import check_name
from notebook_cluster.security.identity import data_directory, fingerprint, is_key, private_directory, write_private

MAX_ENTRIES = 1000
MAX_OWNER = 100
"""Characters of an owner."""
_MAX_BYTES = 1_000_000
_ADDRESS = re.compile(r"([A-Za-z0-9_.%-]{1,253}|\[[0-9A-Fa-f:.%A-Za-z]{2,80}\]):([1-9][0-9]{0,4})")
_MISSING = (0, 0, 0, 0, 0)
_log = logging.getLogger(__name__)

Stamp = tuple[int, int, int, int, int]
"""Time of the last change (ns), size, inode, mode and user of a file."""


def check_owner(owner: str) -> str:
    """Return ``owner`` (``user@machine``, for people), or raise ValueError: 1 to 100 printable characters."""
    if not 1 <= len(owner) <= MAX_OWNER or not owner.isprintable() or owner != owner.strip():
        raise ValueError(f"owner {owner[:MAX_OWNER]!r} is not usable: use 1 to {MAX_OWNER} printable characters")
    return owner


def owner() -> str:
    """``user@machine`` of this process, as others see it when they pair."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"user{os.getuid()}"
    text = f"{user}@{platform.node() or 'localhost'}"
    return "".join(character for character in text if character.isprintable()).strip()[:MAX_OWNER].strip()


@dataclass(frozen=True)
class Trusted:
    """A key that is trusted, and what its owner said about it when it was paired. ValueError for an unusable field."""

    name: str
    key: str
    owner: str
    address: str = ""
    """``HOST:PORT`` of its link where it was last reached, or empty."""
    since: float = 0.0
    """Unix time of the pairing."""

    def __post_init__(self) -> None:
        check_name(self.name, "trusted")
        check_owner(self.owner)
        if not is_key(self.key):
            raise ValueError(f"{self.key!r:.60} is not a CURVE public key: it needs 40 characters of Z85")
        port = _ADDRESS.fullmatch(self.address)
        if self.address and (port is None or int(port[2]) > 65535):
            raise ValueError(f"address {self.address!r:.80} is not usable: write it as HOST:PORT")
        if not 0 <= self.since < 1e11:
            raise ValueError(f"{self.since!r} is not a time")


class KeyChanged(ValueError):
    """A name that is known comes with another key than before: nothing was changed."""


class TrustStore:
    """The trusted keys in ``path``.

    Questions (:meth:`entries`, :meth:`find`, :meth:`named`) cost one ``stat`` while the file is as it was; when it is
    damaged or open to other users, nobody is trusted and the reason is logged. Changes, and :meth:`read`, raise it. Any
    number of threads and processes may use a store at the same time.
    """

    def __init__(self, path: Path, unique: Literal["name", "owner"]) -> None:
        """``unique``: which field belongs to one key only, so that another key for it is refused."""
        self.path = path
        self._unique = unique
        self._known: tuple[Stamp, list[Trusted]] | None = None
        self._reading = threading.Lock()

    def entries(self) -> list[Trusted]:
        """All of them; none when the file cannot be trusted (logged)."""
        with self._reading:
            stamp = self._stamp()
            if self._known is None or self._known[0] != stamp:
                try:
                    self._known = self._load()
                except (OSError, ValueError) as error:
                    _log.error("nobody is trusted: %s", error)
                    self._known = stamp, []
            return list(self._known[1])

    def read(self) -> list[Trusted]:
        """All of them.

        Raises:
            ValueError: the file is damaged; the text names it and the way out.
            PermissionError: other users can read or write it.
        """
        return self._load()[1]

    def find(self, key: str) -> Trusted | None:
        """The entry of ``key``."""
        return next((entry for entry in self.entries() if entry.key == key), None)

    def named(self, name: str) -> list[Trusted]:
        """The entries called ``name``."""
        return [entry for entry in self.entries() if entry.name == name]

    def add(self, entry: Trusted) -> None:
        """Trust ``entry``; replaces an earlier entry of the same key.

        Raises:
            KeyChanged: its name (or owner) is known with another key.
            ValueError: the file is damaged, or holds 1000 entries.
        """

        def change(entries: list[Trusted]) -> list[Trusted]:
            for known in entries:
                if known.key != entry.key and getattr(known, self._unique) == getattr(entry, self._unique):
                    raise KeyChanged(self._key_changed(known, entry))
            others = [known for known in entries if known.key != entry.key]
            if len(others) >= MAX_ENTRIES:
                raise ValueError(
                    f"{self.path} holds {MAX_ENTRIES} keys: remove some with 'notebook-cluster trust remove NAME'"
                )
            return [*others, entry]

        self._change(change)

    def remove(self, what: str) -> list[Trusted]:
        """Trust no more whoever has ``what`` as name, owner or fingerprint; returns those entries, [] for nobody.

        Raises:
            ValueError: the file is damaged.
        """
        removed: list[Trusted] = []

        def change(entries: list[Trusted]) -> list[Trusted]:
            removed.extend(entry for entry in entries if what in (entry.name, entry.owner, fingerprint(entry.key)))
            return [entry for entry in entries if entry not in removed]

        self._change(change)
        return removed

    def set_address(self, key: str, address: str) -> None:
        """Remember where ``key`` was last reached (``HOST:PORT``); nothing happens for a key that is not trusted.

        Raises:
            ValueError: an unusable address, or the file is damaged.
        """
        if (known := self.find(key)) is None or known.address == address:
            return
        self._change(
            lambda entries: [replace(entry, address=address) if entry.key == key else entry for entry in entries]
        )

    def _change(self, change: Callable[[list[Trusted]], list[Trusted]]) -> None:
        """Write what ``change`` makes of the entries, while no other process can write."""
        with self._locked():
            before = self.read()
            after = change(list(before))
            if after != before:
                write_private(self.path, json.dumps([asdict(entry) for entry in after], indent=1).encode())
                with self._reading:
                    self._known = None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A file of its own carries the lock, because each change puts a new file in the place of the old one."""
        private_directory(self.path.parent)
        descriptor = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _stamp(self) -> Stamp:
        try:
            status = self.path.stat()
        except OSError:
            return _MISSING
        return _stamp(status)

    def _load(self) -> tuple[Stamp, list[Trusted]]:
        """What is in the file, with the stamp of exactly this content: the descriptor is asked, not the path."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return _MISSING, []
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            self._check_access(status)
            content = file.read(_MAX_BYTES + 1)
        try:
            if len(content) > _MAX_BYTES:
                raise ValueError(f"over {_MAX_BYTES} bytes")
            entries = [Trusted(**record) for record in json.loads(content)]
            if len({entry.key for entry in entries}) != len(entries):
                raise ValueError("a key is there twice")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{self.path} is damaged ({error}): delete it, then pair again with those you want to trust"
            ) from None
        return _stamp(status), entries

    def _check_access(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{self.path} is not a file: remove it, then pair again")
        if status.st_uid != os.getuid():
            raise PermissionError(
                f"{self.path} belongs to user {status.st_uid}, not to you: remove it, then pair again"
            )
        if status.st_mode & 0o077:
            raise PermissionError(
                f"{self.path} has mode {status.st_mode & 0o777:04o}, so other users may have added keys: delete it and "
                f"pair again, or run 'chmod 600 {self.path}' if nobody else uses this machine"
            )

    def _key_changed(self, known: Trusted, entry: Trusted) -> str:
        who: str = getattr(entry, self._unique)
        return (
            f"{who!r} is known with key {fingerprint(known.key)}, but now has key {fingerprint(entry.key)}: somebody "
            "may pretend to be it. If it was really installed anew, run "
            f"'notebook-cluster trust remove {who}' and pair again"
        )


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode, status.st_uid


def trusted_peers() -> TrustStore:
    """The peers that coordinators of this user trust: one key for each name."""
    return TrustStore(data_directory() / "trusted_peers.json", "name")


def trusted_coordinators(directory: Path) -> TrustStore:
    """The coordinators that the agent with this data ``directory`` trusts: one key for each owner."""
    return TrustStore(private_directory(directory) / "trusted_coordinators.json", "owner")
