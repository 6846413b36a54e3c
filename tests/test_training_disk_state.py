"""``state="disk"``: theta, momentum and error feedback in files without a name, bit for bit what memory has."""

import errno
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.magics.parsing import parse_cluster
from notebook_cluster.memory.nameless import array_in, file_of, is_in_memory
from notebook_cluster.protocol.rounds import Prepared
from notebook_cluster.rounds.member import events_effects as m
from notebook_cluster.rounds.member.next_state import is_large
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.training.checkpointing.resuming import Start, placed_start
from notebook_cluster.training.loop import costs
from notebook_cluster.training.loop.costs import check_disk, costs_of, estimate
from tests.cluster import Watcher, mend, run, shared_cluster
from tests.conftest import wait_until
from tests.test_member import commit
from tests.test_member import messages as said
from tests.test_member import of as effects_of
from tests.test_member_in_place import stepped
from tests.training_cells import SETUP, commits

# ---- files without a name ------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_nameless", [True, False])
def test_nothing_is_seen_in_the_folder_and_views_know_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_nameless: bool
) -> None:
    if not has_nameless:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    array = array_in(tmp_path / "not" / "yet", 1000, np.float32)
    array[:] = 3
    assert list(tmp_path.iterdir()) == []
    file = file_of(array)
    assert file is not None
    assert file.folder == tmp_path
    assert file_of(array[5:].reshape(-1, 5)) is file_of(np.frombuffer(memoryview(array), np.uint8)) is file
    file.write_to_disk()
    assert array.sum() == 3000
    assert file_of(np.zeros(3)) is None


def test_a_file_ends_with_its_array(tmp_path: Path) -> None:
    array = array_in(tmp_path, 1000, np.float32)
    descriptor = file_of(array).descriptor  # type: ignore[union-attr]
    os.fstat(descriptor)
    del array
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_what_is_written_behind_stays_what_it_was_and_is_written_to_meanwhile(tmp_path: Path) -> None:
    array = array_in(tmp_path, 1 << 20, np.float32)
    for number in range(20):
        array[:] = number
        vectors.write_behind([array])
        array[7] = -number
    wait_until(lambda: not vectors._BEHIND._running, what="the end of writing")
    assert (array[7], array[8]) == (-19, 19)


