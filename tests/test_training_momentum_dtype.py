"""The outer momentum in bfloat16: the same bits everywhere, in half the memory, and checkpoints that stay float32."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from notebook_cluster.checkpoints import load
from notebook_cluster.client import Cluster
from notebook_cluster.magics.parsing import parse_cluster
from notebook_cluster.protocol.rounds import Prepared
from notebook_cluster.rounds.member import events_effects as m
from notebook_cluster.rounds.member.state import state_bytes
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import NOT_KEPT, converted, is_bfloat16, widened, zeros
from notebook_cluster.rounds.numerics.outer import outer_step, state_hash
from notebook_cluster.training.background.state_transfers import Fetch, snapshot_frames
from notebook_cluster.training.loop.costs import costs_of, estimate
from notebook_cluster.training.settings.arguments import Strategy
from tests.cluster import mend, run, shared_cluster, text_of
from tests.test_member import commit
from tests.test_member import messages as said
from tests.test_member import of as effects_of
from tests.test_member_in_place import stepped
from tests.training_cells import SETUP, commits

BUFFERS = 37


def noise(size: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def by_torch(values: Any) -> Any:
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)


def by_mlx(values: Any) -> Any:
    mx = pytest.importorskip("mlx.core")
    return np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))


@pytest.mark.parametrize("rounded", [by_torch, by_mlx])
def test_it_is_rounded_as_the_frameworks_round(rounded: Callable[[Any], Any]) -> None:
    halves = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000, 0], np.uint32).view(np.float32)
    values = np.concatenate([halves, -halves, noise(100_000, 1), noise(100_000, 2) * np.float32(1e-6)])
    kept = converted(values, "bfloat16", values.size)
    np.testing.assert_array_equal(kept, rounded(values))
    assert kept.nbytes == values.nbytes // 2
    np.testing.assert_array_equal(converted(converted(kept, "float32", kept.size), "bfloat16", kept.size), kept)


@pytest.mark.parametrize(("mu", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
@pytest.mark.parametrize("size", [100, 65_536 + BUFFERS, 200_001])
def test_the_step_computes_in_float32_and_rounds_what_it_leaves(size: int, mu: float, nesterov: bool) -> None:
    theta, mean, momentum = noise(size, 1), noise(size, 3), converted(noise(size, 2), "bfloat16", size)
    before = momentum.copy()
    expected = outer_step(theta, widened(momentum).copy(), mean.copy(), 0.6, mu, nesterov, BUFFERS)
    new_theta, new_momentum = outer_step(theta, momentum, mean, 0.6, mu, nesterov, BUFFERS)
    np.testing.assert_array_equal(new_theta, expected[0])
    np.testing.assert_array_equal(new_momentum, converted(expected[1], "bfloat16", size))
    np.testing.assert_array_equal(momentum, before)


@pytest.mark.parametrize(("codec", "count"), [("float32", 1), ("int8", 1), ("float32", 3), ("int8", 3)])
@pytest.mark.parametrize("alone", [False, True])
def test_a_large_state_is_the_one_that_is_computed_aside(codec: str, count: int, alone: bool) -> None:
    how: dict[str, Any] = {"count": count, "momentum_dtype": "bfloat16"}
    aside, _, _ = stepped(codec, 700_011, in_place_from=1 << 30, **how)
    node, _, momentum = stepped(codec, 700_011, in_place_from=0, **how)
    (expected,), (prepared,) = said(aside.effects, Prepared), said(node.effects, Prepared)
    assert prepared == expected
    (applied,) = effects_of(node.feed(m.FromLeader(commit(prepared.state_hash), alone)), m.Apply)
    assert is_bfloat16(applied.momentum)
    assert (applied.momentum is momentum) == alone
    assert state_hash(applied.theta, applied.momentum) == prepared.state_hash


def test_the_hash_covers_it_as_it_is_kept() -> None:
    theta, momentum = noise(100, 1), converted(noise(100, 2), "bfloat16", 100)
    other = momentum.copy()
    other[7] ^= 1
    assert len({state_hash(theta, one) for one in (momentum, other, widened(momentum))}) == 3


def test_it_takes_half_of_what_float32_takes() -> None:
    full, half = (Fragments("int4", 10**9, momentum_dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert costs_of(full, 2).rest - costs_of(half, 2).rest == 2 * 10**9
    assert state_bytes(half) == 6 * 10**9
    options = parse_cluster("estimate 1e9 --codec int4 --momentum bfloat16").options
    row = estimate(10**9, 2, options["codec"], momentum=options["momentum"])[1]
    assert row[1] == f"{costs_of(half, 2).memory / 1e9:.1f} GB ({costs_of(half, 2).times:.1f}x)"


def test_another_way_to_keep_it_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum_dtype='fp16': use one of 'float32', 'bfloat16'"):
        Strategy("DiLoCo", 4, "model", None, 0.9, True, "float32", momentum_dtype="fp16")
    with pytest.raises(ValueError, match="momentum_dtype='half'"):
        estimate(10**6, 2, momentum="half")


# ---- on real kernels -----------------------------------------------------------------------------------------

TRAIN = """
def train(rounds, **options):
    sync = nc.DiLoCo(model, every=2, **options)
    for step in range(2 * rounds):
        work(model, step)
        sync.step(loss=step)
    return sync
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


