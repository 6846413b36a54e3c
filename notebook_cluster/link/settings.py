"""The numbers of a link that people may want to change, and the words for how it is."""

from dataclasses import dataclass
from typing import Literal

Condition = Literal["connecting", "connected", "suspect", "lost", "refused"]


@dataclass(frozen=True)
class LinkSettings:
    """Times in seconds, sizes in bytes."""

    heartbeat: float = 1.0
    suspect: float = 2.5
    """Silence after which the other side is *suspect*."""
    lost: float = 10.0
    """Silence after which it is *lost*; the link keeps trying and loses nothing."""
    outbox_bytes: int = 64 << 20
    """Unacknowledged bytes beyond which stream output is left out."""
    message_bytes: int = 256 << 20
    """Largest message (struct and buffers together), in both directions."""
    retry: float = 5.0
    """Pause before a refused connection is tried again."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat <= self.suspect < self.lost:
            raise ValueError(
                f"heartbeat {self.heartbeat}, suspect {self.suspect}, lost {self.lost}: these times must be above 0 "
                "and in this order"
            )

    @property
    def stuck(self) -> float:
        """Seconds without even a failed attempt to connect after which a fresh socket is taken."""
        return max(self.lost, 3 * self.retry)

    def judge(self, silence: float) -> Condition:
        """The condition of an open session after ``silence`` seconds without a word from the other side."""
        if silence > self.lost:
            return "lost"
        return "suspect" if silence > self.suspect else "connected"
