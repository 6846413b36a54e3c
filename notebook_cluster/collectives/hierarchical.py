"""Adding up an array where several nodes share a peer, and which of all ways is taken: the same one on all nodes.

The hierarchical way adds up inside each peer, then between the peers, then inside again. What is sent between two
machines is what two nodes would send, however many nodes they have. The order of the sum is fixed: the nodes of a peer
in rank order, then the peers in the order of their first node.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.collectives import reduction
from notebook_cluster.collectives.algorithms import slices_of
from notebook_cluster.collectives.expectations import same_description
from notebook_cluster.collectives.steps import Steps
from notebook_cluster.collectives.values import WireValue

if TYPE_CHECKING:
    from numpy.typing import NDArray


def hierarchical(steps: Steps, wire: WireValue, op: str) -> "NDArray[Any]":
    """The array is cut into as many columns as the smallest peer has nodes. In each peer one node owns a column: it
    adds the peer's part up, exchanges it with the owners in the other peers, and gives the result to its peer."""
    import numpy

    groups = by_peer(steps.nodes, steps.world.peers)
    group = next(group for group in groups if steps.own in group)
    columns = slices_of(wire.data.size, min(len(group) for group in groups))
    column = group.index(steps.own)
    # Not everybody hears from everybody below, but an error must be the same on all nodes.
    description = WireValue("json", wire.describe()[:64], (), b"")
    check = same_description(steps.world, steps.own, description.dtype)
    steps.exchange(dict.fromkeys(steps.others, description), check, _DESCRIBE)
    total = _inside(steps, wire, op, group, columns)
    own = None
    if total is not None:
        owners = [other[column] for other in groups]
        own = _between(steps, wire, op, owners, total)
        steps.send_array([node for node in group if node != steps.own], _SHARE, wire, own)
    result: NDArray[Any] = numpy.empty_like(wire.data)
    for index, piece in enumerate(columns):
        if index == column and own is not None:
            result[piece] = own
        else:
            owner = group[index]
            result[piece] = steps.receive_arrays([owner], _SHARE, wire, piece.stop - piece.start)[owner]
    return result


_DESCRIBE, _INSIDE, _BETWEEN, _BACK, _SHARE = range(5)


def _inside(steps: Steps, wire: WireValue, op: str, group: list[str], columns: list[slice]) -> "NDArray[Any] | None":
    """This node's column over its peer, in the dtype of the sum; None when it owns none."""
    copy = wire.data.copy()
    for owner, piece in zip(group, columns, strict=False):
        if owner != steps.own:
            steps.send_array([owner], _INSIDE, wire, copy[piece])
    index = group.index(steps.own)
    if index >= len(columns):
        return None
    mine = columns[index]
    others = [node for node in group if node != steps.own]
    found = steps.receive_arrays(others, _INSIDE, wire, mine.stop - mine.start)
    parts = [found.get(node, copy[mine]) for node in group]
    return reduction.combine([reduction.widened(part, wire.dtype) for part in parts], op)


def _between(steps: Steps, wire: WireValue, op: str, owners: list[str], total: "NDArray[Any]") -> "NDArray[Any]":
    """The column over all peers: each of its owners adds a part of it up and sends it to the others."""
    import numpy

    parts, others = slices_of(total.size, len(owners)), [node for node in owners if node != steps.own]
    sums = WireValue(wire.kind, reduction.wide(wire.dtype), wire.shape, None)
    for owner, piece in zip(owners, parts, strict=True):
        if owner != steps.own:
            steps.send_array([owner], _BETWEEN, sums, total[piece])
    mine = parts[owners.index(steps.own)]
    found = steps.receive_arrays(others, _BETWEEN, sums, mine.stop - mine.start)
    summed = reduction.combine([found.get(owner, total[mine]) for owner in owners], op)
    done = reduction.finished(summed, wire.dtype, op, len(steps.nodes))
    steps.send_array(others, _BACK, wire, done)
    result: NDArray[Any] = numpy.empty(total.size, wire.data.dtype)
    result[mine] = done
    for owner, piece in zip(owners, parts, strict=True):
        if owner != steps.own:
            result[piece] = steps.receive_arrays([owner], _BACK, wire, piece.stop - piece.start)[owner]
    return result


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
