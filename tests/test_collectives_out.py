"""``all_reduce(x, out=...)``: the same bits as in a new array, and nobody writes there when the operation is over."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from notebook_cluster.collectives import CollectiveSettings, PeerLost
from notebook_cluster.mesh import MeshSettings
from notebook_cluster.protocol.mesh import CellFrame
from tests.conftest import wait_until
from tests.mesh_nodes import FIVE, MeshNode, five_nodes, mesh_nodes, possible, run_cell

torch = pytest.importorskip("torch")

SIZES = (0, 1, 7, 4099, 70_001)
"""0, fewer elements than nodes, one step, several blocks that are copied and that are lent."""

LARGEST = [(torch.float32, "mean"), (torch.bfloat16, "sum"), (torch.float16, "max")]

_cells = iter(range(1, 10_000))


@pytest.fixture(scope="module", params=FIVE)
def five(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[MeshNode]]]:
    with five_nodes(request.param) as nodes:
        yield request.param, nodes


@pytest.fixture(scope="module")
def two() -> Iterator[list[MeshNode]]:
    settings = CollectiveSettings(shared_memory=False, lent_bytes=1 << 20, slice_block=1 << 20)
    chunks = MeshSettings(tcp_chunk=128 * 1024, loopback_chunk=128 * 1024, ipc_chunk=128 * 1024)
    with mesh_nodes("mini", "desk", settings=settings, mesh_settings=chunks) as nodes:
        yield nodes


def play(nodes: list[MeshNode], body: Any) -> list[Any]:
    return run_cell(nodes, body, next(_cells), timeout=60)


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_algorithm_writes_the_same_bits_where_it_is_told(
    five: tuple[str, list[MeshNode]], dtype: Any, op: str
) -> None:
    where, nodes = five
    names = possible(where)
    # Blocks are bytes: the largest, which takes most of the time, with one operation for each dtype.
    sizes = SIZES if (dtype, op) in LARGEST else SIZES[:-1]
    bits = torch.int32 if dtype is torch.float32 else torch.int16

    def body(collectives: Any, rank: int) -> None:
        for size in sizes:
            x = (torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 9).to(dtype)
            for name in names:
                expected = collectives.all_reduce(x, op, name)
                other, own = torch.full_like(x, -1), x.clone()
                assert collectives.all_reduce(x, op, name, out=other) is other
                assert collectives.all_reduce(own, op, name, out=own) is own
                for found in (other, own):
                    assert torch.equal(found.view(bits), expected.view(bits)), (name, size)

    assert play(nodes, body) == [None] * 5


def test_it_may_be_changed_at_once_and_not_all_nodes_need_one(five: tuple[str, list[MeshNode]]) -> None:
    _, nodes = five

    def body(collectives: Any, rank: int) -> list[float]:
        found = []
        for turn in range(6):
            x = np.full(70_001, rank + turn, np.float32)
            result = collectives.all_reduce(x, out=x if (rank + turn) % 2 else None)
            found += [float(result.min()), float(result.max())]
            result[:] = x[:] = -1
        return found

    assert play(nodes, body) == [[float(10 + 5 * turn) for turn in range(6) for _ in range(2)]] * 5


def test_memory_of_any_layout(two: list[MeshNode]) -> None:
    """What cannot be written to as the result comes is copied there; so is what lies over the array in part."""
    size = 600_000
    whole = [np.random.default_rng(rank).standard_normal(size + 3).astype(np.float32) for rank in range(2)]
    expected = whole[0][:size] + whole[1][:size]

    def body(collectives: Any, rank: int) -> None:
        x = whole[rank][:size]
        strided, swapped = np.zeros((size, 2), np.float32)[:, 0], np.zeros(size, ">f4")
        for out in (strided, swapped):
            assert collectives.all_reduce(x, out=out) is out
            assert np.array_equal(out, expected)
        columns = torch.zeros(600, 1000).t()
        assert collectives.all_reduce(torch.from_numpy(x).reshape(1000, 600), out=columns) is columns
        assert np.array_equal(columns.numpy(), expected.reshape(1000, 600))
        memory = whole[rank].copy()
        collectives.all_reduce(memory[:size], out=memory[3:])
        assert np.array_equal(memory[3:], expected)

    assert play(two, body) == [None, None]


def test_autograd_hears_of_it(two: list[MeshNode]) -> None:
    def body(collectives: Any, rank: int) -> str:
        x = torch.ones(5, requires_grad=True)
        saved = x.detach() * 2
        squares = (x * saved).sum()
        collectives.all_reduce(saved, out=saved)
        with pytest.raises(RuntimeError) as found:
            squares.backward()
        return str(found.value)

    for text in play(two, body):
        assert "modified by an inplace operation" in text


def frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("value", "out", "error", "words"),
    [
        (np.ones(3), np.ones(4), ValueError, "out is numpy float64 4, the array numpy float64 3: they must be alike"),
        (np.ones(3), np.ones(3, np.float32), ValueError, "out is numpy float32 3, the array numpy float64 3"),
        (np.ones(3), torch.ones(3, dtype=torch.float64), ValueError, "out is torch float64 3, the array numpy"),
        (np.ones(3), frozen(np.ones(3)), ValueError, "out is a read-only array: pass a copy of it"),
        (np.ones(3), [0.0] * 3, TypeError, "out cannot be a list, which is not written to: pass a numpy array"),
        (np.ones(()), np.float64(1), TypeError, "out cannot be a float64, which is not written to"),
        (2.5, np.ones(1), TypeError, "out= takes the result of an array: leave it out for a number"),
    ],
    ids=["shape", "dtype", "library", "read-only", "list", "scalar", "number"],
)
def test_what_does_not_fit_is_named(two: list[MeshNode], value: Any, out: Any, error: type, words: str) -> None:
    def body(collectives: Any, rank: int) -> str:
        with pytest.raises(error) as found:
            collectives.all_reduce(value, out=out)
        return str(found.value)

    for text in play(two, body):
        assert text.startswith("all_reduce: ")
        assert words in text


def test_an_mlx_array_cannot_be_written_to(two: list[MeshNode]) -> None:
    mx = pytest.importorskip("mlx.core")

    def body(collectives: Any, rank: int) -> None:
        with pytest.raises(TypeError, match="out cannot be a array, which is not written to"):
            collectives.all_reduce(mx.ones(3), out=mx.ones(3))

    assert play(two, body) == [None, None]


def test_nothing_is_written_there_when_the_operation_was_left(two: list[MeshNode]) -> None:
    """Half of a block of the result has come when this node hears that the other one was lost; the rest comes later."""
    mini, desk = two
    late: list[Any] = []
    came: list[int] = []

    def on_frame(sender: str, header: Any, payload: memoryview) -> None:
        result = isinstance(header, CellFrame) and header.phase == 2
        if late or (result and len(came) == 4):
            late.append((sender, header, payload))
            if len(late) == 1:
                mini.collectives.receiver.lose("desk", "was lost")
            return
        if result:
            came.append(header.offset)
        mini._on_frame(sender, header, payload)

    def body(collectives: Any, rank: int) -> Any:
        x = np.full(1 << 20, rank + 1.0, np.float32)
        with pytest.raises(PeerLost):
            collectives.all_reduce(x, out=x)
        if rank:
            return None
        assert (x == 3).any()
        x[:] = -1
        wanted = len(came) + len([None for _, header, _ in late if header.phase == 2])
        desk.loop.call(lambda: desk.collectives.receiver.lose("mini", "was lost"))
        mini.loop.call(lambda: [mini._on_frame(*frame) for frame in late])
        return wanted, float(x.min()), float(x.max())

    mini.mesh.on_frame = on_frame
    try:
        found = play(two, body)
    finally:
        mini.mesh.on_frame = mini._on_frame
    assert found[1] is None
    wanted, low, high = found[0]
    assert wanted > len(came)
    assert (low, high) == (-1, -1)


def test_it_needs_no_other_memory_and_nothing_holds_it_afterwards(two: list[MeshNode]) -> None:
    def body(collectives: Any, rank: int) -> float:
        x = np.full(1 << 20, rank + 1.0, np.float32)
        gone = weakref.ref(x)
        collectives.all_reduce(x, out=x)
        assert not collectives._scratch._results._kept  # there was no other memory for the result
        total = float(x.min() + x.max())
        del x
        wait_until(lambda: gone() is None)
        return total

    gc.collect()
    gc.disable()
    try:
        assert play(two, body) == [6.0, 6.0]
    finally:
        gc.enable()
