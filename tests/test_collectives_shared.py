"""Memory that nodes of one peer share: what is left of it, what is checked, and what happens where it cannot be had."""

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notebook_cluster.collectives import CollectiveSettings, PeerLost, shared_reduce
from notebook_cluster.collectives.shared_group import SharedGroup
from notebook_cluster.mesh import shared_memory
from notebook_cluster.mesh.shared_memory import SharedFile, forget_left_over
from notebook_cluster.protocol.node import CellDone
from tests.conftest import wait_until
from tests.mesh_nodes import MeshNode, mesh_nodes, run_cell

MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not MEMORY.is_dir(), reason="this system has no /dev/shm")


@pytest.fixture(scope="module")
def two() -> Iterator[list[MeshNode]]:
    with mesh_nodes("mini", "desk") as nodes:
        yield nodes


_cells = iter(range(1, 10_000))


def play(nodes: list[MeshNode], body: Any) -> list[Any]:
    return run_cell(nodes, body, next(_cells))


def frames_of(nodes: list[MeshNode], body: Any) -> tuple[list[Any], int]:
    """Results of a cell, and how many bytes went over sockets."""
    before = sum(node.mesh.bytes_sent for node in nodes)
    results = play(nodes, body)
    return results, sum(node.mesh.bytes_sent for node in nodes) - before


def uses_memory(collectives: Any) -> bool:
    return collectives._memory.group is not None


def test_arrays_do_not_go_over_sockets(two: list[MeshNode]) -> None:
    big = np.ones(3_000_000, np.float32)
    results, sent = frames_of(two, lambda c, rank: (float(c.all_reduce(big).sum()), uses_memory(c)))
    assert results == [(6e6, True)] * 2
    assert sent < 20_000


def test_the_files_have_no_name_once_everybody_has_them_open(two: list[MeshNode]) -> None:
    seen: list[list[bool]] = []

    def body(collectives: Any, rank: int) -> None:
        collectives.all_reduce(np.ones(300_000))
        collectives.barrier()
        maps = Path("/proc/self/maps").read_text().splitlines()  # in the folder are those of other programs, too
        seen.append([line.endswith("(deleted)") for line in maps if "/dev/shm/nbc-" in line])

    play(two, body)
    assert len(seen) == 2
    assert all(names and all(names) for names in seen), seen


def mapped() -> int:
    """Files of shared memory that this process has in its memory."""
    return Path("/proc/self/maps").read_text().count("/dev/shm/nbc-")


def test_memory_is_given_back_at_the_end_of_the_cell(two: list[MeshNode]) -> None:
    counts: list[int] = []

    def body(collectives: Any, rank: int) -> None:
        collectives.all_reduce(np.ones(300_000))
        counts.append(mapped())
        collectives.barrier()

    play(two, body)
    assert max(counts) >= 4  # two files, each mapped by both nodes of this process
    wait_until(lambda: mapped() == 0)


def test_memory_is_given_back_after_a_refused_operation_without_waiting_for_the_garbage_collector(
    two: list[MeshNode],
) -> None:
    def body(collectives: Any, rank: int) -> None:
        collectives.all_reduce(np.ones(300_000))
        with pytest.raises(ValueError, match="299999"):
            collectives.all_reduce(np.ones(300_000 - rank))
        assert uses_memory(collectives)

    gc.collect()
    gc.disable()
    try:
        play(two, body)
        wait_until(lambda: mapped() == 0)
    finally:
        gc.enable()


def test_only_a_file_of_this_user_and_of_the_said_size_is_opened(tmp_path: Path) -> None:
    ipc = str(tmp_path / "m-1")
    made = SharedFile.make(ipc, 1, 8192)
    assert made is not None
    path = made._path
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="has 8192 bytes, not 4096"):
        SharedFile.attach(ipc, 1, made.where, 4096)
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="not a file of this user alone"):
        SharedFile.attach(ipc, 1, made.where, 8192)
    path.chmod(0o600)
    SharedFile.attach(ipc, 1, made.where, 8192).data[0] = 7
    assert made.data[0] == 7
    made.hide()
    assert not path.exists()
    path.symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic"):
        SharedFile.attach(ipc, 1, made.where, 8192)
    path.unlink()


def test_a_file_whose_maker_was_killed_is_removed(tmp_path: Path) -> None:
    source = (
        "import sys, time; from notebook_cluster.mesh.shared_memory import SharedFile; "
        "made = SharedFile.make(sys.argv[1], 1, 8192); print(made._path, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", source, str(tmp_path / "m")], stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        path = Path(maker.stdout.readline().decode().strip())
        assert path.exists()
        forget_left_over(age=0)
        assert path.exists()  # its maker lives
        maker.send_signal(signal.SIGKILL)
        maker.wait(10)
    forget_left_over(age=0)
    assert not path.exists()


