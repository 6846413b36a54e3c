"""Which coordinators may use this agent: those of the same user on this machine, and those that were paired."""

import threading
from pathlib import Path

from notebook_cluster.security import Trusted, TrustStore, owner, same_user_keys, trusted_coordinators


class Coordinators:
    """The keys that come in; ``directory`` is the agent's data folder.

    :meth:`authorise` may be called from any thread.
    """

    def __init__(self, directory: Path) -> None:
        self.store: TrustStore = trusted_coordinators(directory)
        self._here = owner()
        self._lock = threading.Lock()
        self._let_in = self._paired()
        """Key -> entry of those that came in, or could have, since the last look."""

    def authorise(self, key: str) -> str | None:
        """A name for people, or None for a key that must stay out."""
        if (trusted := self.store.find(key)) is not None:
            # Also one that is removed before anybody looks.
            with self._lock:
                self._let_in[key] = trusted
            return trusted.owner
        return same_user_keys("coordinator").get(key)

    def owner(self, key: str) -> str:
        """``user@machine`` of a key that was let in."""
        trusted = self.store.find(key)
        return trusted.owner if trusted is not None else self._here

    def owner_id(self, key: str) -> str:
        """What all clusters of one owner have in common: the key that was paired, or empty for this user's own, which
        may be paired as well."""
        own = self.is_own(key) or key in same_user_keys("coordinator")
        return "" if own else key

    def is_own(self, key: str) -> bool:
        """Whether it came in as this user's, without pairing."""
        return self.store.find(key) is None

    def look(self) -> list[Trusted]:
        """Those that are trusted no more since the last call."""
        with self._lock:
            before, self._let_in = self._let_in, {}
            paired = self._paired()
            self._let_in |= paired
        gone = [entry for key, entry in before.items() if key not in paired]
        if not gone:
            return []
        # Who was paired may be this user as well.
        same_user = same_user_keys("coordinator")
        return [entry for entry in gone if entry.key not in same_user]

    def _paired(self) -> dict[str, Trusted]:
        return {entry.key: entry for entry in self.store.entries()}
