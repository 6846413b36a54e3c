"""What a sync call returns, and what it raises."""

from dataclasses import dataclass


class TrainingError(RuntimeError):
    """The coordinator refused the job, or the sync object cannot be used like this; one line."""


@dataclass(frozen=True)
class Round:
    """A committed round: its number, the nodes whose work is in it, seconds this node waited, bytes it sent, the hash
    of the state (equal on all nodes), and whether this node's work was counted."""

    round: int
    members: tuple[str, ...]
    wait: float
    bytes_sent: int
    state_hash: str
    counted: bool
