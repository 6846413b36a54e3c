"""The words of :mod:`notebook_cluster.training.member`: its state, the events it takes and the effects it asks for.

Arrays are float32 vectors that are never written to once they are in here: a change makes a new array, so the driver
may serve or save any array it was handed without copying it.
"""

from typing import TYPE_CHECKING, Literal

import msgspec

from notebook_cluster.codecs import WireFormat
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import CatchUp, Prepared, Register, Seal
from notebook_cluster.protocol.wire import Message

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

Buffer = bytes | bytearray | memoryview

Phase = Literal["idle", "registering", "training", "arrived", "exchanging", "prepared", "fetching"]


class MemberSettings(msgspec.Struct, frozen=True):
    """Times in seconds, sizes in bytes."""

    want_after: float = 1.0
    """Without a new chunk: ask for what is missing."""
    stalled_after: float = 2.5
    """Without a new chunk: tell the coordinator who is waited for."""
    chunk_bytes: int = 256 * 1024
    kept_rounds: int = 4
    kept_bytes: int = 256 * 1024 * 1024
    """Mean slices of the last rounds, kept for nodes that were late."""
    held_bytes: int = 256 * 1024 * 1024
    """Frames of an attempt whose SEAL has not come yet."""
    held_frames: int = 4096


# ---- events --------------------------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True):
    """The sync object was made (again). ``theta`` and ``momentum`` are what this node would start from: its fresh
    model, a checkpoint, or the state it holds; ``register.round`` and ``register.state_hash`` belong to them."""

    register: Register
    wire: WireFormat
    theta: "Vector"
    momentum: "Vector"


class Boundary(msgspec.Struct, frozen=True):
    """The main thread reached a boundary (or ``finish()``) and waits. ``encoded`` is the contribution on the wire, in
    the job's wire format; it must never change. ``samples`` 0: takes part as a receiver (``encoded`` may be
    empty)."""

    encoded: Buffer
    samples: float
    steps: int
    norm: float = 0.0
    finite: bool = True
    finishing: bool = False


class Control(msgspec.Struct, frozen=True):
    """A :mod:`notebook_cluster.protocol.rounds` message from the coordinator."""

    message: Message


class Frame(msgspec.Struct, frozen=True):
    """A mesh frame of kind ``contribution``, ``mean`` or ``want``. The payload is copied."""

    sender: str
    header: JobFrame
    payload: Buffer = b""


class StateFetched(msgspec.Struct, frozen=True):
    """The transfer that FetchState asked for is complete and ``state_hash`` was checked against the arrays. ``round``
    may be newer than the one asked for."""

    round: int
    theta: "Vector"
    momentum: "Vector"
    state_hash: str


class FetchFailed(msgspec.Struct, frozen=True):
    """``source`` does not answer or its bytes are wrong: the coordinator is asked for another one."""

    source: str
    reason: str


class LeaveRounds(msgspec.Struct, frozen=True):
    """No more rounds in this cell; the state is kept and still served."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    now: float
    """Monotonic seconds."""


Event = Begin | Boundary | Control | Frame | StateFetched | FetchFailed | LeaveRounds | Tick


# ---- effects -------------------------------------------------------------------------------------------------


class SendControl(msgspec.Struct, frozen=True):
    """To the coordinator, in this order."""

    message: Message


class SendChunk(msgspec.Struct, frozen=True):
    """To another node over the mesh; ``payload`` is a view of bytes that never change."""

    node: str
    header: JobFrame
    payload: Buffer = b""


class Ready(msgspec.Struct, frozen=True):
    """The job is on: load ``theta`` into the model and train. Work done on another state is dropped."""

    round: int
    theta: "Vector"
    momentum: "Vector"
    state_hash: str


class Apply(msgspec.Struct, frozen=True):
    """COMMIT: swap theta and momentum, load theta into the model. ``counted``: this node's contribution is in the
    mean, so its error feedback becomes the one computed with it; otherwise there was none (a receiver). The driver
    says Applied. After LeaveRounds the user's code runs again: keep the state, leave the model alone."""

    round: int
    theta: "Vector"
    momentum: "Vector"
    state_hash: str
    members: tuple[str, ...]
    counted: bool
    last: bool
    """finish() returns."""
    steps: int
    bytes_sent: int


