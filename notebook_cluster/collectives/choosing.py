"""Which way an array is added up: by its size, the number of nodes and who shares a peer. The same on all nodes."""

from collections.abc import Mapping, Sequence
from typing import Literal

AlgorithmName = Literal["auto", "direct", "star", "tree", "slices", "ring", "shared", "hierarchical"]
ALGORITHMS: tuple[AlgorithmName, ...] = (
    "auto", "direct", "star", "tree", "slices", "ring", "shared", "hierarchical",
)  # fmt: skip

_DIRECT_NODES = 8
_STAR_NODES = 16
_SLICES_NODES = 32
"""With more, every node would talk with so many others at the same time that the ring is better."""


def by_peer(nodes: Sequence[str], peers: Mapping[str, str]) -> list[list[str]]:
    """``nodes`` (in rank order) of each peer, peers in the order of their first node; alone where it is unknown."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        groups.setdefault(peers.get(node, "") or f"\0{node}", []).append(node)
    return list(groups.values())


def choose(wanted: str, size: int, nodes: Sequence[str], peers: Mapping[str, str], small: int, shared: bool) -> str:
    """The way to add up ``size`` bytes from each of ``nodes``.

    Args:
        wanted: what the caller asked for; ``auto`` leaves it to us.
        small: up to so many bytes the number of steps counts, above it what is sent.
        shared: memory may be shared.

    Raises:
        ValueError: ``wanted`` is unknown, or not possible between these nodes.
    """
    groups = by_peer(nodes, peers)
    if wanted not in ALGORITHMS:
        raise ValueError(f"all_reduce: algorithm={wanted!r} is unknown: use one of {', '.join(ALGORITHMS)}")
    if wanted == "shared" and len(groups) > 1:
        raise ValueError(
            f"all_reduce: algorithm='shared' needs all nodes on one peer, they are on {len(groups)}: use 'hierarchical'"
        )
    if wanted != "auto":
        return wanted
    if len(groups) == 1 and shared:
        return "shared"
    if size <= small:
        return "direct" if len(nodes) <= _DIRECT_NODES else "star" if len(nodes) <= _STAR_NODES else "tree"
    if 1 < len(groups) < len(nodes):
        return "hierarchical"
    return "slices" if len(groups) <= _SLICES_NODES else "ring"
