"""``nc.torch_distributed()``: torch's own process group between the nodes of a cell, so that DDP, FSDP and Accelerate
code runs unchanged. It ends with the cell. Groups that other code has formed are named."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from notebook_cluster.node.namespace.api import node_runtime, rows_of, set_until_cell_end
from notebook_cluster.node.runtime.world import address_seen_from, torchrun_variables
from notebook_cluster.protocol.node import NodeAddress

if TYPE_CHECKING:
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

_GRACE_S = 1.0
"""For Python, or torch itself, to notice: where the main thread does not wait inside torch nothing is broken off."""
_LOOPBACKS = ("127.", "::1", "::ffff:127.")


class TorchWait:
    """Ends a wait inside torch's process group when a Stop comes or a node of the cell is lost.

    The main thread then waits in C++, for another node's bytes (gloo) or for a key of the store, and runs no Python:
    neither a KeyboardInterrupt nor PeerLost reaches it. What it waits for are TCP connections; when those are shut
    down, gloo and the store raise at once. That is done from the runtime's thread. NCCL has an abort of its own.

    It is of the cell that runs now; make it before the process group.

    Args:
        hosts: addresses of the nodes of the cell.

    Attributes:
        cause: ``desk raised ValueError: ...`` when a node was lost, else empty.
    """

    def __init__(self, runtime: "NodeRuntime", hosts: set[str]) -> None:
        self.cause = ""
        self._runtime = runtime
        self._cell = runtime.cell()
        self._hosts = hosts
        self._others = {_ends(connection) for connection in _connections()}
        """Connections that were there before torch's."""
        self._over = False
        runtime.when_broken(self._broken)

    def close(self) -> None:
        """The group is about to be destroyed."""
        self._over = True

    def _broken(self, cause: str) -> None:
        self.cause = self.cause or cause
        self._runtime.call_later(_GRACE_S, self._break_off)

    def _break_off(self) -> None:
        if self._over or self._runtime.cell() != self._cell:
            return
        with contextlib.suppress(Exception):
            _abort_nccl()
        for connection in _connections():
            if self._is_torchs(connection):
                _shut_down(connection.fd)

    def _is_torchs(self, connection: Any) -> bool:
        if not connection.raddr or _ends(connection) in self._others:
            return False
        # The mesh may have connected since, and would have to do so again.
        if {connection.laddr.port, connection.raddr.port} & self._runtime.mesh_ports():
            return False
        host = connection.raddr.ip.removeprefix("::ffff:")
        return host.startswith(_LOOPBACKS) or host in self._hosts


def _connections() -> list[Any]:
    import psutil

    return [found for found in psutil.Process().net_connections("tcp") if found.fd >= 0]


def _ends(connection: Any) -> tuple[Any, Any]:
    return connection.laddr, connection.raddr


def _shut_down(descriptor: int) -> None:
    """``descriptor`` stays torch's: only the connection ends."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        end.shutdown(socket.SHUT_RDWR)


def _abort_nccl() -> None:
    distributed: Any = sys.modules["torch.distributed"]
    if distributed.is_initialized() and "nccl" in distributed.get_backend():
        distributed.distributed_c10d._abort_process_group()


Backend = Literal["gloo", "nccl"]
_BACKENDS: tuple[Backend, ...] = ("gloo", "nccl")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "127.0.0.1"
_CONNECT_S = 10.0
"""For torch's store to be reached at rank 0."""


