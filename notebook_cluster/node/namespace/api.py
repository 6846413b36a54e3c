"""What ``import notebook_cluster as nc`` offers inside a cell."""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.node.runtime.telemetry import as_number
from notebook_cluster.node.runtime.world import find, jax_variables
from notebook_cluster.protocol.node import NodeAddress
from notebook_cluster.training.loop.progress import open_block
from notebook_cluster.training.runtime import current_runtime

if TYPE_CHECKING:
    from notebook_cluster.collectives.hierarchical import AlgorithmName
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

Reduction = Literal["sum", "mean", "max", "min"]


def rank() -> int:
    """Number of this node, 0 to ``world_size() - 1``, as the cluster is now."""
    return current_runtime().rank()


def world_size() -> int:
    """How many nodes the cluster has now."""
    return current_runtime().world_size()


def device() -> str:
    """torch's word for what this node computes on: ``cpu``, ``mps``, ``cuda:0``."""
    return current_runtime().device()


def node() -> str:
    """Name of this node."""
    return current_runtime().name


def barrier() -> None:
    """Return when every node of the cell has called it."""
    node_runtime("barrier").collectives.barrier()


@contextmanager
def one_node_first(per: Literal["machine", "cluster"] = "machine") -> Iterator[bool]:
    """Let one node of each machine through this block first, and the others when those have left it::

        with nc.one_node_first():
            train_set = datasets.MNIST("data", download=True)

    For what nodes of one machine would do to the same files at once: the first one downloads, the others find what is
    there. Accelerate has it as ``local_main_process_first``. Every node of the cell comes here, and exchanges nothing
    in the block; the value is True on those that go first, which are the lowest ranks. In a cell that is replayed, and
    on a node that joins while it runs, the node just goes through.

    Args:
        per: ``machine``, or ``cluster`` where all nodes have the same folder, as on many institutions' machines: one of
            all goes first.

    Raises:
        ValueError: ``per`` is neither, or the nodes made different calls; names them.
        PeerLost: a node that goes first raised, ended or was lost in the block.
    """
    if per not in ("machine", "cluster"):
        raise ValueError(f'one_node_first: per={per!r}: use "machine" or "cluster"')
    runtime = node_runtime("one_node_first")
    if runtime.collectives.alone:
        yield True
        return
    rows = rows_of(runtime, runtime.collectives.names("one_node_first"), "one_node_first")
    first = runtime.name in first_nodes(rows, per)
    if not first:
        runtime.collectives.barrier(f"one_node_first(per={per})")
    yield first
    if first:
        runtime.collectives.barrier(f"one_node_first(per={per})")


def first_nodes(rows: Sequence[NodeAddress], per: str) -> set[str]:
    """The name of the first row, or of the first one of each machine."""
    return {row.name for row in {row.machine if per == "machine" else "": row for row in reversed(rows)}.values()}


def all_reduce(x: Any, op: Reduction = "sum", algorithm: "AlgorithmName" = "auto", out: Any = None) -> Any:
    """The ``op`` of ``x`` over all nodes of the cell: a new array, tensor or number, the same bits on every node.

    Summed in rank order (nodes of one peer first where several share one); half precision in float32; integers exactly.
    The result has no gradient. ``algorithm`` may say how: ``direct``, ``star``, ``tree``, ``slices``, ``ring``,
    ``shared`` or ``hierarchical``; ``auto`` chooses by size, number of nodes and who shares a peer.

    With ``out``, an array or tensor of the library, dtype and shape of ``x``, the result is written there and ``out``
    is returned; with ``out=x`` it takes no memory of its own. A node that is stopped or loses another one meanwhile
    finds parts of the old and of the new values in it.

    Raises:
        ValueError: shapes, dtypes, operations or algorithms differ between nodes, or ``out`` is unlike ``x``; the
            message names both.
        TypeError: ``out`` is nothing that can be written to, such as an MLX array.
        PeerLost: a node of the cell raised, ended or was lost.
    """
    return node_runtime("all_reduce").collectives.all_reduce(x, op, algorithm, out)


def all_gather(x: Any) -> list[Any]:
    """The ``x`` of every node in rank order: arrays or tensors of any shape, numbers or plain data."""
    return node_runtime("all_gather").collectives.all_gather(x)


