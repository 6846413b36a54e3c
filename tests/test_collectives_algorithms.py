"""Every way to add up an array: right, the same bits on all nodes, chosen by size, nodes and peers."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from notebook_cluster.collectives.algorithms import blocks_of, slices_of
from notebook_cluster.collectives.chunked_messages import ChunkedMessage, may_be_kept
from notebook_cluster.collectives.hierarchical import by_peer, choose
from notebook_cluster.collectives.shared_reduce import block_elements
from notebook_cluster.protocol.mesh import CellFrame
from tests.mesh_nodes import FIVE, MeshNode, five_nodes, possible, run_cell

torch = pytest.importorskip("torch")

SIZES = (0, 1, 2, 7, 4099, 70_001)
"""0, fewer elements than nodes, primes, and more than a block of the nodes' small settings."""

FLAT = ("auto", "direct", "star", "slices", "ring", "hierarchical")
"""Between nodes that are each alone on their peer these add rank by rank."""

_cells = iter(range(1, 10_000))


@pytest.fixture(scope="module", params=FIVE)
def five(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[MeshNode]]]:
    with five_nodes(request.param) as nodes:
        yield request.param, nodes


def play(nodes: list[MeshNode], body: Any) -> list[Any]:
    return run_cell(nodes, body, next(_cells), timeout=60)


def test_every_algorithm_gives_every_node_the_same_bits(five: tuple[str, list[MeshNode]]) -> None:
    where, nodes = five
    arrays = {n: [np.random.default_rng(r).standard_normal(n).astype(np.float32) * 9 for r in range(5)] for n in SIZES}

    def body(collectives: Any, rank: int) -> Any:
        return {
            (name, size): collectives.all_reduce(arrays[size][rank], algorithm=name).tobytes()
            for name in possible(where)
            for size in SIZES
        }

    results = play(nodes, body)
    for (name, size), found in results[0].items():
        assert all(result[name, size] == found for result in results[1:]), (name, size)
        parts = arrays[size]
        in_order = ((((parts[0] + parts[1]) + parts[2]) + parts[3]) + parts[4]).tobytes()
        flat = name in FLAT if where == "peers" else name in ("direct", "star", "slices", "ring", "shared")
        if flat:
            assert found == in_order, (name, size)
        assert np.allclose(np.frombuffer(found, np.float32), np.sum(parts, axis=0), atol=1e-4), (name, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.uint8])
