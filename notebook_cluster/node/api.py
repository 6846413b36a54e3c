"""What ``import notebook_cluster as nc`` offers inside a cell."""

import threading
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.training.runtime import current_runtime

if TYPE_CHECKING:
    from notebook_cluster.node.runtime import NodeRuntime

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
    _runtime("barrier").collectives.barrier()


def all_reduce(x: Any, op: Reduction = "sum") -> Any:
    """The ``op`` of ``x`` over all nodes of the cell: a new array, tensor or number, the same bits on every node.

    Summed in rank order; half precision in float32; integers exactly. The result has no gradient.

    Raises:
        ValueError: shapes, dtypes or operations differ between nodes; the message names both.
        PeerLost: a node of the cell raised, ended or was lost.
    """
    return _runtime("all_reduce").collectives.all_reduce(x, op)


def all_gather(x: Any) -> list[Any]:
    """The ``x`` of every node in rank order: arrays or tensors of any shape, numbers or plain data."""
    return _runtime("all_gather").collectives.all_gather(x)


def reduce_scatter(x: Any, op: Reduction = "sum") -> Any:
    """This node's rows of the ``op`` of ``x`` over all nodes; the first dimension divides by the number of nodes."""
    return _runtime("reduce_scatter").collectives.reduce_scatter(x, op)


def broadcast(x: Any = None, src: int = 0) -> Any:
    """The ``x`` of rank ``src`` on every node; a tensor goes to the device of the ``x`` that a receiver passes."""
    return _runtime("broadcast").collectives.broadcast(x, src)


def send(x: Any, dst: int) -> None:
    """Send ``x`` to rank ``dst``, which gets it with ``recv``. Returns at once while little is on its way."""
    _runtime("send").collectives.send(x, dst)


def recv(src: int) -> Any:
    """The next value that rank ``src`` has sent to this node, in order. Tensors arrive on the CPU."""
    return _runtime("recv").collectives.recv(src)


def report(*, loss: Any = None, step: int | None = None, samples_per_s: Any = None, **scalars: Any) -> None:
    """Show numbers of this node in the panel: ``nc.report(loss=loss, accuracy=0.9)``. Cheap enough for every step.

    One-element tensors are read at most four times a second, so a GPU is not made to wait.

    Raises:
        TypeError: a value is no number; names it.
    """
    if "waiting" in scalars:
        raise TypeError("report: the name 'waiting' is taken: use another one")
    current_runtime().report(step=step, loss=loss, samples_per_s=samples_per_s, **scalars)


def _runtime(operation: str) -> "NodeRuntime":
    """This node's runtime, for an operation that others wait in too.

    Raises:
        RuntimeError: no node, or not the thread that runs the cell: two threads would mix up the order of operations.
    """
    from notebook_cluster.node.runtime import NodeRuntime

    runtime = current_runtime()
    if not isinstance(runtime, NodeRuntime):
        raise RuntimeError(f"{operation} needs the runtime of a node, not {type(runtime).__name__}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(f"{operation} is called from a thread: call it from the cell itself")
    return runtime
