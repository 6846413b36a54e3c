"""What training needs from the node it runs in. ``node`` implements it; tests run several in one process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.node import Roster
from notebook_cluster.protocol.wire import Message

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Payload = bytes | bytearray | memoryview


class JobHandler(Protocol):
    """A training job on this node. Every method is called on the runtime's thread, one at a time."""

    def on_control(self, message: Message) -> None:
        """A :mod:`notebook_cluster.protocol.rounds` message of this job from the coordinator, in order."""

    def on_mesh(self, sender: str, header: JobFrame, payload: memoryview) -> None:
        """A frame of this job from another node. ``payload`` stays as it is for as long as somebody has it."""

    def on_tick(self, now: float) -> None:
        """About ten times a second; ``now`` is ``time.monotonic()``."""

    def on_roster(self, roster: Roster) -> None:
        """Membership changed."""

    def keep(self) -> Callable[[], Path] | None:
        """What writes the last committed state, to be called in another thread, and returns the folder; None when
        there is no state. It raises what went wrong."""


class LendsMemory(Protocol):
    """What others on this machine can read where it is; from any thread."""

    def readers(self) -> frozenset[str]:
        """The nodes that can: a slice of a contribution or a mean goes to them in one ``send_mesh``."""

    def memory(self, size: int) -> "NDArray[np.uint8] | None":
        """``size`` bytes for what will be sent, with whatever is in them; None where ordinary memory will do. Once they
        were sent nothing is written to them."""


class DataLoops(Protocol):
    """The loops over ``nc.shard`` of the running cell. Main thread only."""

    def step_taken(self) -> None:
        """A step was made with what the loops gave out last."""

    def positions(self) -> object:
        """Where those are in which a step was made, as plain data; None: there is none."""

    def loops_going_on(self) -> int:
        """How many of this cell's loops go on, because the cell is one that a Stop has ended."""

    def when_run_again(self, callback: Callable[[], None], still: Callable[[], bool]) -> None:
        """A Stop ends the cell. When the same code runs again, its loops go on where they are now, and ``callback`` is
        called before the first batch is fetched; not when nothing that was stopped is so ``still``."""

    def begin_anew(self) -> None:
        """No loop goes on, whatever was said before."""

    def tell_unclaimed(self, warn: Callable[[str], None]) -> None:
        """Warn once of loops that were to go on and did not come, for they are over other data now."""

    def go_on(self, positions: object) -> None:
        """Those that begin from now on in this cell go on where :meth:`positions` said; None: they begin as always."""

    def at_next_batch(self, callback: Callable[[], None]) -> bool:
        """Call once when the loop that has a batch in hand asks for the next, or is over; False: none has."""

    def before_next(self, callback: Callable[[], None]) -> None:
        """Call once before the next batch of this cell is fetched."""


class Runtime(Protocol):
    """The node's background runtime as training sees it. Methods may be called from any thread."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def roster(self) -> Roster | None:
        """The newest one; None until the coordinator has sent it."""

    def cell(self) -> int:
        """Number of the cell that runs now (0 outside cells)."""

    def replaying(self) -> bool:
        """True while a cell from the cluster's log is replayed on a new kernel: sync objects then neither register nor
        exchange, so the cell only builds what later cells use; the state comes with the cell that runs now."""

    def rank(self) -> int: ...

    def world_size(self) -> int: ...

    def device(self) -> str:
        """torch's word for this node's device: ``cpu``, ``mps``, ``cuda:0``."""

    def checkpoint_directory(self) -> Path:
        """``checkpoints`` in the node's working directory."""

    def kept_directory(self) -> Path | None:
        """The folder of this machine's agent in whose folders clusters work: what was kept there is found again."""

    def send_control(self, message: Message) -> None:
        """To the coordinator: ordered, resumable, never lost while this process lives."""

    def send_mesh(self, node: str, header: JobFrame, payload: Payload = b"") -> None:
        """To another node (or this one): ordered per node; lost when that node is gone. The payload is not copied: it
        must not change until sent, so send immutable bytes or arrays that are replaced rather than written to."""

    @property
    def lending(self) -> LendsMemory: ...

    def attach_job(self, name: str, handler: JobHandler) -> None:
        """Route control messages, mesh frames and ticks of job ``name`` to ``handler``."""

    def job(self, name: str) -> JobHandler | None:
        """The handler attached under ``name``: a sync object that is made again finds its job."""

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Run on the runtime's thread."""

    def at_cell_end(self, callback: Callable[[str], None]) -> None:
        """Call once, on the main thread, when the running cell ends, with ``ok``, ``error: ...`` or ``interrupted``."""

    @property
    def data(self) -> DataLoops: ...

    def deferred_interrupts(self) -> AbstractContextManager[Callable[[], bool]]:
        """SIGINT waits until the block ends: for the moment in which a round is applied (main thread only). The block
        gets what says whether one waits."""

    def in_round(self, job: str, round: int) -> None:
        """The calling thread waits for ``round`` of ``job``; 0: it goes on. A wait that cannot end, because another
        node waits for this one elsewhere, is ended with an EndWait to the job's handler."""

    def in_finish(self) -> None:
        """The cell's code has come to the finish of a sync object, where all nodes wait for each other: what others
        decide before theirs, they decide without this node."""

    def report(
        self,
        *,
        step: int | None = None,
        loss: float | None = None,
        samples_per_s: float | None = None,
        waiting: str | None = None,
        of_steps: int | None = None,
        of_run: tuple[str, int] | None = None,
        **scalars: float,
    ) -> None:
        """Newest values for the panel; cheap enough for every step. ``of_run``: the job and its run that the loss
        is of; None: what nc.report() says. ``of_steps``: how many steps the loop of this cell is going to take."""


_current: Runtime | None = None


def set_runtime(runtime: Runtime | None) -> None:
    """Called by ``node`` when the kernel's runtime is up."""
    global _current
    _current = runtime


def current_runtime() -> Runtime:
    """The runtime of this kernel.

    Raises:
        RuntimeError: this process is no node of a cluster.
    """
    if _current is None:
        raise RuntimeError(
            "this process is not a node of a cluster: begin the cell with %%on_all, after %load_ext notebook_cluster "
            "and %cluster start; a script runs with notebook-cluster run SCRIPT.py --nodes 2"
        )
    return _current
