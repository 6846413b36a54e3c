"""The processes of :mod:`benchmarks.all_reduce`: a mesh for each transport and a gloo group, without kernels."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zmq
from msgspec.structs import replace

from notebook_cluster.collectives import CellWorld, Collectives, CollectiveSettings
from notebook_cluster.mesh import Mesh, MeshSettings
from notebook_cluster.mesh.mesh import free_port
from notebook_cluster.protocol.mesh import CellFrame, MeshHeader
from notebook_cluster.protocol.node import NodeAddress, Roster
from notebook_cluster.sockets import IOThread

TRANSPORTS = ("shm", "ipc", "tcp", "tcp+curve")
TIMEOUT = 300.0
"""Seconds for one block."""
_WARM = 2
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Place:
    """Where a node is: its address, and the network namespace in which it has it (empty: this one)."""

    address: str = "127.0.0.1"
    namespace: str = ""

    @property
    def interface(self) -> str:
        """The network card there."""
        return "eth0" if self.namespace else "lo"

    def enter(self) -> None:
        """From now on this thread and those that it starts are there.

        Raises:
            OSError: that is not allowed.
        """
        if self.namespace:
            with open(f"/run/netns/{self.namespace}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"namespace {self.namespace} cannot be entered")


@dataclass(frozen=True)
class Block:
    """``times`` repetitions of one operation: ``way`` is ``gloo`` or a transport, ``mb`` 0 a barrier. Ours makes a new
    array, or writes over the given one as gloo does."""

    way: str
    mb: float
    times: int
    in_place: bool = True


class Node:
    """One node on one transport: what a kernel's runtime has of it."""

    def __init__(self, rank: int, transport: str, directory: Path, place: Place) -> None:
        self.name = f"node-{rank}"
        self._rank, self._transport, self._place = rank, transport, place
        self._loop = IOThread(f"io-{transport}")
        self._loop.start()
        self._settings = MeshSettings()
        if transport == "tcp":  # in the place of ipc, with the frames that CURVE has at this place
            chunk, frames = self._settings.loopback_chunk, self._settings.loopback_high_water_mark
            if place.namespace:
                chunk, frames = self._settings.tcp_chunk, self._settings.tcp_high_water_mark
            self._settings = MeshSettings(ipc_chunk=chunk, ipc_high_water_mark=frames)
        self._mesh = Mesh(
            self._loop, self.name, 1, socket_directory=directory, settings=self._settings, on_frame=self._on_frame
        )
        self.collectives = Collectives(self._mesh, CollectiveSettings(shared_memory=transport == "shm"))
        self._plain = self._loop.call(self._bind_plain) if transport == "tcp" else ""
        self._loop.every(0.1, self.collectives.receiver.tick)

    def address(self) -> NodeAddress:
        """Its row of the roster. With CURVE every node is a peer of its own, so that nothing goes over ipc."""
        encrypted = self._transport == "tcp+curve"
        return NodeAddress(
            name=self.name, incarnation=1, rank=self._rank, local_rank=self._rank, device="cpu",
            machine=self._place.namespace or "one", peer=f"peer-{self._rank}" if encrypted else "one",
            hosts=[self._place.address], mesh_key=self._mesh.key, mesh_port=self._mesh.port,
            mesh_ipc=self._plain or self._mesh.ipc, master_port=0,
        )  # fmt: skip

    def begin(self, addresses: list[NodeAddress]) -> None:
        """Everybody is known: the one cell begins."""
        self._mesh.set_roster(Roster(cluster="benchmark", generation=1, nodes=addresses))
        self._loop.call(lambda: None)  # a cell begins when the roster is there
        nodes, peers = {row.name: row.rank for row in addresses}, {row.name: row.peer for row in addresses}
        self.collectives.begin_cell(CellWorld(cell=1, generation=1, nodes=nodes, peers=peers))

    def close(self) -> None:
        self.collectives.end_cell()
        self._mesh.close()
        self._loop.close()

    def _bind_plain(self) -> str:
        """The ipc socket's twin on TCP."""
        listening = self._mesh._listening
        router = listening._router(self._settings.ipc_chunk, self._settings.tcp_high_water_mark)
        port = router.bind_to_random_port(f"tcp://{self._place.address}")
        listening._routers.append(router)
        self._loop.register(router, zmq.POLLIN, lambda flags: listening._receive(router, from_ipc=True))
        return f"tcp://{self._place.address}:{port}"

    def _on_frame(self, sender: str, header: MeshHeader, payload: memoryview) -> None:
        if isinstance(header, CellFrame):
            self.collectives.receiver.on_frame(sender, header, payload)