def test_where_no_memory_can_be_had_arrays_go_over_sockets(two: list[MeshNode], monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_memory, "WHERES", ())
    big = np.ones(300_000, np.float32)
    results, sent = frames_of(
        two, lambda c, rank: (float(c.all_reduce(big).sum()), float(c.all_reduce(big * 2).sum()), uses_memory(c))
    )
    assert results == [(6e5, 1.2e6, False)] * 2
    assert sent > 2 * big.nbytes


def test_the_folder_of_the_sockets_is_used_where_there_is_no_dev_shm(two: list[MeshNode], monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_memory, "_has_room", lambda size: False)
    seen: list[Any] = []

    def body(collectives: Any, rank: int) -> float:
        total = float(collectives.all_reduce(np.ones(300_000)).sum())
        seen.append({file.where for file in collectives._memory._files})
        return total

    assert play(two, body) == [6e5] * 2
    assert seen == [{"folder"}] * 2
    assert [path for path in two[0].mesh_directory.iterdir() if not path.is_socket()] == []


def test_an_offer_that_makes_no_sense_is_refused_by_all(two: list[MeshNode], monkeypatch: Any) -> None:
    original = SharedFile.attach.__func__  # type: ignore[attr-defined]

    def failing(cls: Any, path: str, *rest: Any) -> Any:
        if path == two[1].mesh.ipc.removeprefix("ipc://"):
            raise OSError("cannot be mapped")
        return original(cls, path, *rest)

    monkeypatch.setattr(SharedFile, "attach", classmethod(failing))
    results = play(two, lambda c, rank: (float(c.all_reduce(np.ones(300_000)).sum()), uses_memory(c)))
    assert results == [(6e5, False)] * 2


def test_a_node_that_comes_late_is_waited_for_without_a_busy_processor(two: list[MeshNode]) -> None:
    cpu: list[float] = []

    def body(collectives: Any, rank: int) -> float:
        collectives.all_reduce(np.ones(5000))
        if rank == 1:
            wait_until(lambda: two[0].collectives.receiver._wait is not None)  # it has given up looking
            time.sleep(0.5)
        before = time.thread_time()
        total = float(collectives.all_reduce(np.ones(5000)).sum())
        if rank == 0:
            cpu.append(time.thread_time() - before)
        return total

    assert play(two, body) == [1e4] * 2
    assert cpu[0] < 0.25


def test_a_node_that_is_lost_ends_the_waiting_of_the_others(two: list[MeshNode]) -> None:
    cell = next(_cells)

    def body(collectives: Any, rank: int) -> Any:
        collectives.all_reduce(np.ones(5000))
        if rank == 1:
            return None
        done = CellDone(cell=cell, node="desk", status="error", reason="raised ValueError: no data")
        threading.Timer(0.1, lambda: two[0].loop.call_soon(lambda: collectives.receiver.on_cell_done(done))).start()
        return collectives.all_reduce(np.ones(5000))

    results = run_cell(two, body, cell)
    assert isinstance(results[0], PeerLost)
    assert str(results[0]) == "desk raised ValueError: no data"


def test_after_an_operation_was_left_in_the_middle_nobody_takes_it_for_finished(two: list[MeshNode]) -> None:
    left = threading.Event()

    def body(collectives: Any, rank: int) -> Any:
        collectives.all_reduce(np.ones(5000))
        if rank == 1:
            assert left.wait(60)
            return collectives.all_reduce(np.full(5000, 3.0))
        with pytest.raises(KeyboardInterrupt), collectives._operate("all_reduce(sum)"):
            raise KeyboardInterrupt
        left.set()
        wait_until(lambda: two[1].collectives.receiver._wait is not None)
        two[1].loop.call_soon(lambda: two[1].collectives.receiver.on_cell_done(done))
        return None

    cell = next(_cells)
    done = CellDone(cell=cell, node="mini", status="interrupted")
    results = run_cell(two, body, cell)
    assert str(results[1]) == "mini was interrupted"


def check_sums_around_a_broadcast() -> None:
    """In operations 1 to 3 and 5 of a cell of three nodes, of which the fourth is a broadcast."""

    def body(collectives: Any, rank: int) -> list[float]:
        sums = [float(collectives.all_reduce(np.ones(100))[0]) for _ in range(3)]
        collectives.broadcast(1, 0)
        return [*sums, float(collectives.all_reduce(np.full(100, 100.0))[0])]

    with mesh_nodes("mini", "desk", "book", peers=["one"] * 3) as three:
        assert play(three, body) == [[3.0, 3.0, 3.0, 300.0]] * 3


def test_what_a_slow_node_still_reads_is_not_written_over_after_a_broadcast_which_the_others_leave_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = shared_reduce.SharedSteps.begin

    def begin_slowly(steps: shared_reduce.SharedSteps) -> None:
        begin(steps)
        if (steps.own, steps.steps.number) == (2, 3):  # until another has passed the broadcast
            wait_until(lambda: steps.group._positions[1][0] >> 24 == 5)

    monkeypatch.setattr(shared_reduce.SharedSteps, "begin", begin_slowly)

    check_sums_around_a_broadcast()