def test_nodes_that_keep_it_unlike_refuse_each_other(cluster: Cluster) -> None:
    source = "train(1, name='unlike', momentum_dtype=('float32', 'bfloat16')[rank])"
    ended, outputs = cluster.run(f"model = make_model(1000)\n{source}")
    assert ended.status != "ok"
    assert "every=2 steps, momentum in bfloat16" in text_of(outputs)


def test_a_checkpoint_has_float32_and_is_resumed_both_ways(cluster: Cluster) -> None:
    run(
        cluster,
        "model = make_model(1000)\nsync = train(3, name='kept', codec='int8', momentum_dtype='bfloat16')\n"
        "sync.finish()\nprint(sync.checkpoint('kept'))",
    )
    hashes = {row["commit"]["state_hash"] for row in commits(cluster, "kept")}
    (folder,) = Path().glob("**/kept/round-*")
    checkpoint = load(folder)
    assert checkpoint.manifest.state_hash in hashes
    momentum = np.concatenate([value.reshape(-1) for value in checkpoint.momentum.values()])
    assert momentum.dtype == np.float32
    assert momentum.any()
    size = momentum.size
    np.testing.assert_array_equal(converted(converted(momentum, "bfloat16", size), "float32", size), momentum)
    source = """
model = make_model(1000)
sync = train(1, name={0!r}, codec='int8', resume='kept', momentum_dtype={0!r})
print(sync.outer_momentum_by_name()['weight'].dtype)
"""
    same, full = (run(cluster, source.format(dtype))["local"] for dtype in ("bfloat16", "float32"))
    assert "float32" in same.splitlines()[-1]
    assert "was kept as" not in same
    assert "was kept as bfloat16 and goes on as float32" in full


def test_a_state_that_is_held_goes_on_in_the_other_way_with_a_line(cluster: Cluster) -> None:
    run(cluster, "model = make_model(1000)\ntrain(2, name='held').finish()")
    text = run(cluster, "train(1, name='held', momentum_dtype='bfloat16').finish()")["local"]
    assert "the outer momentum that was held here was kept as float32 and goes on as bfloat16, rounded to it" in text
    assert [row["commit"]["round"] for row in commits(cluster, "held")][-1] == 3


def test_where_the_outer_step_has_none_it_takes_nothing_and_checkpoints_go_both_ways(cluster: Cluster) -> None:
    source = """
model = make_model(1000)
sync = {0}
for step in range(4):
    work(model, step)
    sync.step(loss=step)
sync.finish()
print("kept", sync._replica.momentum.size // sync._replica.theta.size, sync._replica.state_hash)
"""
    for name in ("LocalSGD", "SparseLoCo"):
        text = run(cluster, source.format(f"nc.{name}(model, every=2, name={name!r})") + f"sync.checkpoint({name!r})")
        size, state = text["local"].partition("kept ")[2].split()[:2]
        assert (size, state) == ("0", commits(cluster, name)[-1]["commit"]["state_hash"])
        (folder,) = Path().glob(f"**/{name}/round-*")
        checkpoint = load(folder)
        assert checkpoint.momentum == {}
        assert checkpoint.manifest.state_hash == state
        with_momentum = f"nc.DiLoCo(model, every=2, name='with', resume={name!r})"
        text = run(cluster, source.format(with_momentum) + f"sync.checkpoint('after-{name}')")
        assert "kept 1 " in text["local"]
        without = f"nc.{name}(model, every=2, name='without', resume='after-{name}')"
        text = run(cluster, source.format(without))
        assert "kept 0 " in text["local"]
        assert "was kept as" not in text["local"]
    text = run(cluster, source.format("nc.DiLoCo(model, every=2, name='LocalSGD')"))
    assert "kept 1 " in text["local"]  # the model goes on, with a momentum of 0
    assert "was kept as" not in text["local"]


def test_a_state_without_momentum_is_fetched() -> None:
    theta, none = noise(1000, 1), zeros(0, NOT_KEPT)
    hash = state_hash(theta, none)
    fetch = Fetch("model", "b", 1, 0, {"theta": theta.nbytes, "momentum": none.nbytes}, 0.0)
    arrays: dict[str, Any] = {"theta": theta.data, "momentum": none.data, "optimizer": b""}
    done = [fetch.add_frame(header, data, 0.0) for header, data in snapshot_frames("model", 1, 3, hash, arrays)]
    assert done[-1]
    came, momentum, _ = fetch.result()
    np.testing.assert_array_equal(came, theta)
    assert (momentum.size, momentum.dtype) == (0, np.float32)


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_without_momentum_has_the_theta_of_one_with(count: int) -> None:
    size = 700_011
    made = []
    for momentum_dtype in ("float32", "none"):
        for in_place_from in (0, 1 << 30):
            how: dict[str, Any] = {"count": count, "momentum_dtype": momentum_dtype, "mu": 0.0}
            node, _, _ = stepped("int8", size, in_place_from=in_place_from, **how)
            (prepared,) = said(node.effects, Prepared)
            (applied,) = effects_of(node.feed(m.FromLeader(commit(prepared.state_hash), True)), m.Apply)
            assert state_hash(applied.theta, applied.momentum) == prepared.state_hash
            assert applied.momentum.size == (0 if momentum_dtype == "none" else applied.theta.size)
            made.append(applied.theta)
    for theta in made[1:]:
        np.testing.assert_array_equal(theta, made[0])
