"""Ends a wait inside torch's process group when a Stop comes or a node of the cell is lost.

The main thread then waits in C++, for another node's bytes (gloo) or for a key of the store, and runs no Python:
neither a KeyboardInterrupt nor PeerLost reaches it. What it waits for are TCP connections; when those are shut down,
gloo and the store raise at once. That is done from the runtime's thread. NCCL has an abort of its own.
"""

import contextlib
import os
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notebook_cluster.node.runtime.node_runtime import NodeRuntime

_GRACE_S = 1.0
"""For Python, or torch itself, to notice: where the main thread does not wait inside torch nothing is broken off."""
_LOOPBACK = ("127.", "::1", "::ffff:127.")


class TorchWait:
    """Of the cell that runs now; make it before the process group.

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
        return host.startswith(_LOOPBACK) or host in self._hosts


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
