"""Collectives between real meshes in one process: values, errors that name the nodes, lost nodes."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from notebook_cluster.collectives import Collectives, CollectiveSettings, PeerLost
from notebook_cluster.collectives.expectations import REFUSED
from notebook_cluster.collectives.reduction import reduce_arrays
from notebook_cluster.protocol.mesh import CellFrame
from notebook_cluster.protocol.node import CellDone
from tests.conftest import wait_until
from tests.mesh_nodes import MeshNode, mesh_nodes, run_cell

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=[["one", "one", "one"], ["one", "one", "two"]], ids=["ipc", "mixed"])
def three(request: pytest.FixtureRequest) -> Iterator[list[MeshNode]]:
    with mesh_nodes("mini", "desk", "book", peers=request.param) as nodes:
        yield nodes


_cells = iter(range(1, 10_000))


def play(nodes: list[MeshNode], body: Any) -> list[Any]:
    return run_cell(nodes, body, next(_cells))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((size, dtype) for size in (1, 5, 1000) for dtype in ("float32", "float64", "float16", "uint8", "complex64")),
        (3_000_001, "float32"),
        (3_000_001, "int64"),
    ],
)
def test_all_reduce_sums_numpy_arrays_alike_on_all_nodes(three: list[MeshNode], size: int, dtype: str) -> None:
    arrays = [(np.random.default_rng(rank).standard_normal(size) * 9).astype(dtype) for rank in range(3)]
    results = play(three, lambda c, rank: c.all_reduce(arrays[rank]))
    wide = [array.astype(np.float32) if dtype == "float16" else array for array in arrays]
    expected = ((wide[0] + wide[1]) + wide[2]).astype(dtype)
    for result in results:
        assert result.dtype == np.dtype(dtype)
        assert result.tobytes() == expected.tobytes()


def test_integers_stay_exact(three: list[MeshNode]) -> None:
    values = np.array([2**62, -(2**62) + 1, 3], dtype=np.int64)
    results = play(three, lambda c, rank: c.all_reduce(values if rank == 0 else np.array([1, 1, 1])))
    assert results[2].tolist() == [2**62 + 2, -(2**62) + 3, 5]


def test_numbers_are_reduced_as_numbers(three: list[MeshNode]) -> None:
    assert play(three, lambda c, rank: c.all_reduce(10**30 + rank)) == [3 * 10**30 + 3] * 3
    assert play(three, lambda c, rank: c.all_reduce(rank, "mean")) == [1.0] * 3
    assert play(three, lambda c, rank: c.all_reduce(rank * 0.5, "max")) == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8])
@pytest.mark.parametrize("shape", [(), (3, 4), (300, 400), (0, 5)])
def test_torch_tensors_come_back_with_dtype_and_shape(three: list[MeshNode], dtype: Any, shape: Any) -> None:
    tensors = [(torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 9).to(dtype) for rank in range(3)]
    results = play(three, lambda c, rank: c.all_reduce(tensors[rank]))
    half = dtype in (torch.float16, torch.bfloat16)
    wide = [tensor.float() if half else tensor for tensor in tensors]
    expected = ((wide[0] + wide[1]) + wide[2]).to(dtype)
    for result in results:
        assert result.dtype == dtype
        assert result.shape == shape
        assert torch.equal(result, expected)


def test_bfloat16_is_rounded_as_torch_does() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e3
    values[:4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    a, b = values.bfloat16(), values.flip(0).bfloat16()
    bits = [tensor.view(torch.uint16).numpy() for tensor in (a, b)]
    ours = torch.from_numpy(reduce_arrays(bits, "bfloat16", "sum")).view(torch.bfloat16)
    theirs = (a.float() + b.float()).bfloat16()
    assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize(("op", "expected"), [("sum", 3.0), ("mean", 1.0), ("max", 2.0), ("min", 0.0)])
@pytest.mark.parametrize("size", [3, 100_000])
def test_reductions(three: list[MeshNode], op: str, expected: float, size: int) -> None:
    results = play(three, lambda c, rank: c.all_reduce(torch.full((size,), float(rank)), op))
    assert all(torch.equal(result, torch.full((size,), expected)) for result in results)


def test_a_result_may_be_changed_while_others_still_receive(three: list[MeshNode]) -> None:
    def body(collectives: Collectives, rank: int) -> float:
        x = np.full(200_000, 1.0, dtype=np.float32)
        for _ in range(20):
            before = x.copy()
            gathered = collectives.all_gather(x)
            x[:] = -1
            gathered[rank][:] = -1
            assert all((part == before).all() for other, part in enumerate(gathered) if other != rank)
            x = before + 1
        return float(x[0])

    assert play(three, body) == [21.0] * 3


def test_tensors_that_need_a_gradient_or_are_not_contiguous(three: list[MeshNode]) -> None:
    weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
    results = play(three, lambda c, rank: c.all_reduce(weight.t()))
    assert torch.equal(results[0], weight.detach().t() * 3)
    assert not results[0].requires_grad


def test_all_gather_takes_different_shapes_and_plain_data(three: list[MeshNode]) -> None:
    results = play(three, lambda c, rank: c.all_gather(np.arange(rank)))
    assert [part.tolist() for part in results[1]] == [[], [0], [0, 1]]
    data = [{"name": "mini", "loss": float("inf")}, [1, None, "x"], "text"]
    assert play(three, lambda c, rank: c.all_gather(data[rank])) == [data] * 3


def test_broadcast_from_any_rank(three: list[MeshNode]) -> None:
    big = torch.arange(500_000, dtype=torch.float32)
    results = play(three, lambda c, rank: c.broadcast(big if rank == 2 else None, src=2))
    assert all(torch.equal(result, big) for result in results)
    assert play(three, lambda c, rank: c.broadcast({"seed": rank})) == [{"seed": 0}] * 3


def test_reduce_scatter_gives_each_rank_its_rows(three: list[MeshNode]) -> None:
    results = play(three, lambda c, rank: c.reduce_scatter(torch.arange(12.0).reshape(6, 2) + rank))
    whole = torch.arange(12.0).reshape(6, 2) * 3 + 3
    assert torch.equal(torch.cat(results), whole)


def test_reduce_scatter_that_does_not_divide_says_so(three: list[MeshNode]) -> None:
    results = play(three, lambda c, rank: c.reduce_scatter(np.zeros(4)))
    assert "first dimension of float64 4 does not divide by 3 nodes" in str(results[0])


def test_send_and_recv_keep_their_order(three: list[MeshNode]) -> None:
    def ring(collectives: Collectives, rank: int) -> list[Any]:
        for number in range(30):
            collectives.send([rank, number], dst=(rank + 1) % 3)
        return [collectives.recv(src=(rank - 1) % 3) for _ in range(30)]

    assert play(three, ring)[0] == [[2, number] for number in range(30)]


def test_mlx_arrays_come_back_as_mlx(three: list[MeshNode]) -> None:
    mx = pytest.importorskip("mlx.core")
    # mlx streams belong to threads: make the arrays where they are used.
    results = play(
        three, lambda c, rank: (lambda y: (str(y.dtype), y.tolist()))(c.all_reduce(mx.ones((2, 2), dtype=mx.bfloat16)))
    )
    assert results == [("mlx.core.bfloat16", [[3.0, 3.0], [3.0, 3.0]])] * 3


@pytest.mark.parametrize("scale", [1, 10_000])
def test_shapes_that_differ_are_named_on_every_node(three: list[MeshNode], scale: int) -> None:
    shapes = [(3, 4 * scale), (3, 4 * scale), (4, 4 * scale)]
    results = play(three, lambda c, rank: c.all_reduce(np.zeros(shapes[rank], np.float32)))
    assert [type(result) for result in results] == [ValueError] * 3
    for text in map(str, results):
        assert f"has float32 3x{4 * scale}, 'book' (rank 2) has float32 4x{4 * scale}: shape and dtype" in text


def test_the_node_stays_usable_after_an_error(three: list[MeshNode]) -> None:
    def body(collectives: Collectives, rank: int) -> int:
        with pytest.raises(ValueError, match="must be equal"):
            collectives.all_reduce(np.zeros(3 + rank))
        return int(collectives.all_reduce(1))

    assert play(three, body) == [3, 3, 3]


def test_different_operations_are_named(three: list[MeshNode]) -> None:
    results = play(three, lambda c, rank: c.barrier() if rank == 1 else c.all_reduce(1.0))
    assert str(results[0]) == "'mini' is in all_reduce(sum), 'desk' in barrier: all nodes must do the same"
    assert "'desk' is in barrier" in str(results[1])
    results = play(three, lambda c, rank: c.broadcast(1, src=rank))
    assert all(isinstance(result, ValueError) for result in results)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "all_gather: a object cannot travel between nodes"),
        ({1: 2}, "all_gather: the dict key 1 is no string"),
        ([np.zeros(2)], "a ndarray inside a list or dict cannot travel"),
        (np.array(["a"]), "a numpy array of <U1 cannot travel between nodes: use .tolist()"),
    ],
)
def test_what_cannot_travel_is_named(three: list[MeshNode], value: Any, text: str) -> None:
    assert text in str(play(three, lambda c, rank: c.all_gather(value))[0])


@pytest.mark.parametrize("rank_that_refuses", [0, 2])
@pytest.mark.parametrize("operation", ["all_gather", "broadcast", "all_reduce"])
@pytest.mark.parametrize("size", [10, 30_000])
def test_what_one_node_may_not_send_and_catches_is_raised_on_the_others_too_and_all_go_on(
    three: list[MeshNode], operation: str, rank_that_refuses: int, size: int
) -> None:
    def body(collectives: Collectives, rank: int) -> tuple[str, list[float]]:
        collectives.all_reduce(np.ones(size))
        arguments = (rank_that_refuses,) if operation == "broadcast" else ()
        with pytest.raises(TypeError, match="a set") as raised:
            getattr(collectives, operation)({1} if rank == rank_that_refuses else np.ones(size), *arguments)
        sums = [float(collectives.all_reduce(np.full(size, rank))[-1]) for _ in range(3)]
        return f"{raised.type.__name__}: {raised.value}", sums

    refuses = ["mini", "desk", "book"][rank_that_refuses]
    for rank, (text, sums) in enumerate(play(three, body)):
        said = f"{operation}: a set cannot travel between nodes"
        here = f"TypeError: {said}" if rank == rank_that_refuses else f"PeerLost: {refuses} raised TypeError: {said}"
        assert text.startswith(here)
        assert sums == [3.0] * 3


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_who_broadcasts_from_another_rank_and_catches_it_leaves_nobody_waiting(
    three: list[MeshNode], wrong: int
) -> None:
    sources = [int(rank == wrong) for rank in range(3)]

    def body(collectives: Collectives, rank: int) -> tuple[str, int]:
        try:
            said = f"got {collectives.broadcast(rank, sources[rank])}"
        except ValueError as error:
            said = str(error)
        return said, collectives.all_reduce(1)

    results = play(three, body)
    assert [total for _, total in results] == [3, 3, 3]
    said = results[wrong][0]
    # Of two nodes that notice it, one says so to the other, whose error is then that of its peer.
    assert "in broadcast(src=0)" in said
    assert "in broadcast(src=1)" in said
    assert said.endswith(": all nodes must do the same")


def test_a_barrier_may_have_any_name(three: list[MeshNode]) -> None:
    names = ("send", "want", "ack", "refused TypeError", "")
    assert play(three, lambda c, rank: [c.barrier(name) for name in names]) == [[None] * len(names)] * 3


def test_an_error_before_anything_was_sent_ends_the_waiting_of_the_others(three: list[MeshNode]) -> None:
    def body(collectives: Collectives, rank: int) -> int:
        with pytest.raises(ValueError, match="does not divide by 3 nodes"):
            collectives.reduce_scatter(np.ones(3 if rank else 4))
        with pytest.raises(ValueError, match="no rank 9"):
            collectives.broadcast(1, 9)
        return int(collectives.all_reduce(1))

    assert play(three, body) == [3, 3, 3]


def test_what_cannot_be_reduced_is_named(three: list[MeshNode]) -> None:
    assert "the mean of int64 is not exact" in str(play(three, lambda c, r: c.all_reduce(np.arange(3), "mean"))[0])
    assert "op='avg' is unknown" in str(play(three, lambda c, r: c.all_reduce(1.0, "avg"))[0])
    assert "no rank 7 runs this cell; there are 0 (mini), 1 (desk)" in str(play(three, lambda c, r: c.recv(7))[0])


def test_outside_a_cell_there_are_no_collectives(three: list[MeshNode]) -> None:
    with pytest.raises(RuntimeError, match="use it in a %%on_all cell"):
        three[0].collectives.barrier()


def test_one_node_alone_needs_nobody() -> None:
    with mesh_nodes("mini") as nodes:
        results = run_cell(nodes, lambda c, rank: (c.all_reduce(3), c.all_gather("a"), c.broadcast([1]), c.barrier()))
        assert results == [(3, ["a"], [1], None)]
        for size in (0, 3, 5 << 20):
            x = np.arange(size, dtype=np.float32)
            whole, part = run_cell(nodes, lambda c, rank, x=x: (c.all_reduce(x), c.reduce_scatter(x)), next(_cells))[0]
            assert np.array_equal(whole, x)
            assert np.array_equal(part, x)


def lose_one(nodes: list[MeshNode], lose: Any, operation: Any) -> list[Any]:
    """The last node does nothing; the others are in ``operation`` when ``lose(receiver, cell)`` happens to them."""
    cell = next(_cells)

    def body(collectives: Collectives, rank: int) -> Any:
        if rank == len(nodes) - 1:
            return None
        timer = threading.Timer(
            0.1, lambda: nodes[rank].loop.call_soon(lambda: lose(nodes[rank].collectives.receiver, cell))
        )
        timer.start()
        return operation(collectives)

    return run_cell(nodes, body, cell)


def test_a_node_that_raised_ends_the_waiting_of_the_others(three: list[MeshNode]) -> None:
    def done(receiver: Any, cell: int) -> None:
        receiver.on_cell_done(CellDone(cell=cell, node="book", status="error", reason="raised ValueError: no data"))

    for operation in (lambda c: c.all_reduce(1.0), lambda c: c.barrier(), lambda c: c.recv(2)):
        results = lose_one(three, done, operation)
        assert [type(result) for result in results[:2]] == [PeerLost] * 2
        assert str(results[0]) == "book raised ValueError: no data"


def test_a_lost_node_ends_the_waiting_of_the_others(three: list[MeshNode]) -> None:
    results = lose_one(
        three, lambda receiver, cell: receiver.lose("book", "was lost: killed"), lambda c: c.all_gather(1)
    )
    assert [str(result) for result in results[:2]] == ["book was lost: killed"] * 2


def test_the_next_operation_after_a_loss_raises_too(three: list[MeshNode]) -> None:
    def body(collectives: Collectives, rank: int) -> Any:
        collectives.barrier()
        if rank != 2:
            three[rank].loop.call(lambda: collectives.receiver.lose("book", "was lost"))
            return collectives.all_reduce(1)
        return None

    assert [str(result) for result in play(three, body)] == ["book was lost", "book was lost", "None"]


def test_a_node_that_finished_without_us_is_named(three: list[MeshNode]) -> None:
    def done(receiver: Any, cell: int) -> None:
        receiver.on_cell_done(CellDone(cell=cell, node="book", status="ok"))

    results = lose_one(three, done, lambda c: c.all_reduce(1.0))
    assert str(results[0]) == "book finished the cell without this all_reduce"


def test_what_a_finished_node_sent_before_is_still_used(three: list[MeshNode]) -> None:
    """CellDone and frames travel on different ways: the word that a node is done must not hide its numbers."""

    def body(collectives: Collectives, rank: int) -> Any:
        if rank == 2:
            return collectives.send(np.arange(5), dst=0)
        receiver = collectives.receiver
        done = CellDone(cell=receiver._world.cell, node="book", status="ok") if receiver._world else None
        wait_until(lambda: receiver._world is not None)
        three[rank].loop.call(lambda: done and receiver.on_cell_done(done))
        return collectives.recv(src=2).tolist() if rank == 0 else None

    assert play(three, body)[0] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("size", [10, 500_000])
def test_lost_frames_are_asked_for_again(size: int) -> None:
    """A connection that breaks loses what was queued; a third of all frames is lost here."""
    with mesh_nodes("mini", "desk") as nodes:
        for seed, node in enumerate(nodes):
            chance = random.Random(seed)
            deliver = node.mesh.on_frame

            def lossy(
                sender: str, header: Any, payload: memoryview, deliver: Any = deliver, chance: Any = chance
            ) -> None:
                if chance.random() > 1 / 3:
                    deliver(sender, header, payload)

            node.mesh.on_frame = lossy
        results = run_cell(
            nodes, lambda c, rank: [c.all_reduce(np.full(size, 1.0, np.float32)).sum() for _ in range(3)], timeout=60
        )
        assert results == [[2.0 * size] * 3] * 2


@pytest.mark.parametrize("peers", [["one", "one"], ["one", "two"]])
def test_what_a_node_refuses_is_asked_for_again_where_it_was_lost(peers: list[str]) -> None:
    with mesh_nodes("mini", "desk", peers=peers) as nodes:
        deliver, lost = nodes[1].mesh.on_frame, list[CellFrame]()

        def lossy(sender: str, header: Any, payload: memoryview) -> None:
            if header.kind.startswith(REFUSED) and not lost:
                lost.append(header)
            else:
                deliver(sender, header, payload)

        def body(collectives: Collectives, rank: int) -> int:
            collectives.all_reduce(np.ones(10))
            with pytest.raises(TypeError, match="a set"):
                collectives.all_reduce(np.ones(10) if rank else {1})
            return int(collectives.all_reduce(np.ones(10))[0])

        nodes[1].mesh.on_frame = lossy
        assert run_cell(nodes, body, timeout=60) == [2, 2]
        assert len(lost) == 1


def test_a_sender_that_is_never_read_waits() -> None:
    settings = CollectiveSettings(unread_bytes=1000, unacknowledged_bytes=1000)
    with mesh_nodes("mini", "desk", settings=settings) as nodes:
        sent: list[int] = []

        def body(collectives: Collectives, rank: int) -> Any:
            if rank == 0:
                for number in range(20):
                    collectives.send("x" * 400, dst=1)
                    sent.append(number)
                return None
            wait_until(lambda: len(sent) >= 4)
            held_back = len(sent)
            return held_back, len([collectives.recv(src=0) for _ in range(20)])

        held_back, received = run_cell(nodes, body)[1]
        assert held_back < 20
        assert received == 20


def test_a_header_that_promises_too_much_takes_no_memory() -> None:
    with mesh_nodes("mini", "desk") as nodes:

        def body(collectives: Collectives, rank: int) -> Any:
            if rank == 0:
                header = CellFrame(cell=1, generation=1, operation=1, name="all_gather", kind="numpy", total=1 << 50)
                nodes[0].mesh.send("desk", header, b"x")
                return None
            wait_until(lambda: collectives.receiver.dropped)
            return collectives.receiver._message_bytes

        assert run_cell(nodes, body)[1] == 0