class Rebase(msgspec.Struct, frozen=True):
    """The round went on without this node, which now holds a newer state. Its contribution, the same bytes, has
    arrived again for the next round: theta_m += theta - theta_old keeps the difference, so nothing is encoded again
    and error feedback stays. The main thread goes on waiting."""

    round: int
    theta: "Vector"
    momentum: "Vector"
    state_hash: str


class FetchState(msgspec.Struct, frozen=True):
    """Ask ``source`` for (theta, momentum) at ``round`` or later; a newer FetchState, or CancelFetch, replaces this
    one."""

    source: str
    incarnation: int
    round: int
    state_hash: str


class CancelFetch(msgspec.Struct, frozen=True):
    """The state that was being fetched is no longer wanted."""


class DiscardContribution(msgspec.Struct, frozen=True):
    """REFUSED: error feedback 0, theta_m = theta, show ``reason``. The node stays in the round as a receiver and the
    main thread goes on waiting."""

    round: int
    reason: str


class Finish(msgspec.Struct, frozen=True):
    """Nothing is left to exchange: finish() returns; the model holds theta of ``round``."""

    round: int


class Fail(msgspec.Struct, frozen=True):
    """The constructor or the waiting sync call raises ``reason``."""

    reason: str


class Log(msgspec.Struct, frozen=True):
    level: Literal["info", "warning", "error"]
    text: str


Effect = (
    SendControl
    | SendChunk
    | Ready
    | Apply
    | Rebase
    | FetchState
    | CancelFetch
    | DiscardContribution
    | Finish
    | Fail
    | Log
)


# ---- state ---------------------------------------------------------------------------------------------------


class Assembly(msgspec.Struct, frozen=True):
    """Chunks of one slice from one sender, in whatever order they come."""

    total: int
    chunks: dict[int, bytes]
    received: int = 0
    """Bytes in ``chunks``; chunks may overlap."""


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
    sources: tuple[str, ...] = ()
    """PREPARED members that COMPLETE named."""
    asked: int = 0
    """How often WANT went out."""
    progress: float = 0.0
    """When a chunk last came."""
    wanted: float = 0.0
    stalled: float = 0.0
    broken: tuple[str, ...] = ()
    """Members whose contribution held NaN or infinity: the coordinator was told and will seal again without it."""
    prepared: Prepared | None = None
    theta: "Vector | None" = None
    momentum: "Vector | None" = None
    """As they will be: computed aside, swapped at COMMIT."""


class KeptMean(msgspec.Struct, frozen=True):
    """The committed mean of one round as bytes."""

    round: int
    attempt: int
    slices: tuple[Buffer, ...]
    size: int


class MemberState(msgspec.Struct):
    """What one node knows of one job. Make it with :func:`notebook_cluster.training.member.new_member`."""

    job: str
    node: str
    incarnation: int
    settings: MemberSettings
    phase: Phase = "idle"
    wire: WireFormat | None = None
    register: Register | None = None
    round: int = 0
    """Last committed round held here."""
    state_hash: str = ""
    theta: "Vector | None" = None
    momentum: "Vector | None" = None
    holds: bool = False
    """(theta, momentum) are the cluster's state after ``round``: they may be served."""
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
    exchange: Exchange | None = None
    seen_attempt: tuple[int, int] = (0, 0)
    """Newest (round, attempt) ever taken up: a SEAL at or below it is a repetition."""
    kept: tuple[KeptMean, ...] = ()
    held_frames: tuple[tuple[str, JobFrame, bytes], ...] = ()
    bytes_sent: int = 0
    dropped: int = 0
    now: float = 0.0
