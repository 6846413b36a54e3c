"""The package's version and the number that must match between two machines."""

VERSION = "0.1.0"
PROTOCOL_VERSION = 6


def mismatch(peer: str, theirs: int) -> str | None:
    """One line that names both versions and the way out, or None when they match."""
    if theirs == PROTOCOL_VERSION:
        return None
    older = f"on {peer!r}" if theirs < PROTOCOL_VERSION else "on this machine"
    return f"peer {peer!r} speaks protocol {theirs}, this machine {PROTOCOL_VERSION}: upgrade notebook-cluster {older}"
