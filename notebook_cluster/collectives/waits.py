"""What the main thread waits for, as the I/O thread sees it."""

import time
from dataclasses import dataclass, field
from queue import SimpleQueue

from notebook_cluster.collectives.checks import Check
from notebook_cluster.collectives.parcels import Channel, Parcel, channel_of
from notebook_cluster.protocol.mesh import CellFrame


@dataclass(eq=False)
class Wait:
    """What the main thread waits for: one parcel of each of ``senders``; ``outcome`` gets them, or the error."""

    name: str
    operation: int
    phase: int
    channel: Channel
    senders: tuple[str, ...]
    check: Check
    ask: bool = False
    """Ask for what is missing at once: nobody sends it unasked."""
    started: float = field(default_factory=time.monotonic)
    outcome: "SimpleQueue[dict[str, Parcel] | Exception]" = field(default_factory=SimpleQueue)

    @property
    def label(self) -> str:
        return self.name.partition("(")[0] if self.channel == "collective" else "message"

    def concerns(self, sender: str, header: CellFrame) -> bool:
        """Whether a parcel with this header is what is waited for, or shows that it will never come."""
        mine = self.channel == "collective" and channel_of(header) == "collective"
        if not mine or header.operation != self.operation:
            return False
        if header.name != self.name:
            return True
        # A node that sets shared memory up where we have it already has another array.
        return sender in self.senders and (header.phase == self.phase or (self.ask and header.phase < self.phase))
