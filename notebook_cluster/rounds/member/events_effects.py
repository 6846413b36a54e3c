"""The words of :mod:`notebook_cluster.rounds.member.machine`: the events it takes and the effects it asks for.

Arrays are float32 vectors that are never written to once they are in here.
"""

from typing import TYPE_CHECKING, Literal

import msgspec

from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import OuterChange
from notebook_cluster.protocol.runs import Register
from notebook_cluster.protocol.wire import Message
from notebook_cluster.rounds.numerics.fragments import Fragments

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]

Buffer = bytes | bytearray | memoryview


# ---- events --------------------------------------------------------------------------------------------------


class BeginRun(msgspec.Struct, frozen=True):
    """The sync object was made (again). ``theta`` and ``momentum`` are what this node would start from: its fresh
    model, a checkpoint, or the state it holds; ``register.round`` and ``register.state_hash`` belong to them."""

    register: Register
    fragments: Fragments
    theta: "Vector"
    momentum: "Vector"


class Boundary(msgspec.Struct, frozen=True):
    """The main thread reached a boundary (or ``finish()``) and waits. ``encoded`` is the contribution on the wire, in
    the wire format of ``fragment``, which is the one of the next round; it must never change. ``samples`` 0: takes
    part as a receiver, whatever the fragment (``encoded`` may be empty)."""

    encoded: Buffer
    samples: float
    steps: int
    norm: float = 0.0
    finite: bool = True
    finishing: bool = False
    outer: OuterChange | None = None
    """Outer settings that people set since the registration."""
    fragment: int = 0
    more: bool = False
    """Whether there is work in other fragments too."""
    base: str = ""
    """The hash of the state that gradients were computed on. On another one they are not used."""
    base_round: int = 0
    """The round of the state with hash ``base``."""
    gradients: bytes = b""
    """The tensors that this node has a gradient of (:mod:`notebook_cluster.rounds.numerics.bits`)."""
    optimizer: str = ""
    """What this node's own optimiser steps with; empty: no node has one of its own."""
    scaled: bool = False
    """As in Arrived."""

    def without_work(self, *, more: bool = False) -> "Boundary":
        """The same of a node that only receives."""
        return Boundary(b"", 0.0, 0, finishing=self.finishing, outer=self.outer, more=more, optimizer=self.optimizer)


class Advance(msgspec.Struct, frozen=True):
    """The parameters that this node's own optimiser made of the mean gradient of ``round``: joiners take them."""

    round: int
    theta: "Vector"


class Stepped(msgspec.Struct, frozen=True):
    """What the optimiser made of the mean of TakeStep: the parameters after ``round``, finite."""

    round: int
    attempt: int
    theta: "Vector"


class FromLeader(msgspec.Struct, frozen=True):
    """A :mod:`notebook_cluster.protocol.rounds` message from the coordinator.

    ``alone``: nobody else has theta and momentum of the state that it meets, nor that state itself, so COMMIT may write
    to them."""

    message: Message
    alone: bool = False


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


class Served(msgspec.Struct, frozen=True):
    """``node`` is being sent the state after ``round`` as a whole; -1: it is gone."""

    node: str
    round: int


class LeaveRounds(msgspec.Struct, frozen=True):
    """No more rounds in this cell; the state is kept and still served."""

    reason: str


class Tick(msgspec.Struct, frozen=True):
    now: float
    """Monotonic seconds."""


Event = (
    BeginRun
    | Boundary
    | Advance
    | Stepped
    | FromLeader
    | Frame
    | StateFetched
    | FetchFailed
    | Served
    | LeaveRounds
    | Tick
)


# ---- effects -------------------------------------------------------------------------------------------------


class SendControl(msgspec.Struct, frozen=True):
    """To the coordinator, in this order."""

    message: Message


class SendChunk(msgspec.Struct, frozen=True):
    """To another node over the mesh; ``payload`` is a view of bytes that never change."""

    node: str
    header: JobFrame
    payload: Buffer = b""


class BeginTraining(msgspec.Struct, frozen=True):
    """The job is on: load ``theta`` into the model and train. Work done on another state is dropped."""

    round: int
    theta: "Vector"
    momentum: "Vector"
    state_hash: str


class TakeStep(msgspec.Struct, frozen=True):
    """This node steps for all: let the optimiser make its step with ``mean``, the gradients of ``nodes`` nodes, aside,
    and answer with Stepped. It counts when ``round`` is committed with what it made."""

    round: int
    attempt: int
    mean: "Vector"
    nodes: int
    gradients: bytes = b""
    """The tensors that any of them has one of (:mod:`notebook_cluster.rounds.numerics.bits`)."""


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
    server: str = ""
    """The node whose optimiser made the step, where one does it for all."""
    gradients: bytes = b""
    """As in TakeStep."""


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


class ReleaseContribution(msgspec.Struct, frozen=True):
    """The turn of the contribution's fragment is over: the bytes are dropped and the node receives the next round only.
    Its work, which is in theta_m still, goes into the fragment's next turn; error feedback stays."""


class Held(msgspec.Struct, frozen=True):
    """A Stop came before the round was sealed: the contribution is not used, and its work goes into the round that the
    node exchanges first when the cell is run again."""


class Finish(msgspec.Struct, frozen=True):
    """Nothing is left to exchange: finish() returns; the model holds theta of ``round``."""

    round: int


class Fail(msgspec.Struct, frozen=True):
    """The constructor or the waiting sync call raises ``reason``."""

    reason: str


class Pass(msgspec.Struct, frozen=True):
    """The others are done with this sync object, number ``run`` of the cell: it neither exchanges nor waits."""

    run: int


class Log(msgspec.Struct, frozen=True):
    level: Literal["info", "warning", "error"]
    text: str


Effect = (
    SendControl
    | SendChunk
    | BeginTraining
    | TakeStep
    | Apply
    | Rebase
    | FetchState
    | CancelFetch
    | DiscardContribution
    | ReleaseContribution
    | Held
    | Finish
    | Fail
    | Pass
    | Log
)