def run_blocks(places: list[Place], transports: list[str], order: list[Block]) -> Iterator[tuple[list[float], float]]:
    """Run ``order`` on a process at each of ``places``; for each block the seconds of its repetitions, of the slowest
    node, and the processor seconds of one repetition on one node.

    Raises:
        RuntimeError: a process failed; with its traceback.
    """
    context = multiprocessing.get_context("spawn")
    directory = Path(tempfile.mkdtemp(prefix="nbb-", dir="/tmp"))
    pipes: list[Connection] = []
    processes = []
    port = free_port()
    try:
        for rank in range(len(places)):
            here, there = context.Pipe()
            process = context.Process(
                target=_node_process, args=(rank, places, transports, directory, port, there), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        offered = [_answer(pipe) for pipe in pipes]
        for pipe in pipes:
            pipe.send({transport: [offer[transport] for offer in offered] for transport in transports})
        for block in order:
            for pipe in pipes:
                pipe.send(block)
            answers = [_answer(pipe) for pipe in pipes]
            slowest = [max(seconds) for seconds in zip(*(answer[0] for answer in answers), strict=True)]
            busy = sum(answer[1] for answer in answers) / len(answers) / block.times
            yield slowest, busy
        for pipe in pipes:
            pipe.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
        shutil.rmtree(directory, ignore_errors=True)


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT):
        raise RuntimeError(f"a node did not answer within {TIMEOUT:g} s")
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(f"a node failed:\n{answer}")
    return answer


def _node_process(
    rank: int, places: list[Place], transports: list[str], directory: Path, port: int, pipe: Connection
) -> None:
    try:
        with contextlib.suppress(EOFError):
            places[rank].enter()
            _serve(rank, places, transports, directory, port, pipe)
    except Exception:
        pipe.send(traceback.format_exc())


def _serve(rank: int, places: list[Place], transports: list[str], directory: Path, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as distributed

    sys.setswitchinterval(0.001)  # as in a node's kernel
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", places[rank].interface)
    nodes = {transport: Node(rank, transport, directory, places[rank]) for transport in transports}
    pipe.send({transport: replace(node.address()) for transport, node in nodes.items()})
    for transport, addresses in pipe.recv().items():
        nodes[transport].begin(addresses)
    first = f"tcp://{places[0].address}:{port}"
    distributed.init_process_group("gloo", init_method=first, rank=rank, world_size=len(places))
    while (block := pipe.recv()) is not None:
        tensor = torch.full((max(1, int(block.mb * (1 << 18))),), float(rank))
        if block.way == "gloo":
            pipe.send(_repeat(block, tensor, distributed.barrier, distributed.all_reduce))
        else:
            ours = nodes[block.way].collectives
            all_reduce = functools.partial(ours.all_reduce, out=tensor if block.in_place else None)
            pipe.send(_repeat(block, tensor, ours.barrier, all_reduce))
    for node in nodes.values():
        node.close()
    distributed.destroy_process_group()


def _repeat(
    block: Block, tensor: Any, barrier: Callable[[], Any], all_reduce: Callable[[Any], Any]
) -> tuple[list[float], float]:
    """Seconds of each repetition after the warm ones, which all nodes start together, and processor seconds of all."""
    seconds, busy = [], 0.0
    for turn in range(_WARM + block.times):
        if block.mb:
            tensor.fill_(1.0)
        barrier()
        if turn == _WARM:
            busy = 0.0
        started, busy_before = time.perf_counter(), time.process_time()
        if block.mb:
            all_reduce(tensor)
        else:
            barrier()
        seconds.append(time.perf_counter() - started)
        busy += time.process_time() - busy_before
        if block.mb:
            barrier()  # nobody fills its array again while another one is still timed
    return seconds[_WARM:], busy
