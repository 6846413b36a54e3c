"""How much memory the arrays of other nodes take on their way, and that blocks that follow each other may share it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from notebook_cluster.collectives import CollectiveSettings
from notebook_cluster.collectives.chunked_messages import place_for
from notebook_cluster.mesh import MeshSettings
from notebook_cluster.protocol.mesh import CellFrame
from tests.conftest import wait_until
from tests.mesh_nodes import MeshNode, mesh_nodes, run_cell

BLOCK, CHUNK = 64 * 1024, 16 * 1024
SIZE = 1_000_003
"""Elements: for each of three nodes 21 blocks, of which the last is shorter."""

_cells = iter(range(1, 1000))


@pytest.fixture(params=["aaa", "abc"], ids=["ipc", "tcp"])
def three(request: pytest.FixtureRequest) -> Iterator[list[MeshNode]]:
    with mesh_nodes(
        "mini",
        "desk",
        "book",
        peers=list(request.param),
        settings=CollectiveSettings(shared_memory=False, lent_bytes=1 << 20, slice_block=BLOCK, ahead_bytes=BLOCK),
        mesh_settings=MeshSettings(tcp_chunk=CHUNK, loopback_chunk=CHUNK, ipc_chunk=CHUNK),
    ) as nodes:
        yield nodes


@pytest.mark.proof
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [SIZE - SIZE % 3, 200_001], ids=["lent", "copied"])
def test_blocks_that_take_the_same_memory_do_not_mix(three: list[MeshNode], operation: str, size: int) -> None:
    arrays = np.random.default_rng(3).standard_normal((8, 3, size)).astype(np.float32)

    def body(collectives: Any, rank: int) -> list[bytes]:
        return [getattr(collectives, operation)(turn[rank]).tobytes() for turn in arrays]

    found = run_cell(three, body, next(_cells), timeout=120)
    for turn, values in enumerate(arrays):
        sums = values[0] + values[1] + values[2]
        for rank in range(3):
            expected = sums if operation == "all_reduce" else sums.reshape(3, -1)[rank]
            assert found[rank][turn] == expected.tobytes()


def test_only_a_few_blocks_come_before_they_are_added_up(three: list[MeshNode]) -> None:
    mini, desk, book = three
    waits: list[str] = []
    mini.collectives.receiver.on_waiting = waits.append
    came: list[int] = []

    def body(collectives: Any, rank: int) -> float:
        if rank == 1:
            # The others have sent what they may and wait for the array of this node.
            wait_until(lambda: any("desk" in text for text in waits))
            wait_until(lambda: desk.mesh.bytes_received >= 2 * BLOCK)
            came.append(desk.mesh.bytes_received)
        return float(collectives.all_reduce(np.full(SIZE, rank + 1.0, np.float32)).sum())

    assert run_cell([mini, desk, book], body, next(_cells)) == [6.0 * SIZE] * 3
    assert came[0] < 3 * BLOCK  # one from each, of 21


def test_a_long_value_that_comes_whole_stays_where_it_came() -> None:
    size = 1 << 20
    frame = memoryview(bytearray(size))

    def place(payload: memoryview, total: int) -> memoryview:
        header = CellFrame(cell=1, generation=1, operation=1, name="broadcast(src=0)", total=total)
        return place_for(header, payload).data

    assert place(frame, size) is frame
    for payload, total in ((frame, 2 * size), (frame[:4096], 4096), (memoryview(bytes(frame)), size)):
        data = place(payload, total)
        assert data.obj is not payload.obj
        assert (len(data), data.readonly) == (total, False)
