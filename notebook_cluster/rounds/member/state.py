"""What one node knows of one job: the state of :mod:`notebook_cluster.rounds.member.machine`.

Arrays are float32 vectors, and the momentum as it is kept, that are never written to once they are in here: a change
makes a new array, so the driver may serve or save any array it was handed without copying it.
"""

from typing import TYPE_CHECKING, Literal

import msgspec

from notebook_cluster.codecs import Memory
from notebook_cluster.memory import Ranges
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import CatchUp, CommittedRound, Prepared, Seal
from notebook_cluster.protocol.runs import Register
from notebook_cluster.rounds.member.events_effects import Boundary, Buffer, FetchState
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import item_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

Phase = Literal["idle", "registering", "training", "arrived", "exchanging", "prepared", "fetching"]


class MemberSettings(msgspec.Struct, frozen=True):
    """Times in seconds, sizes in bytes."""

    want_after: float = 0.5
    """Without a new chunk: ask for what is missing."""
    stalled_after: float = 2.5
    """Without a new chunk: tell the coordinator who is waited for."""
    chunk_bytes: int = 256 * 1024
    in_place_from: int = 1 << 24
    """Elements of a model whose next state is not kept aside until COMMIT: what that would hold is known by its hash
    before, and computed where the state is."""
    in_files_from: int = 1 << 20
    """The same of a state in files, where memory counts, and where each new array would be a new file."""
    kept_rounds: int = 4
    kept_bytes: int = 256 * 1024 * 1024
    """Mean slices of the last rounds, kept for nodes that were late."""
    kept_anyway: int = 64 * 1024 * 1024
    """Of those, what is kept of any model: rounds go on while a late node asks for a mean."""
    kept_commits: int = 512
    """Rounds of which the COMMIT is kept where every step is one: more than a journal may lose."""
    held_bytes: int = 256 * 1024 * 1024
    """Frames of an attempt whose SEAL has not come yet."""
    held_frames: int = 4096


class Assembly(msgspec.Struct, frozen=True):
    """One slice from one sender, whose chunks come in whatever order. ``data`` is shared with older states: bytes that
    came are never written to again, so what those have stays as it is."""

    data: "NDArray[np.uint8]"
    """All bytes of the slice; only those in ``received`` are set."""
    received: Ranges = ()


class Exchange(msgspec.Struct):
    """One sealed attempt on this node. Dictionaries are replaced, never written to."""

    seal: Seal
    senders: dict[str, tuple[int, float]]
    """Member -> (incarnation, weight), in rank order; weight 0 only receives."""
    contributions: dict[tuple[int, str], Buffer]
    """(slice, member) -> bytes, complete, for the slices this node owns."""
    means: dict[int, Buffer]
    """Slice -> encoded mean, complete."""
    partial: dict[tuple[int, str, str], Assembly]
    """(slice, ``contribution`` or ``mean``, member or empty) -> what has come so far."""
    gathered: int = 0
    """How many contributions the owner of a slice sends on, where it does not send their mean."""
    sources: tuple[str, ...] = ()
    """PREPARED members that COMPLETE named."""
    passed: dict[tuple[str, str, int], int] = {}
    """(node, ``contribution`` or ``mean``, slice) -> ticket of the last SENT: what was sent before it came, or is
    lost."""
    heard: dict[str, float] = {}
    """Member -> when a chunk or an answer of it last came."""
    asked: dict[str, float] = {}
    """Member -> when WANT first went to it after that."""
    turn: int = 0
    """Which of the others is asked for a mean whose owner is silent."""
    progress: float = 0.0
    """When a chunk last came."""
    wanted: float = 0.0
    stalled: float = 0.0
    usable: dict[tuple[int, str], bool] = {}
    """(slice, member) -> its contribution is one that a codec wrote, where it is only sent on."""
    stepping: bool = False
    """The mean is with the optimiser, which steps for all."""
    broken: tuple[str, ...] = ()
    """Members whose contribution held NaN or infinity: the coordinator was told and will seal again without it."""
    prepared: Prepared | None = None
    theta: "Vector | None" = None
    momentum: "Vector | None" = None
    """As they will be, in the slices that are in ``stepped``: computed aside, swapped at COMMIT."""
    stepped: frozenset[int] = frozenset()
    in_place: bool = False
    """The next state is written where the state is: ``theta`` and ``momentum`` are the fragment's, or None."""
    digests: tuple[bytes, ...] = ()
    """In place of those: the hash of the next state as far as each group of it, in its order."""