def test_who_asks_late_how_far_a_node_is_that_has_passed_a_broadcast_gets_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = SharedGroup.missing

    def missing_until_late(group: SharedGroup, operation: int, phase: int, patience: float) -> list[int]:
        if (group.own, operation) != (2, 3):
            return missing(group, operation, phase, patience)
        wait_until(lambda: group._positions[1][0] >> 24 == 5)
        return [1]  # as it looked a moment before

    monkeypatch.setattr(SharedGroup, "missing", missing_until_late)

    check_sums_around_a_broadcast()


def test_an_operation_that_one_node_could_not_begin_counts_all_the_same(two: list[MeshNode]) -> None:
    """Else its next operation would be taken for the one in which the other waits."""

    def body(collectives: Any, rank: int) -> Any:
        collectives.all_reduce(np.zeros(10))
        with pytest.raises(TypeError, match="cannot travel"):
            collectives.all_reduce(np.ones(10) if rank else object())
        return float(collectives.all_reduce(np.ones(10)).sum())

    assert play(two, body) == [20.0] * 2


def test_errors_name_both_nodes_whatever_is_set_up_on_them(two: list[MeshNode]) -> None:
    def body(collectives: Any, rank: int) -> list[str]:
        texts = []
        for warm, sizes in ((0, (10, 11)), (10, (10, 12)), (10, (30_000, 30_001))):
            if warm:
                collectives.all_reduce(np.zeros(warm, np.float32))
            with pytest.raises(ValueError, match="must be equal on all nodes") as raised:
                collectives.all_reduce(np.zeros(sizes[rank], np.float32))
            texts.append(str(raised.value))
        texts.append(str(collectives.all_reduce(1)))
        return texts

    first, second = play(two, body)
    assert first == second
    assert first[1] == (
        "all_reduce: 'mini' (rank 0) has float32 10, 'desk' (rank 1) has float32 12: shape and dtype must be equal on "
        "all nodes"
    )


def test_a_node_that_needs_more_memory_than_the_other_gets_the_error(two: list[MeshNode]) -> None:
    """One sets memory up for a large array where the other waits in what is set up already."""

    def body(collectives: Any, rank: int) -> str:
        collectives.all_reduce(np.zeros(10, np.float32))
        with pytest.raises(ValueError, match="must be equal on all nodes") as raised:
            collectives.all_reduce(np.zeros(10 if rank else 2_000_000, np.float32))
        return str(raised.value)

    results = play(two, body)
    assert all("float32 2000000" in str(result) for result in results)


def test_what_went_over_sockets_before_is_not_kept(two: list[MeshNode]) -> None:
    def held(collectives: Any) -> int:
        return sum(len(sent.data) for kept in collectives.receiver.sent._sent.values() for sent in kept.values())

    def body(collectives: Any, rank: int) -> None:
        collectives.all_gather(np.zeros(100_000))
        collectives.all_reduce(np.zeros(10))
        wait_until(lambda: held(collectives) < 1000)

    assert play(two, body) == [None, None]


def test_barriers_alone_share_memory_after_a_few(two: list[MeshNode]) -> None:
    def body(collectives: Any, rank: int) -> list[bool]:
        shared = []
        for _ in range(5):
            collectives.barrier()
            shared.append(uses_memory(collectives))
        return shared

    assert play(two, body) == [[False, False, False, True, True]] * 2


@pytest.mark.parametrize("seed", range(3))
def test_many_operations_of_all_kinds_in_a_row(seed: int) -> None:
    """Four nodes with small halves, so that everybody writes soon again where others have read."""
    settings = CollectiveSettings(shared_block=16 * 1024, shared_direct=8192, shared_patience=0.0005)
    chance = np.random.default_rng(seed)
    plan = [(int(chance.integers(5)), int(chance.integers(1, 9000)) * 4) for _ in range(60)]

    def body(collectives: Any, rank: int) -> list[float]:
        found = []
        for turn, (kind, size) in enumerate(plan):
            x = np.full((size, 1), rank + turn, np.float64)
            if kind == 0:
                collectives.barrier()
            elif kind == 1:
                part = collectives.reduce_scatter(x)
                found += [float(part.min()), float(part.max()), part.size]
            elif kind == 2:
                found.append(collectives.all_reduce(rank))
            else:
                total = collectives.all_reduce(x[: size if kind == 3 else 5])
                found += [float(total.min()), float(total.max()), total.size]
            x[:] = -1
        return found

    with mesh_nodes("mini", "desk", "book", "tall", settings=settings) as nodes:
        results = run_cell(nodes, body, timeout=60)
    expected: list[float] = []
    for turn, (kind, size) in enumerate(plan):
        total = 6.0 + 4 * turn
        shape = {1: size // 4, 3: size, 4: 5}.get(kind)
        expected += [6.0] if kind == 2 else [total, total, shape] if shape is not None else []
    assert results == [expected] * 4