def full(descriptor: int, start: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_a_refusal_before_the_first_step_and_in_a_round_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = array_in(tmp_path, 1000, np.float32)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert file_of(vectors.copy(theta)) is None
    zeros = np.zeros(1000, np.float32)
    with pytest.raises(MemoryError, match=r"8 kB cannot be set aside in .*No space left on device; free some, or use"):
        placed_start(Start(0, zeros, zeros, ""), tmp_path)


def test_a_start_is_placed_where_it_is_wanted_once(tmp_path: Path) -> None:
    start = Start(0, np.arange(1000, dtype=np.float32), np.zeros(1000, np.uint16), "")
    there = placed_start(start, tmp_path)
    assert file_of(there.theta) is not None
    assert there.momentum.dtype == np.uint16
    assert placed_start(there, tmp_path).theta is there.theta
    back = placed_start(there, None)
    assert file_of(back.theta) is None
    np.testing.assert_array_equal(back.theta, start.theta)


def test_the_memory_it_passed_through_is_given_back(tmp_path: Path) -> None:
    start = Start(0, vectors.empty(1 << 20), vectors.empty(1 << 20), "hash")
    freed = weakref.ref(start.theta.base)
    start = placed_start(start, tmp_path)
    assert freed() is None
    assert file_of(start.theta) is not None


def test_a_folder_in_memory_is_told(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    assert is_in_memory(tmp_path / "deeper", mounts)
    assert not is_in_memory(Path("/"), mounts)
    assert not is_in_memory(tmp_path, tmp_path / "none")


# ---- the step ------------------------------------------------------------------------------------------------


def test_a_state_in_files_is_stepped_where_it_is_from_a_smaller_size_on(tmp_path: Path) -> None:
    state = stepped("float32", 1_100_003, in_place_from=1 << 24)[0].state
    assert not is_large(state)
    state.theta = vectors.placed(state.theta, tmp_path)
    assert is_large(state)
    state.theta = vectors.placed(state.theta[:700_011], tmp_path)
    small = stepped("float32", 700_011, in_place_from=1 << 24)[0].state
    small.theta = state.theta
    assert not is_large(small)


@pytest.mark.parametrize(("codec", "count"), [("float32", 1), ("int8", 1), ("float32", 3), ("int8", 3)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_round_makes_the_state_of_memory_and_leaves_it_in_files(
    tmp_path: Path, codec: str, count: int, dtype: str
) -> None:
    how: dict[str, Any] = {"count": count, "momentum_dtype": dtype}
    expected = stepped(codec, 700_011, in_place_from=0, **how)[0]
    (told,) = said(expected.effects, Prepared)
    (applied,) = effects_of(expected.feed(m.FromLeader(commit(told.state_hash), True)), m.Apply)
    for alone in (True, False):
        node, _, _ = stepped(codec, 700_011, in_place_from=0, **how)
        state = node.state
        state.theta, state.momentum = vectors.placed(state.theta, tmp_path), vectors.placed(state.momentum, tmp_path)
        before = state.theta, state.theta.copy()
        (ours,) = effects_of(node.feed(m.FromLeader(commit(told.state_hash), alone)), m.Apply)
        np.testing.assert_array_equal(ours.theta, applied.theta)
        np.testing.assert_array_equal(ours.momentum, applied.momentum)
        assert file_of(ours.theta) is not None
        assert file_of(ours.momentum) is not None
        assert (ours.theta is before[0]) == alone
        if not alone:  # somebody reads it: a joiner, or a checkpoint
            np.testing.assert_array_equal(*before)


# ---- figures -------------------------------------------------------------------------------------------------


def test_memory_has_only_what_a_round_uses_and_the_estimate_says_both() -> None:
    fragments = Fragments("int4", 10**9, count=4)
    memory, disk = (costs_of(fragments, 2, disk=disk) for disk in (False, True))
    kept = 3 * 4 * max(wire.count for wire in fragments.wires)  # in memory, for the other fragments
    assert memory.memory - disk.memory == 3 * 4 * 10**9 + kept
    assert (memory.disk, disk.disk) == (0, 5 * 4 * 10**9)
    assert "up to 20 GB are in files on its disk" in str(disk)
    options = parse_cluster("estimate 1e9 --codec int4 --state disk").options
    heads, row = estimate(10**9, 2, options["codec"], 4, state=options["state"])
    assert row[heads.index("in files")] == "20 GB"
    with pytest.raises(ValueError, match="state='tape': use 'memory' or 'disk'"):
        estimate(10**9, 2, state="tape")


def test_a_disk_without_room_is_refused_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = costs_of(Fragments("int4", 10**9), 2, disk=True)
    usage = type("Usage", (), {"free": 30 * 10**9})
    monkeypatch.setattr(costs.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(costs, "is_in_memory", lambda folder: True)
    assert "is kept in memory itself (tmpfs)" in check_disk(asked, 1, tmp_path / "checkpoints")
    with pytest.raises(MemoryError, match=r"has 30 GB free for 2 nodes: free some, .* or use state='memory'"):
        check_disk(asked, 2, tmp_path / "checkpoints")


# ---- on real kernels: local has it in memory, local-2 on disk. Rounds are committed where both have one hash ----

TRAIN = """
from notebook_cluster.memory.nameless import file_of
here = lambda sync: [file_of(one) is not None for one in (sync._replica.theta, sync._replica.momentum)]

def train(sync, model, rounds, seconds=0.0):
    for step in range(sync._strategy.fragments * 2 * rounds):
        work(model, step)
        time.sleep(seconds)
        sync.step(loss=step)
    return sync

def begin(name, elements, seed=0, **options):
    model = make_model(elements, seed)
    every, state = 2 * options.get("fragments", 1), ("memory", "disk")[rank]
    return nc.DiLoCo(model, every=every, name=name, state=state, **options), model

def feedback(sync):
    return [file_of(one) is not None for one in sync._replica._feedback]

def digest(sync):
    return state_hash(sync._replica.theta, sync._replica.momentum)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    run(shared, SETUP + TRAIN)
    yield shared
    mend(shared)


@pytest.mark.parametrize("elements", [5_000, 1_200_000])
@pytest.mark.parametrize(("codec", "fragments"), [("float32", 1), ("int8", 1), ("float32", 2), ("int8", 2)])
def test_disk_and_memory_have_one_state_round_by_round(
    cluster: Cluster, elements: int, codec: str, fragments: int
) -> None:
    name = f"{codec}-{fragments}-{elements}"
    text = run(
        cluster,
        f"sync, model = begin({name!r}, {elements}, seed=rank, codec={codec!r}, fragments={fragments})\n"
        "train(sync, model, 3)\nprint(digest(sync), here(sync), feedback(sync))\nsync.finish()",
    )
    found = [text[node].splitlines()[-1].split(" ", 1) for node in ("local", "local-2")]
    assert found[0][0] == found[1][0]
    lossy = str([codec == "int8"] * fragments)
    assert found[0][1] == f"[False, False] {[False] * fragments}"
    assert found[1][1] == f"[True, True] {lossy}"


MLX = """
import mlx.core as mx, mlx.nn

class Own(mlx.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

def make_mlx(elements, seed):
    return Own(mx.array(np.random.default_rng(seed).standard_normal(elements, dtype=np.float32)))

def work_mlx(model, step):
    draw = np.random.default_rng([*nc.node().encode(), step]).standard_normal(model.weight.size, dtype=np.float32)
    model.weight = model.weight - mx.array(draw)

of_torch = make_model, work
"""


@pytest.mark.parametrize("elements", [5_000, 1_200_000])
@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_an_mlx_model_with_its_state_on_disk_has_the_bits_of_a_torch_model_in_memory(
    cluster: Cluster, elements: int, codec: str
) -> None:
    pytest.importorskip("mlx.core")
    run(cluster, MLX + "make_model, work = (of_torch, (make_mlx, work_mlx))[rank]")
    source = f"sync, model = begin('mlx-{codec}-{elements}', {elements}, seed=rank, codec={codec!r})\n"
    text = run(
        cluster, source + "train(sync, model, 3)\nprint(digest(sync), here(sync), feedback(sync))\nsync.finish()"
    )
    found = [text[node].splitlines()[-1].split(" ", 1) for node in ("local", "local-2")]
    assert found[0][0] == found[1][0]
    assert found[0][1] == "[False, False] [False]"
    assert found[1][1] == f"[True, True] [{codec == 'int8'}]"


def test_a_cell_run_again_a_checkpoint_and_a_joiner_have_it_too(cluster: Cluster) -> None:
    source = "sync, model = begin('again', 1_200_000, codec='int8')\ntrain(sync, model, 2)\n"
    run(cluster, source + "sync.finish()\nprint(sync.checkpoint('disk'))")
    text = run(cluster, source + "print(digest(sync), here(sync))\nsync.finish()")
    assert text["local"].splitlines()[-1].split()[0] == text["local-2"].splitlines()[-1].split()[0]
    assert "[True, True]" in text["local-2"]
    text = run(
        cluster, source.replace("'again'", "'from'").replace("codec=", "resume='disk', codec=") + "print(digest(sync))"
    )
    assert text["local"].splitlines()[-1] == text["local-2"].splitlines()[-1]
    # local-2 has another model: it gets the state of local, the lowest rank, in its files
    text = run(
        cluster, "sync, model = begin('joins', 1_200_000, seed=rank)\nprint(digest(sync), here(sync))\nsync.finish()"
    )
    assert text["local"].splitlines()[-1].split()[0] == text["local-2"].splitlines()[-1].split()[0]
    assert "[True, True]" in text["local-2"]


def test_after_a_stop_the_cell_goes_on_from_the_files(cluster: Cluster) -> None:
    source = """
sync, model = begin('stop', 1_200_000, codec='int8')
train(sync, model, {rounds}, 0.05)
print(digest(sync), here(sync), feedback(sync))
sync.finish()
"""
    watcher = Watcher(cluster.execute(source.format(rounds=1000)))
    wait_until(lambda: len(commits(cluster, "stop")) >= 2, what="two rounds")
    cluster.interrupt()
    assert watcher.wait_end().status == "interrupted"
    done = commits(cluster, "stop")[-1]["commit"]
    text = run(cluster, source.format(rounds=1))
    assert commits(cluster, "stop")[-1]["commit"]["round"] > done["round"]
    assert text["local"].splitlines()[-1].split()[0] == text["local-2"].splitlines()[-1].split()[0]
    assert "[True, True] [True]" in text["local-2"]
