"""Runs of a training job: who registers for one, coordinator <-> node, and how they are numbered.

Each sync object that is made under a name begins a run, also when the state goes on. A run is numbered by the cell in
which its sync object was made, and by how many of that name the cell had made before. So all nodes count alike, whoever
joins or is restarted, and a larger number was begun later. What follows the registration is in :mod:`.rounds`.
"""

from collections.abc import Iterable

from notebook_cluster.protocol.wire import Message

PATIENCE = 5.0
"""Seconds that nodes wait for one that makes no progress, where people say nothing else."""
LEAST_PATIENCE = 3.0
"""What a node that is well may need for a sign of life on a busy machine."""

IN_A_CELL = 1000
"""Runs of one job that one cell can tell apart; what comes after them is one."""


def run_number(cell: int, before: int) -> int:
    """The number of the sync object that cell ``cell`` makes after ``before`` others of the same name."""
    return cell * IN_A_CELL + min(before, IN_A_CELL - 2) + 1


def places(runs: Iterable[int]) -> dict[int, int]:
    """Run -> 1, 2, 3 ... in the order in which they were begun."""
    return {run: place for place, run in enumerate(sorted(set(runs)), 1)}


FrozenRow = tuple[str, list[int], str, str]
"""(name, shape, dtype, hash of the values) of a parameter that is not trained; hash empty: it could not be read."""


# ---- registration --------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """Node: a sync object was made (again) in cell ``cell``.

    ``schema`` lists (name, shape, dtype) in sorted order; ``schema_hash`` covers it and the codec. A node that already
    holds state of this job says its ``round`` and ``state_hash``; else ``state_hash`` is that of its fresh model.
    """

    job: str
    cell: int
    strategy: str
    codec: str
    schema_hash: str
    schema: list[tuple[str, list[int], str]]
    parameters: int
    """Elements of the whole flat vector, buffers included."""
    every: str
    """``100 steps`` or ``30 seconds``: shown to people and compared between nodes."""
    lr_bits: int | None = None
    """None: the default for the number of members, decided at each SEAL."""
    momentum_bits: int = 0
    nesterov: bool = True
    round: int = 0
    state_hash: str = ""
    holds_state: bool = False
    fresh: bool = False
    """True: forget the state that the cluster holds for this job."""
    resume: str = ""
    """Checkpoint name to resume from, and what this node found of it on its disk:"""
    taken: bool = False
    """It is what this cluster took over: it counts only while the cluster has no state of the job."""
    resume_round: int | None = None
    resume_manifest_hash: str = ""
    resume_names: list[str] = []
    """Where it found none: the checkpoints that are there."""
    fragments: int = 1
    """Parts of the vector that are exchanged in turn, one in each round."""
    fragment_blocks: list[int] = []
    """Codec blocks of each fragment, where there are several."""
    every_step: bool = False
    """Rounds carry gradients: whoever is out of step is waited for while it takes over the state."""
    mode: str = ""
    """Where rounds carry gradients: ``allreduce``, or ``server`` where one node's optimiser steps for all."""
    overlap: int = 0
    """Steps between sending and receiving; ``mix``: the local parameters' share after receiving, None: all of the work
    since sending."""
    mix: float | None = None
    buffers: int = 0
    """The last ``buffers`` of the ``parameters`` elements are BatchNorm statistics: float32 on the wire whatever the
    codec, outer step SGD(1, 0)."""
    blocks: int = 0
    """Codec blocks of the whole vector: what the slice table of a SEAL divides."""
    quorum: int | float | None = None
    """None: a SEAL waits for all. Else it waits for so many arrivals (float: for this share of the nodes), and from
    then on ``grace`` seconds for the others."""
    grace: float = 0.0
    patience: float = PATIENCE
    """Seconds that others wait at most for this node without any progress of it."""
    about: dict[str, str] = {}
    """What its numbers come from: ``processor``, ``python``, ``numpy``, ``torch``, ``mlx``. Compared when nodes compute
    unlike."""
    run: int = 1
    """Which sync object of the cell under this name it is; nodes come to them in the same order."""
    framework: str = ""
    """``torch`` or ``mlx``."""
    frozen: list[FrozenRow] | None = None
    """The frozen parameters in sorted order, which do not travel and have to be equal; None: they are not compared."""
    other_buffers: list[FrozenRow] | None = None
    """Those of the model's buffers that do not travel either, counters left out; None: they are not compared."""
    keeps: str = ""
    """What its state has beside the parameters: the outer momentum as ``float32``, ``bfloat16`` or ``none``, or the
    ``mean`` of gradients. Empty: an older version said nothing of it."""


class Registered(Message, frozen=True):
    """Coordinator: the job is on. ``source`` None: this node holds the state (its own model, or equal to it).
    Otherwise fetch (theta, momentum, round) from node ``source`` over the mesh, then say Joined."""

    job: str
    round: int
    state_hash: str
    source: str | None
    source_incarnation: int = 0
    run: int = 0
    """The run of the Register that this answers; 0: not said."""


class RegisterRefused(Message, frozen=True):
    """Coordinator: no rounds of this job in this cell. ``reason`` is the one-line error that the constructor, or the
    sync call that waits, raises; the state that the node holds stays."""

    job: str
    reason: str
    run: int = 0
    """The run of the Register that this answers; 0: not said."""


class RunOver(Message, frozen=True):
    """Coordinator: the other nodes are done with sync object ``run`` of this cell: the node passes it."""

    job: str
    cell: int
    run: int


class Joined(Message, frozen=True):
    """Node: holds the state after ``round``."""

    job: str
    round: int
    state_hash: str
