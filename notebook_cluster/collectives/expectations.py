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


REFUSED = "refused "
"""What the kind of a frame begins with, before a key of :data:`_REFUSALS`, whose sender sends nothing else for its
operation."""

_REFUSALS: dict[str, type[PeerLost]] = {
    kind.__name__: type("PeerLost", (PeerLost, kind), {"__module__": PeerLost.__module__, "__doc__": PeerLost.__doc__})
    for kind in (TypeError, ValueError)
}
"""Also of the kind that the other node raised: code that catches it there catches it here, and both go on."""
_MOST_REFUSALS = 1000
_MOST_REASON = 300


def refusal_of(error: BaseException) -> tuple[str, bytes]:
    """Kind and payload of the frame that says why a node sends nothing for an operation."""
    kind = next((kind.__name__ for kind in (TypeError, ValueError) if isinstance(error, kind)), "")
    first = next(iter(str(error).splitlines()), "")
    return REFUSED + kind, f"raised {type(error).__name__}: {first}"[:_MOST_REASON].encode(errors="replace")


class Refusals:
    """Operations for which other nodes send nothing, because they raised before they had sent anything."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, str], tuple[str, str]] = {}

    def note(self, sender: str, header: CellFrame, payload: memoryview) -> None:
        """``sender`` says so; more than anybody could mean are left out."""
        if len(self._told) < _MOST_REFUSALS:
            reason = bytes(payload[: 4 * _MOST_REASON]).decode(errors="replace")
            self._told[header.operation, sender] = header.kind.removeprefix(REFUSED), reason

    def forget_before(self, operation: int) -> None:
        self._told = {key: told for key, told in self._told.items() if key[0] >= operation}

    def error(self, operation: int) -> PeerLost | None:
        """What is raised where this node waits in ``operation``."""
        for (refused, node), (kind, reason) in self._told.items():
            if refused == operation:
                return _REFUSALS.get(kind, PeerLost)(f"{node} {reason}")
        return None