def test_every_algorithm_keeps_the_dtype_and_is_exact_for_integers(
    five: tuple[str, list[MeshNode]], dtype: Any
) -> None:
    where, nodes = five
    tensors = [torch.randint(0, 50, (5003,), generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(5)]
    expected = sum(tensor.double() for tensor in tensors)
    results = play(
        nodes, lambda c, rank: [c.all_reduce(tensors[rank], algorithm=name) for name in possible(where)]
    )  # sums of small integers are exact in half precision too
    for result in results:
        for name, found in zip(possible(where), result, strict=True):
            assert found.dtype == dtype, name
            assert torch.equal(found.double(), expected.to(dtype).double()), name


@pytest.mark.parametrize("op", ["mean", "max", "min"])
def test_every_algorithm_knows_every_reduction(five: tuple[str, list[MeshNode]], op: str) -> None:
    where, nodes = five
    expected = {"mean": 2.0, "max": 4.0, "min": 0.0}[op]
    results = play(
        nodes,
        lambda c, rank: [c.all_reduce(torch.full((3001,), float(rank)), op, name) for name in possible(where)],
    )
    for result in results:
        assert all(torch.equal(found, torch.full((3001,), expected)) for found in result)


def test_reduce_scatter_in_several_blocks(five: tuple[str, list[MeshNode]]) -> None:
    _, nodes = five
    whole = torch.arange(50_000.0).reshape(25, 2000)

    def body(collectives: Any, rank: int) -> Any:
        rows = [collectives.reduce_scatter(whole * (rank + turn)) for turn in range(3)]
        collectives.all_reduce(np.zeros(30_000, np.float32))  # would write over what is still being read
        return rows

    results = play(nodes, body)
    for turn in range(3):
        assert torch.equal(torch.cat([result[turn] for result in results]), whole * (10 + 5 * turn))


def test_a_result_and_the_argument_may_be_changed_at_once(five: tuple[str, list[MeshNode]]) -> None:
    where, nodes = five

    def body(collectives: Any, rank: int) -> list[float]:
        sums = []
        for name in possible(where):
            for turn in range(4):
                x = np.full(30_001, rank + turn, np.float32)
                result = collectives.all_reduce(x, algorithm=name)
                x[:] = -1
                sums.append(float(result.max()) + float(result.min()))
                result[:] = -1
        return sums

    for result in play(nodes, body):
        assert result == [2.0 * (10 + 5 * turn) for _ in possible(where) for turn in range(4)]


def test_results_of_one_cell_stay_apart(five: tuple[str, list[MeshNode]]) -> None:
    where, nodes = five

    def body(collectives: Any, rank: int) -> list[list[float]]:
        found = {name: [] for name in possible(where)}
        for turn in range(3):
            x = np.full(200_000, rank + turn, np.float32)
            for name in found:
                found[name].append(collectives.all_reduce(x, algorithm=name))
        return [[float(part.min()) for part in parts] for parts in found.values()]

    assert play(nodes, body) == [[[10.0, 15.0, 20.0]] * len(possible(where))] * 5


def test_algorithms_that_differ_are_named(five: tuple[str, list[MeshNode]]) -> None:
    _, nodes = five
    results = play(nodes, lambda c, rank: c.all_reduce(np.zeros(9), algorithm="slices" if rank else "direct"))
    assert "all_reduce(sum, direct)" in str(results[0])
    assert "all_reduce(sum, slices)" in str(results[1])


def test_an_algorithm_that_is_unknown_or_impossible_is_named() -> None:
    with pytest.raises(ValueError, match="algorithm='rnig' is unknown: use one of auto, direct"):
        choose("rnig", 1, ["a"], {}, 1, True)
    with pytest.raises(ValueError, match="needs all nodes on one peer, they are on 2: use 'hierarchical'"):
        choose("shared", 1, ["a", "b"], {"a": "x", "b": "y"}, 1, True)


@pytest.mark.parametrize(
    ("size", "nodes", "peers", "shared", "expected"),
    [
        (1 << 26, 4, 1, True, "shared"),
        (1 << 26, 4, 1, False, "slices"),
        (1 << 26, 4, 4, True, "slices"),
        (1 << 26, 6, 3, True, "hierarchical"),
        (1 << 26, 40, 40, True, "ring"),
        (100, 4, 4, True, "direct"),
        (100, 12, 12, True, "star"),
        (100, 30, 30, True, "tree"),
    ],
)
def test_the_algorithm_follows_size_nodes_and_peers(
    size: int, nodes: int, peers: int, shared: bool, expected: str
) -> None:
    names = [str(index) for index in range(nodes)]
    assert choose("auto", size, names, {name: f"p{int(name) % peers}" for name in names}, 16384, shared) == expected


def test_nodes_whose_peer_is_unknown_are_alone() -> None:
    assert by_peer(["a", "b", "c", "d"], {"a": "x", "c": "x"}) == [["a", "c"], ["b"], ["d"]]


@pytest.mark.parametrize("count", [0, 1, 3, 6_000_000_011, (1 << 40) + 7])
def test_slices_and_blocks_cover_any_size_exactly(count: int) -> None:
    """Sizes far over 4 GiB: only the arithmetic."""
    pieces = slices_of(count, 7)
    assert [piece.start for piece in pieces] + [count] == [0] + [piece.stop for piece in pieces]
    longest = max(piece.stop - piece.start for piece in pieces)
    size = max(1, longest // 5)
    number = max(1, -(-longest // size))
    for piece in pieces:
        blocks = blocks_of(piece, size, number)
        assert blocks[0].start == piece.start
        assert blocks[-1].stop == piece.stop
        assert all(before.stop == after.start for before, after in pairwise(blocks))
        assert max(block.stop - block.start for block in blocks) <= size
    assert 7 * 4 * block_elements(count, 7, 16 << 20, 4) <= max(16 << 20, 7 * 4)


def test_a_message_over_4_gib_is_described_by_its_header() -> None:
    total = (1 << 33) - 4
    header = CellFrame(
        cell=1, generation=1, operation=1, name="all_reduce(sum)", kind="numpy", dtype="float32", shape=[1 << 31],
        total=total, offset=total - 4,
    )  # fmt: skip
    assert may_be_kept(header, 1 << 33)
    assert not may_be_kept(header, 1 << 32)
    data = memoryview(np.zeros(0, np.uint8))
    assert not ChunkedMessage("desk", header, data).add(header, memoryview(b"1234"))


@pytest.mark.parametrize(("first", "then"), [(256, 8192), (8192, 256), (1000, 768)])
def test_a_value_that_is_sent_again_in_other_pieces_arrives_whole(first: int, then: int) -> None:
    """As where a sender finds a way to a node that takes longer frames, or shorter ones."""
    data = np.random.default_rng(0).bytes(20_000)
    header = CellFrame(
        cell=1, generation=1, operation=1, name="all_reduce", kind="ndarray", dtype="<f4", shape=[5000], total=20_000
    )
    message = ChunkedMessage("desk", header, memoryview(bytearray(20_000)))

    def send(size: int, start: int, lost: tuple[int, ...] = ()) -> None:
        for number, offset in enumerate(range(start // size * size, 20_000, size)):
            if number not in lost:
                piece = memoryview(data)[offset : offset + size]
                message.add(msgspec.structs.replace(header, offset=offset), piece)

    send(first, 0, lost=(1, 2))
    assert not message.complete
    assert message.first_missing() == first
    send(then, message.first_missing())
    assert message.complete
    assert bytes(message.data) == data
