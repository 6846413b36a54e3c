"""Where and how the state of rounds is kept."""

from typing import Any

from notebook_cluster.rounds.numerics.momentum import MOMENTUM_DTYPES

MEMORY, DISK = "memory", "disk"


def check_momentum_dtype(name: Any) -> str:
    """How the outer momentum is kept.

    Raises:
        ValueError: not one of the ways.
    """
    if name not in MOMENTUM_DTYPES:
        raise ValueError(f"momentum_dtype={name!r}: use one of {', '.join(map(repr, MOMENTUM_DTYPES))}")
    return str(name)


def check_state(state: Any) -> str:
    """Where the state of rounds is.

    Raises:
        ValueError: neither MEMORY nor DISK.
    """
    if state not in (MEMORY, DISK):
        raise ValueError(f"state={state!r}: use {MEMORY!r} or {DISK!r}")
    return str(state)
