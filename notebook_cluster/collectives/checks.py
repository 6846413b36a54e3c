"""Whether what another node sends is what this operation expects; the answer is the error that people read."""

from collections.abc import Callable

from notebook_cluster.collectives.parcels import CellWorld
from notebook_cluster.collectives.values import Wire, describe, expected_bytes
from notebook_cluster.protocol.mesh import CellFrame

Check = Callable[[str, CellFrame], str | None]
"""(sender, header) -> the error, or None when the parcel is what we expect. Asked before memory is taken for it."""


def same_operation(own: str, name: str, check: Check) -> Check:
    """Others must be in operation ``name`` too; then ``check`` decides."""

    def named(sender: str, header: CellFrame) -> str | None:
        if header.name != name:
            return f"{own!r} is in {name}, {sender!r} in {header.name}: all nodes must do the same"
        return check(sender, header)

    return named


def same_array(world: CellWorld, own: str, wire: Wire, size: int | None = None) -> Check:
    """Others must have the dtype and shape of ``wire`` and send ``size`` bytes (None: the caller looks)."""

    def check(sender: str, header: CellFrame) -> str | None:
        theirs = describe(header.kind, header.dtype, header.shape)
        if theirs != wire.describe():
            return _unlike(world, own, wire.describe(), sender, header, theirs)
        if size is not None and header.total != size:
            return f"{header.name}: {sender!r} sends {header.total} bytes where {size} belong"
        return None

    return check


def same_description(world: CellWorld, own: str, text: str) -> Check:
    """Others must describe what they have as ``text``: in the dtype of plain data, or by being such an array."""

    def check(sender: str, header: CellFrame) -> str | None:
        theirs = header.dtype if header.kind == "json" else describe(header.kind, header.dtype, header.shape)
        return None if theirs == text else _unlike(world, own, text, sender, header, theirs)

    return check


def _unlike(world: CellWorld, own: str, text: str, sender: str, header: CellFrame, theirs: str) -> str:
    sides = sorted([(world.nodes[sender], sender, theirs), (world.nodes[own], own, text)])
    both = ", ".join(f"{node!r} (rank {rank}) has {what}" for rank, node, what in sides)
    return f"{header.name.partition('(')[0]}: {both}: shape and dtype must be equal on all nodes"


def any_value(sender: str, header: CellFrame) -> str | None:
    """Shapes may differ; only what cannot be a value is refused."""
    if header.kind == "json":
        return None
    try:
        size = expected_bytes(header.kind, header.dtype, header.shape)
    except ValueError as error:
        return f"{sender!r}: {error}"
    return None if size == header.total else f"{sender!r} sends {header.total} bytes where {size} belong"
