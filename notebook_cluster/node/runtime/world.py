"""The rosters that came, which nodes a cell runs on, and the variables by which launchers' code knows its world."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from notebook_cluster.collectives import CellWorld
from notebook_cluster.protocol.node import NodeAddress, Roster


@dataclass(frozen=True)
class CellInfo:
    """What the coordinator says about a cell in the metadata of its execute_request.

    Attributes:
        cell: number of the cell.
        generation: the roster that it started with.
        nodes: names of the nodes that run it; empty when unsaid (then all of the roster).
        joined: this node came while the cell was running.
        replay: the cell ran before; this node repeats it alone to fill its namespace.
        silent: sent as a silent execute_request.
        widgets: somebody looks who is shown widgets.
        code: its text.
    """

    cell: int
    generation: int
    nodes: tuple[str, ...] = ()
    joined: bool = False
    replay: bool = False
    silent: bool = False
    widgets: bool = False
    code: str = ""


def cell_info(parent: Mapping[str, Any]) -> CellInfo | None:
    """The CellInfo in a Jupyter parent message; None for a message that is no cell of a cluster."""
    if (parent.get("header") or {}).get("msg_type") != "execute_request":
        return None
    said = (parent.get("metadata") or {}).get("notebook_cluster")
    if (
        not isinstance(said, dict)
        or not isinstance(said.get("cell"), int)
        or not isinstance(said.get("generation"), int)
    ):
        return None
    nodes = said.get("nodes")
    return CellInfo(
        cell=said["cell"],
        generation=said["generation"],
        nodes=tuple(name for name in nodes if isinstance(name, str)) if isinstance(nodes, list) else (),
        joined=bool(said.get("joined")),
        replay=bool(said.get("replay")),
        silent=bool((parent.get("content") or {}).get("silent")),
        widgets=bool(said.get("widgets")),
        code=str((parent.get("content") or {}).get("code", "")),
    )


def find(roster: Roster, name: str) -> NodeAddress | None:
    """The row of node ``name``."""
    return next((node for node in roster.nodes if node.name == name), None)


def own_row(roster: Roster | None, name: str) -> NodeAddress:
    """The row of this node, ``name``.

    Raises:
        RuntimeError: it is in no roster; says why.
    """
    row = find(roster, name) if roster is not None else None
    if row is None:
        why = "no roster has come yet" if roster is None else "it was removed"
        raise RuntimeError(f"{name!r} is not in the cluster: {why}")
    return row


def ranked(roster: Roster) -> list[NodeAddress]:
    """The roster in rank order."""
    return sorted(roster.nodes, key=lambda node: node.rank)


def cell_world(info: CellInfo, roster: Roster, name: str) -> CellWorld:
    """Who takes part in the collectives of a cell, as node ``name`` sees it."""
    excluded = ""
    taking_part = set(info.nodes) or {node.name for node in roster.nodes}
    if info.replay:
        excluded = (
            f"cell {info.cell} is replayed on {name!r} alone, so there is nobody to exchange with: "
            "put what a node must know again into a cell without collectives"
        )
        taking_part = {name}
    elif info.joined:
        excluded = (
            f"{name!r} joined while cell {info.cell} was running, and the collectives of that cell are between those "
            "who started it: they work here from the next cell on (training rounds already do)"
        )
        taking_part = {name}
    rows = [node for node in ranked(roster) if node.name in taking_part]
    return CellWorld(
        cell=info.cell,
        generation=info.generation,
        nodes={node.name: node.rank for node in rows},
        excluded=excluded,
        replay=info.replay,
        peers={node.name: node.peer for node in rows},
    )


def address_seen_from(own: NodeAddress, other: NodeAddress) -> str:
    """The host name or IP address at which ``own`` reaches ``other``."""
    if own.machine == other.machine:
        return "127.0.0.1"
    outside = [host for host in other.hosts if not host.startswith("127.") and host != "::1"]
    return (outside or other.hosts or ["127.0.0.1"])[0]


def torchrun_variables(own: NodeAddress, rows: Sequence[NodeAddress]) -> dict[str, str]:
    """torchrun's variables for node ``own`` of ``rows``, the nodes of its cell in rank order; the first is master."""
    on_peer = [row.name for row in rows if row.peer == own.peer]
    return {
        "RANK": str(_index(own, rows)),
        "LOCAL_RANK": str(on_peer.index(own.name)),
        "WORLD_SIZE": str(len(rows)),
        "LOCAL_WORLD_SIZE": str(len(on_peer)),
        "MASTER_ADDR": address_seen_from(own, rows[0]),
        "MASTER_PORT": str(rows[0].master_port),
    }


def jax_variables(own: NodeAddress, rows: Sequence[NodeAddress]) -> dict[str, str]:
    """JAX's variables for node ``own``, as :func:`torchrun_variables`."""
    host, port = address_seen_from(own, rows[0]), rows[0].master_port
    return {
        "JAX_COORDINATOR_ADDRESS": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "JAX_PROCESS_ID": str(_index(own, rows)),
        "JAX_NUM_PROCESSES": str(len(rows)),
    }


def _index(own: NodeAddress, rows: Sequence[NodeAddress]) -> int:
    return [row.name for row in rows].index(own.name)


def torch_device(device: str, environ: Mapping[str, str]) -> str:
    """torch's word for a Device.id: ROCm is ``cuda`` there, and the only visible GPU is ``cuda:0``."""
    kind, _, number = device.partition(":")
    if kind not in ("cuda", "rocm"):
        return device or "cpu"
    visible = environ.get("HIP_VISIBLE_DEVICES" if kind == "rocm" else "CUDA_VISIBLE_DEVICES", "")
    alone = bool(visible) and "," not in visible
    return "cuda:0" if alone or not number else f"cuda:{number}"


_KEPT = 16


class Rosters:
    """``add`` is called on the I/O thread, ``wait_for`` on the main thread."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._kept: dict[int, Roster] = {}
        self._waiters: list[tuple[int, SimpleQueue[None]]] = []

    def add(self, roster: Roster) -> None:
        """The newest roster; the node already acts by it."""
        self._kept[roster.generation] = roster
        if len(self._kept) > _KEPT:
            del self._kept[min(self._kept)]
        self._wake()

    def wait_for(self, generation: int, timeout: float, call_soon: Callable[[Callable[[], None]], None]) -> Roster:
        """The roster of ``generation``, or a newer one where that is no longer kept. ``call_soon`` runs something on
        the I/O thread.

        Raises:
            RuntimeError: it did not come within ``timeout`` seconds.
        """
        arrived: SimpleQueue[None] = SimpleQueue()

        def ask() -> None:
            self._waiters.append((generation, arrived))
            self._wake()

        if self._newest() < generation:
            call_soon(ask)
            self._sleep(arrived, generation, timeout)
        return self._kept.get(generation) or self._kept[self._newest()]

    def _sleep(self, arrived: "SimpleQueue[None]", generation: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                return arrived.get(timeout=min(0.2, max(0.0, deadline - time.monotonic())))
            except Empty:
                continue
        have = self._newest() if self._kept else "none"
        raise RuntimeError(
            f"the roster of generation {generation} did not reach {self._node!r} within {timeout:g} s (it has {have}): "
            "run the cell again, or %cluster restart this node"
        )

    def _newest(self) -> int:
        return max(list(self._kept), default=-1)

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            if waiter[0] <= self._newest():
                self._waiters.remove(waiter)
                waiter[1].put(None)