def reduce_scatter(x: Any, op: Reduction = "sum") -> Any:
    """This node's rows of the ``op`` of ``x`` over all nodes; the first dimension divides by the number of nodes."""
    return node_runtime("reduce_scatter").collectives.reduce_scatter(x, op)


def broadcast(x: Any = None, src: int = 0) -> Any:
    """The ``x`` of rank ``src`` on every node; a tensor goes to the device of the ``x`` that a receiver passes."""
    return node_runtime("broadcast").collectives.broadcast(x, src)


def send(x: Any, dst: int) -> None:
    """Send ``x`` to rank ``dst``, which gets it with ``recv``. Returns at once while little is on its way."""
    node_runtime("send").collectives.send(x, dst)


def recv(src: int) -> Any:
    """The next value that rank ``src`` has sent to this node, in order. Tensors arrive on the CPU."""
    return node_runtime("recv").collectives.recv(src)


def report(*, loss: Any = None, step: int | None = None, samples_per_s: Any = None, **scalars: Any) -> None:
    """Show numbers of this node in the panel: ``nc.report(loss=loss, accuracy=0.9)``. Cheap enough for every step.

    One-element tensors are read at most four times a second, so a GPU is not made to wait. Inside
    ``with sync.global_model():`` the numbers are those of the global model; scalars are shown at the node as well.

    Raises:
        TypeError: a value is no number; names it.
    """
    for name in ("waiting", "of_run"):
        if name in scalars:
            raise TypeError(f"report: the name {name!r} is taken: use another one")
    block = open_block()
    if block is not None:
        numbers = {name: as_number(name, value) for name, value in scalars.items()}
        if loss is not None:
            numbers["loss"] = as_number("loss", loss)
        block.note(numbers, None if step is None else int(as_number("step", step)))
        step = loss = None
    current_runtime().report(step=step, loss=loss, samples_per_s=samples_per_s, **scalars)


def this_node() -> "NodeRuntime | None":
    """The runtime of the node that this process is; None: it is none."""
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

    runtime = current_runtime()
    return runtime if isinstance(runtime, NodeRuntime) else None


def node_runtime(operation: str) -> "NodeRuntime":
    """This node's runtime, for an operation that others wait in too.

    Raises:
        RuntimeError: no node, or not the thread that runs the cell: two threads would mix up the order of operations.
    """
    runtime = this_node()
    if runtime is None:
        raise RuntimeError(f"{operation} needs the runtime of a node, not {type(current_runtime()).__name__}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{operation} is called from a thread: call it from the cell itself")
    return runtime


def jax_distributed() -> dict[str, str | int]:
    """What ``jax.distributed.initialize`` wants to know about the nodes that run this cell, as its arguments::

        jax.distributed.initialize(**nc.jax_distributed())

    JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID and JAX_NUM_PROCESSES are set as well, until the cell ends. The group is
    JAX's own: it is not encrypted and lives as long as the kernel, or until ``jax.distributed.shutdown()``.

    Raises:
        RuntimeError: a node of the cell has left the cluster.
    """
    runtime = node_runtime("jax_distributed")
    rows = rows_of(runtime, runtime.collectives.names("jax_distributed"), "jax_distributed")
    values = jax_variables(next(row for row in rows if row.name == runtime.name), rows)
    set_until_cell_end(runtime, values)
    return {
        "coordinator_address": values["JAX_COORDINATOR_ADDRESS"],
        "num_processes": int(values["JAX_NUM_PROCESSES"]),
        "process_id": int(values["JAX_PROCESS_ID"]),
    }


def rows_of(runtime: "NodeRuntime", names: list[str], operation: str) -> list[NodeAddress]:
    """The rows of the nodes ``names``, for ``operation``.

    Raises:
        RuntimeError: one is in the cluster no more.
    """
    roster = runtime.roster
    rows = [find(roster, name) if roster is not None else None for name in names]
    missing = [name for name, row in zip(names, rows, strict=True) if row is None]
    if missing:
        raise RuntimeError(f"{operation}: {', '.join(missing)} left the cluster: run the cell again")
    return [row for row in rows if row is not None]


def set_until_cell_end(runtime: "NodeRuntime", values: Mapping[str, str]) -> None:
    """Put ``values`` into the environment; at the end of the cell what was there before is there again."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    runtime.at_cell_end(lambda status: _put_back(values, before))


def _put_back(values: Mapping[str, str], before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if os.environ.get(name) != values[name]:
            continue  # the cell has set another one, which is its own
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