def torch_distributed(backend: Backend = "gloo", timeout: float = 300.0) -> None:
    """Set torch's default process group up between the nodes that run this cell; every one of them calls it.

    After it ``torch.distributed`` and what builds on it (``DistributedDataParallel``, FSDP, Accelerate) work as under
    torchrun: ranks are those of the cell's nodes in their order. The group is destroyed when the cell ends, however it
    ends; the next cell calls this again, with the nodes that are there then. A second call in one cell does nothing.

    From the call to the end of the cell torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR ...) are set as
    well; in other cells they are not, as libraries that find them form a group by themselves.

    torch does not encrypt: between machines its numbers can be read on the network, unlike those of ``nc.all_reduce``.
    A Stop, and the loss of a node, end a wait inside torch after a second.

    Args:
        backend: ``gloo`` (any device) or ``nccl`` (a CUDA GPU on every node).
        timeout: seconds that one operation may wait for the other nodes.

    Raises:
        ValueError: ``backend`` is unknown or not possible here, or differs between nodes; the message names the nodes.
        RuntimeError: torch is not installed, or code of the user has set a group up already.
        PeerLost: a node of the cell raised, ended or was lost before all were in.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"torch_distributed: backend={backend!r} is unknown: use 'gloo' or 'nccl'")
    if not timeout > 0:
        raise ValueError(f"torch_distributed: timeout={timeout!r} must be more than 0 seconds")
    runtime = node_runtime("torch_distributed")
    try:
        import torch.distributed as distributed
    except ImportError:
        raise RuntimeError(f"torch is not installed on {runtime.name!r}: pip install torch there") from None
    if _ours(runtime):
        return
    said = runtime.collectives.all_gather([runtime.name, backend, _why_not(backend, runtime), timeout])
    _check(said, distributed.is_initialized())
    names = [str(name) for name, *_ in said]
    rows = rows_of(runtime, names, "torch_distributed")
    rank = names.index(runtime.name)
    alone = all(row.machine == rows[0].machine for row in rows)
    wait = TorchWait(runtime, {host for row in rows for host in row.hosts})
    set_until_cell_end(runtime, torchrun_variables(rows[rank], rows))
    _cells[runtime.name] = (runtime.incarnation, runtime.cell())
    runtime.at_cell_end(lambda status: _destroy(runtime, wait))
    server = _listen(_LOOPBACK if alone else "") if rank == 0 else None
    port = int(runtime.collectives.broadcast(server.getsockname()[1] if server is not None else None, src=rows[0].rank))
    store = _store(server, _LOOPBACK if alone else address_seen_from(rows[rank], rows[0]), port, len(rows), timeout)
    with _interface(rows[rank], alone):
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=len(rows), timeout=timedelta(seconds=timeout)
        )
    _make_accelerate_look_again()


_cells: dict[str, tuple[int, int]] = {}
"""Node -> (incarnation, cell) whose group stands."""


def _ours(runtime: "NodeRuntime") -> bool:
    return _cells.get(runtime.name) == (runtime.incarnation, runtime.cell())


def _destroy(runtime: "NodeRuntime", wait: TorchWait) -> None:
    import torch.distributed as distributed

    wait.close()
    _cells.pop(runtime.name, None)
    if wait.cause:
        print(f"torch's process group was between this node and one that is out: {wait.cause}", file=sys.stderr)
    _make_accelerate_look_again(only_of_group=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


_named = 0
"""id of the group of other code that somebody was told of last."""


def name_foreign_group(runtime: "NodeRuntime") -> None:
    """At the end of a cell: say once in its output that code in it has formed a process group by itself."""
    global _named
    distributed = sys.modules.get("torch.distributed")
    if _ours(runtime) or distributed is None or not getattr(distributed, "is_initialized", bool)():
        _named = 0
        return
    if id(distributed.group.WORLD) == _named:
        return
    _named = id(distributed.group.WORLD)
    what = f"{distributed.get_backend()}, rank {distributed.get_rank()} of {distributed.get_world_size()}"
    print(
        f"warning: code in this cell has formed a process group of torch's own ({what}). What it exchanges, such as "
        "DDP's gradients at each step, is not encrypted, and a node that waits in it cannot be stopped. "
        "torch.distributed.destroy_process_group() ends it; nc.torch_distributed() makes one that ends with its cell",
        file=sys.stderr,
    )


def _make_accelerate_look_again(*, only_of_group: bool = False) -> None:
    """Accelerate keeps what it has seen, a group or that there was none, for the life of the process: it would want the
    group in later cells, or train each node by itself beside one."""
    state: Any = sys.modules.get("accelerate.state")
    seen = state.PartialState._shared_state if state is not None else {}
    if seen.get("backend") if only_of_group else seen:
        state.AcceleratorState._reset_state(reset_partial_state=True)


def _why_not(backend: str, runtime: "NodeRuntime") -> str:
    """Why ``backend`` does not work on this node; empty when it does."""
    import torch.distributed as distributed

    if distributed.is_initialized():
        return "has a process group of the cell's own code: call torch.distributed.destroy_process_group() first"
    if backend == "nccl" and not runtime.device().startswith("cuda"):
        return f"computes on {runtime.device()}, and nccl needs a CUDA GPU on every node: use 'gloo'"
    available = distributed.is_nccl_available() if backend == "nccl" else distributed.is_gloo_available()
    return "" if available else f"has a torch without {backend}: use the other backend"


def _check(said: list[Any], initialized: bool) -> None:
    """All nodes have heard the same, so all raise the same."""
    reasons = [f"{name!r} {reason}" for name, _, reason, _ in said if reason]
    if reasons:
        error = RuntimeError if initialized else ValueError
        raise error(f"torch_distributed: {'; '.join(reasons)}")
    if len({(backend, timeout) for _, backend, _, timeout in said}) > 1:
        sides = ", ".join(f"{name!r} wants {backend} with timeout={timeout:g}" for name, backend, _, timeout in said)
        raise ValueError(f"torch_distributed: {sides}: they must be equal on all nodes")


def _listen(host: str) -> socket.socket:
    """The socket of torch's store: on loopback only while all nodes are on one machine."""
    server = socket.create_server((host, 0))
    server.set_inheritable(False)
    return server


def _store(server: socket.socket | None, host: str, port: int, size: int, timeout: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined, unused-ignore]

    # The socket listens already: whoever does not get through finds nobody there any more.
    options: dict[str, Any] = {"timeout": timedelta(seconds=min(timeout, _CONNECT_S)), "wait_for_workers": False}
    if server is None:
        store = TCPStore(host, port, size, False, **options)
    else:
        store = TCPStore(host, port, size, True, master_listen_fd=server.detach(), **options)
    store.set_timeout(timedelta(seconds=timeout))
    return store


@contextlib.contextmanager
def _interface(own: NodeAddress, alone: bool) -> Iterator[None]:
    """Tell torch on which network to listen: by itself it takes the host name's address, which on many systems is a
    loopback address. What the user has set stays."""
    name = _interface_of([_LOOPBACK] if alone else own.hosts)
    ours = {variable: name for variable in _INTERFACES if name and variable not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for variable in ours:
            os.environ.pop(variable, None)


def _interface_of(hosts: list[str]) -> str:
    """The network interface that has the first of ``hosts`` that is not loopback, if there is one."""
    if sys.platform == "win32":
        return ""  # gloo knows no interfaces there
    import psutil

    wanted = [host for host in hosts if not host.startswith("127.") and host != "::1"] or hosts
    for host in wanted:
        for name, addresses in psutil.net_if_addrs().items():
            if any(address.address.partition("%")[0] == host for address in addresses):
                return str(name)
    return ""