class KeptMean(msgspec.Struct, frozen=True):
    """The committed mean of one round as bytes."""

    round: int
    attempt: int
    slices: tuple[Buffer, ...]
    size: int


class MemberState(msgspec.Struct):
    """What one node knows of one job. Make it with :func:`notebook_cluster.rounds.member.machine.new_member`."""

    job: str
    node: str
    incarnation: int
    settings: MemberSettings
    phase: Phase = "idle"
    fragments: Fragments | None = None
    register: Register | None = None
    round: int = 0
    """Last committed round held here."""
    state_hash: str = ""
    theta: "Vector | None" = None
    momentum: "Vector | None" = None
    holds: bool = False
    """(theta, momentum) are the cluster's state after ``round``: they may be served."""
    advanced: bool = True
    """theta belongs to ``round``: with gradients it does not until the node's own optimiser has made its step."""
    joining: bool = False
    """Registered, but not yet told Ready."""
    left: bool = False
    contribution: Boundary | None = None
    """Kept until COMMIT."""
    serial: int = 0
    """Counts contributions: what is said about an older one does not concern this one."""
    fetch: FetchState | None = None
    """Where the state was to be fetched from last."""
    catching: tuple[CatchUp, ...] = ()
    """Rounds whose means are fetched instead."""
    fetch_counted: bool = False
    """The state being fetched contains this node's contribution."""
    fetch_failure: str = ""
    """The last reason that was told."""
    fetch_failures: int = 0
    """In a row: after the first another source is asked for at once, after each later one following a longer while."""
    ask_at: float = 0.0
    """When that while is over; 0: it is not waited for."""
    counted: int = 0
    """The contribution that was in a COMMIT whose state this node could not take."""
    fetch_from: int = 0
    """The round of the state that was held when fetching began."""
    exchange: Exchange | None = None
    seen_attempt: tuple[int, int] = (0, 0)
    """Newest (round, attempt) ever taken up: a SEAL at or below it is a repetition."""
    kept: tuple[KeptMean, ...] = ()
    serving: dict[str, int] = {}
    """Node -> the round of the state that it gets from here as a whole, until it is in a round: it is behind by then,
    and comes on with the means since. Replaced, never written to."""
    served_by: tuple[str, int] = ("", 0)
    """(node, incarnation) that does so for this one."""
    committed: tuple[CommittedRound, ...] = ()
    """The last rounds that were applied here, in a row, where every step is one."""
    held_frames: tuple[tuple[str, JobFrame, Buffer], ...] = ()
    handed: dict[tuple[int, int, str, str, int], int] = {}
    """(round, attempt, node, ``contribution`` or ``mean``, slice) -> how often all that was missing of it there was
    handed to the mesh; of the attempt that is open and those whose means are kept. Replaced, never written to."""
    readers: frozenset[str] = frozenset()
    """Nodes that can read this node's memory: a slice goes to them as a whole."""
    memory: Memory = vectors.bytes_of
    """For what is to be sent."""
    bytes_sent: int = 0
    dropped: int = 0
    now: float = 0.0


def state_bytes(fragments: Fragments) -> int:
    """Of theta and momentum: what a late node fetches where it cannot catch up."""
    return (4 + item_size(fragments.momentum_dtype)) * fragments.size


def most_kept(settings: MemberSettings, fragments: Fragments) -> int:
    """Bytes of means that are kept: of a large model one in int8, a few smaller ones, none in float32."""
    return min(settings.kept_bytes, max(settings.kept_anyway, 3 * 4 * fragments.size // 10))
