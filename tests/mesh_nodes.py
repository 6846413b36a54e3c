"""Several nodes in one process for the tests: real meshes on real sockets, one thread per node that plays its cell."""

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from notebook_cluster.collectives import CellWorld, Collectives, CollectiveSettings
from notebook_cluster.collectives.hierarchical import ALGORITHMS
from notebook_cluster.mesh import Mesh, MeshSettings
from notebook_cluster.protocol.mesh import CellFrame, MeshHeader
from notebook_cluster.protocol.node import NodeAddress, Roster
from notebook_cluster.sockets import IOThread

SMALL = CollectiveSettings(
    shared_block=32 * 1024,
    shared_direct=4096,
    slice_block=6 * 1024,
    ahead_bytes=6 * 1024,
    lent_bytes=64 * 1024,
    ring_block=16 * 1024,
    shared_patience=0.001,
)
"""An array of a few thousand elements has several blocks, and larger ones are lent."""

FIVE = {"one peer": list("aaaaa"), "peers": list("abcde"), "mixed": list("ababa")}
"""Where five nodes are -> the peer of each."""


class MeshNode:
    """One node: a mesh, its collectives, and what came in."""

    def __init__(
        self,
        name: str,
        directory: Path,
        incarnation: int = 1,
        settings: CollectiveSettings | None = None,
        mesh_settings: MeshSettings | None = None,
    ):
        self.name = name
        self.incarnation = incarnation
        self.peer = ""
        self.mesh_directory = directory
        self.loop = IOThread(f"io-{name}")
        self.loop.start()
        self.mesh = Mesh(
            self.loop, name, incarnation, socket_directory=directory, host="127.0.0.1", settings=mesh_settings
        )
        self.mesh.on_frame = self._on_frame
        self.collectives = Collectives(self.mesh, settings)
        self.loop.every(0.05, self.collectives.receiver.tick)
        self.frames: list[tuple[str, MeshHeader, bytes]] = []

    def _on_frame(self, sender: str, header: MeshHeader, payload: memoryview) -> None:
        if isinstance(header, CellFrame):
            self.collectives.receiver.on_frame(sender, header, payload)
        else:
            self.frames.append((sender, header, bytes(payload)))

    def address(self, rank: int, peer: str, machine: str = "one-machine") -> NodeAddress:
        self.peer = peer
        return NodeAddress(
            name=self.name, incarnation=self.incarnation, rank=rank, local_rank=rank, peer=peer, machine=machine,
            device="cpu", hosts=["127.0.0.1"], mesh_key=self.mesh.key, mesh_port=self.mesh.port,
            mesh_ipc=self.mesh.ipc, master_port=0,
        )  # fmt: skip

    def close(self) -> None:
        self.mesh.close()
        self.loop.close()


def make_roster(nodes: list[MeshNode], peers: list[str], generation: int = 1) -> Roster:
    """The roster of ``nodes``, ranks in this order; nodes with the same entry in ``peers`` talk over ipc."""
    rows = [node.address(rank, peer) for rank, (node, peer) in enumerate(zip(nodes, peers, strict=True))]
    return Roster(cluster="test", generation=generation, nodes=rows)


@contextmanager
def mesh_nodes(
    *names: str,
    peers: list[str] | None = None,
    settings: CollectiveSettings | None = None,
    mesh_settings: MeshSettings | None = None,
) -> Iterator[list[MeshNode]]:
    """Nodes that know each other; ``peers`` says which live on one peer (default: all on one, so ipc)."""
    directory = Path(tempfile.mkdtemp(prefix="nbm-", dir="/tmp"))
    nodes = [MeshNode(name, directory, settings=settings, mesh_settings=mesh_settings) for name in names]
    try:
        roster = make_roster(nodes, peers or ["one"] * len(nodes))
        for node in nodes:
            node.mesh.set_roster(roster)
            node.loop.call(lambda: None)  # a cell begins when the roster is there
        yield nodes
    finally:
        for node in nodes:
            node.close()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def five_nodes(where: str) -> Iterator[list[MeshNode]]:
    """Five nodes with blocks that are SMALL; ``where``: one of FIVE."""
    with mesh_nodes("mini", "desk", "book", "tall", "grey", peers=FIVE[where], settings=SMALL) as nodes:
        yield nodes


def possible(where: str) -> list[str]:
    """The algorithms that work there."""
    return [name for name in ALGORITHMS if name != "shared" or where == "one peer"]


def run_cell(
    nodes: list[MeshNode], body: Callable[[Collectives, int], Any], cell: int = 1, timeout: float = 60
) -> list[Any]:
    """Run ``body(collectives, rank)`` on every node at once, as a cell; results or exceptions in rank order."""
    world = CellWorld(
        cell=cell,
        generation=1,
        nodes={node.name: rank for rank, node in enumerate(nodes)},
        peers={node.name: node.peer for node in nodes},
    )
    results: list[Any] = [None] * len(nodes)

    def play(rank: int, node: MeshNode) -> None:
        node.collectives.begin_cell(world)
        try:
            results[rank] = body(node.collectives, rank)
        except Exception as error:
            results[rank] = error
        node.collectives.end_cell()

    threads = [threading.Thread(target=play, args=pair, daemon=True) for pair in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread, node in zip(threads, nodes, strict=True):
        thread.join(timeout)
        assert not thread.is_alive(), f"the cell on {node.name} did not end within {timeout} s"
    return results
