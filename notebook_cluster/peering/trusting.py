"""Which keys this user's clusters use: agents of the same user on this machine, and peers that were paired."""

from notebook_cluster.security import TrustStore, fingerprint, same_user_keys, trusted_peers


class Trust:
    """Answers from the files as they are now: what was removed is not trusted from the next question on."""

    def __init__(self) -> None:
        self.store: TrustStore = trusted_peers()

    def is_pinned(self, key: str) -> bool:
        """True for the key of a peer that was paired."""
        return self.store.find(key) is not None

    def is_trusted(self, key: str) -> bool:
        """True when code may be sent to whoever holds ``key``."""
        return self.is_pinned(key) or key in same_user_keys("agent")

    def keys(self) -> set[str]:
        """All of them, for one pass over many peers."""
        return {entry.key for entry in self.store.entries()} | set(same_user_keys("agent"))

    def changed(self, name: str, key: str) -> str:
        """Why whoever calls itself ``name`` with ``key`` is not the peer that was paired under this name, or empty."""
        known = self.store.named(name)
        if not known or any(entry.key == key for entry in known) or key in same_user_keys("agent"):
            return ""
        return (
            f"{name!r} was paired with key {fingerprint(known[0].key)}, but this one has key {fingerprint(key)}: "
            "somebody may pretend to be it. If it was really installed anew, run "
            f"`notebook-cluster trust remove {name}` and add it with its code again"
        )
