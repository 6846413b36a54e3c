"""Large arrays that are sent from where they are: nobody reads them any more when the operation is over."""

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from notebook_cluster.collectives import CollectiveSettings, PeerLost
from notebook_cluster.mesh import MeshSettings
from notebook_cluster.protocol.mesh import CellFrame
from tests.conftest import wait_until
from tests.mesh_nodes import MeshNode, mesh_nodes, run_cell

CHUNK = 128 * 1024
SIZE = 4 << 20
"""Elements: 64 chunks for the other node, more than the sockets and libzmq hold."""

_cells = iter(range(1, 1000))


@pytest.fixture(params=[["one", "one"], ["one", "two"]], ids=["ipc", "tcp"])
def two(request: pytest.FixtureRequest) -> Iterator[list[MeshNode]]:
    with mesh_nodes(
        "mini",
        "desk",
        peers=request.param,
        settings=CollectiveSettings(shared_memory=False, lent_bytes=1 << 20, slice_block=1 << 20),
        mesh_settings=MeshSettings(
            tcp_chunk=CHUNK, loopback_chunk=CHUNK, ipc_chunk=CHUNK, tcp_high_water_mark=4, ipc_high_water_mark=4
        ),
    ) as nodes:
        yield nodes


def hold(node: MeshNode) -> threading.Event:
    """The node reads nothing from its sockets until the event is set."""
    held, go = threading.Event(), threading.Event()
    node.loop.call_soon(lambda: (held.set(), go.wait(60)))
    assert held.wait(10)
    return go


def lose_in_the_middle(node: MeshNode) -> None:
    """While most of an array is on its way, ``node`` hears that the other one was lost."""
    wait_until(lambda: node.mesh.waiting("desk") > 20)
    node.loop.call(lambda: node.collectives.receiver.lose("desk", "was lost"))


def test_a_node_that_left_the_operation_may_change_its_array(two: list[MeshNode]) -> None:
    mini, desk = two
    came: list[tuple[str, float]] = []

    def on_frame(sender: str, header: Any, payload: memoryview) -> None:
        if isinstance(header, CellFrame):
            came.append((header.name, float(np.frombuffer(payload, np.float32).min()) if len(payload) else 0.0))

    def body(collectives: Any, rank: int) -> None:
        if rank:
            return
        x = np.ones(SIZE, np.float32)
        with pytest.raises(PeerLost):
            collectives.all_reduce(x)
        x[:] = -1
        mini.mesh.send("desk", CellFrame(cell=1, generation=1, operation=99, name="last"))

    desk.mesh.on_frame = on_frame
    mini.mesh.send("desk", CellFrame(cell=0, generation=1, operation=1, name="first"))
    wait_until(lambda: came != [])
    go = hold(desk)

    loser = threading.Thread(target=lose_in_the_middle, args=(mini,))
    loser.start()
    run_cell([mini, desk], body, next(_cells))
    loser.join(30)
    go.set()
    wait_until(lambda: any(name == "last" for name, _ in came))
    assert -1.0 not in [value for _, value in came]


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_nothing_holds_the_array_after_the_operation(two: list[MeshNode], operation: str) -> None:
    def body(collectives: Any, rank: int) -> float:
        x = np.full(SIZE, rank + 1.0, np.float32)
        gone = weakref.ref(x)
        result = getattr(collectives, operation)(x)
        del x
        wait_until(lambda: gone() is None)
        return float(result.min() + result.max())

    gc.collect()
    gc.disable()
    try:
        assert run_cell(two, body, next(_cells)) == [6.0, 6.0]
    finally:
        gc.enable()


def test_the_cell_goes_on_after_an_operation_that_was_left(two: list[MeshNode]) -> None:
    """The way that starts over is used by what comes next."""
    mini, desk = two

    def body(collectives: Any, rank: int) -> float:
        if rank:
            return float(collectives.recv(0)[0])
        with pytest.raises(PeerLost):
            collectives.all_reduce(np.ones(SIZE, np.float32))
        mini.loop.call(lambda: collectives.receiver._holes.clear())
        collectives.send(np.full(3, 7.0), 1)
        return 7.0

    go = hold(desk)
    loser = threading.Thread(target=lambda: (lose_in_the_middle(mini), go.set()))
    loser.start()
    assert run_cell([mini, desk], body, next(_cells)) == [7.0, 7.0]
    loser.join(30)
