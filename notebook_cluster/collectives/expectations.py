"""What the main thread waits for, whether what another node sends is that, and how a wait ends that cannot be met.

The answer of a check is the error that people read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from notebook_cluster.collectives.chunked_messages import CellWorld, Channel, ChunkedMessage, channel_of
from notebook_cluster.collectives.values import WireValue, describe, expected_bytes
from notebook_cluster.protocol.mesh import CellFrame

Check = Callable[[str, CellFrame], str | None]
"""(sender, header) -> the error, or None when the message is what we expect. Asked before memory is taken for it."""


def same_operation(own: str, name: str, check: Check) -> Check:
    """Others must be in operation ``name`` too; then ``check`` decides."""

    def named(sender: str, header: CellFrame) -> str | None:
        if header.name != name:
            return f"{own!r} is in {name}, {sender!r} in {header.name}: all nodes must do the same"
        return check(sender, header)

    return named


def same_array(world: CellWorld, own: str, wire: WireValue, size: int | None = None) -> Check:
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


@dataclass(eq=False)
class Wait:
    """What the main thread waits for: one message of each of ``senders``; ``outcome`` gets them, or the error."""

    name: str
    operation: int
    phase: int
    channel: Channel
    senders: tuple[str, ...]
    check: Check
    ask: bool = False
    """Ask for what is missing at once: nobody sends it unasked."""
    started: float = field(default_factory=time.monotonic)
    outcome: "SimpleQueue[dict[str, ChunkedMessage] | Exception]" = field(default_factory=SimpleQueue)

    @property
    def label(self) -> str:
        return self.name.partition("(")[0] if self.channel == "collective" else "message"

    def concerns(self, sender: str, header: CellFrame) -> bool:
        """Whether a message with this header is what is waited for, or shows that it will never come."""
        mine = self.channel == "collective" and channel_of(header) == "collective"
        if not mine or header.operation != self.operation:
            return False
        if header.name != self.name:
            return True
        # A node that sets shared memory up where we have it already has another array.
        return sender in self.senders and (header.phase == self.phase or (self.ask and header.phase < self.phase))


class Deadlock(RuntimeError):
    """Nodes wait for each other in different calls, this one among them; the text names the lines. Rounds raise it
    too."""


class PeerLost(RuntimeError):
    """A node that this operation needs raised, ended or was lost; the text names it and the cause."""
