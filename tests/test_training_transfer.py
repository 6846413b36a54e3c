"""Arrays that travel in pieces: any order, twice, from a sender that may be wrong."""

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.runs import Joined
from notebook_cluster.rounds.numerics.outer import state_hash
from notebook_cluster.training.background.state_transfers import RETRIES, RETRY_SECONDS, Fetch, snapshot_frames
from notebook_cluster.training.checkpointing.saving import CHUNK, Pieces, TransferError, frames_of
from tests.cluster_in_process import Cluster, Node
from tests.test_training import assert_equal_models


def both(elements: int) -> dict[str, int]:
    """Bytes of theta and momentum."""
    return {"theta": 4 * elements, "momentum": 4 * elements}


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_pieces_in_any_order_and_twice(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    frames = list(frames_of(data)) * 2
    random.Random(size).shuffle(frames)
    pieces = Pieces(limit=size)
    for offset, total, payload in frames:
        pieces.add_piece(offset, total, payload)
    assert pieces.complete
    assert pieces.data == data


@pytest.mark.parametrize(
    ("offset", "total", "size"),
    [(0, CHUNK + 1, CHUNK + 1), (0, 11, 11), (0, -1, 0), (0, 10, 9), (20, 10, 0), (-5, 10, 10)],
)
def test_impossible_pieces_are_refused_before_anything_is_kept(offset: int, total: int, size: int) -> None:
    pieces = Pieces(limit=10)
    with pytest.raises(TransferError):
        pieces.add_piece(offset, total, bytes(size))
    assert not pieces.complete


def test_a_total_that_changes_is_refused() -> None:
    pieces = Pieces(limit=2 * CHUNK)
    pieces.add_piece(0, CHUNK + 5, bytes(CHUNK))
    with pytest.raises(TransferError):
        pieces.add_piece(CHUNK, CHUNK + 6, bytes(6))


def snapshot(round: int, size: int = 100, part: bytes = b"") -> tuple[list, str]:
    theta, momentum = np.full(size, round, np.float32), np.zeros(size, np.float32)
    digest = state_hash(theta, momentum)
    arrays = {"theta": theta.data, "momentum": momentum.data, "optimizer": part}
    return list(snapshot_frames("model", 1, round, digest, arrays)), digest


def test_a_fetch_takes_the_newest_snapshot_that_is_whole() -> None:
    fetch = Fetch("model", "mini", 1, wanted=3, sizes=both(100), now=0.0)
    assert fetch.request().round == 3
    older, _ = snapshot(2)
    assert not any(fetch.add_frame(header, payload, 0.0) for header, payload in older)
    first, _ = snapshot(3)
    assert not fetch.add_frame(*first[0], 0.0)
    newer, digest = snapshot(4, part=b"own")
    assert [fetch.add_frame(header, payload, 0.0) for header, payload in newer] == [False, False, True]
    theta, _, part = fetch.result()
    assert (fetch.round, fetch.state_hash, part) == (4, digest, b"own")
    assert theta[0] == 4


def test_arrays_of_another_size_are_refused() -> None:
    fetch = Fetch("model", "mini", 1, wanted=0, sizes=both(101), now=0.0)
    frames, _ = snapshot(1)
    with pytest.raises(TransferError, match="'mini' sent 400 bytes of 'theta'"):
        fetch.add_frame(*frames[0], 0.0)


def test_arrays_with_another_hash_are_refused() -> None:
    fetch = Fetch("model", "mini", 1, wanted=0, sizes=both(100), now=0.0)
    frames, _ = snapshot(1)
    for header, payload in frames:
        fetch.add_frame(header, bytes(len(payload)), 0.0)
    with pytest.raises(TransferError, match="does not have the hash it announced"):
        fetch.result()


def test_a_silent_source_is_asked_again_and_then_given_up() -> None:
    fetch = Fetch("model", "mini", 1, wanted=0, sizes=both(100), now=0.0)
    assert fetch.retry(RETRY_SECONDS / 2) is None
    now = 0.0
    for _ in range(RETRIES - 1):
        now += RETRY_SECONDS
        assert fetch.retry(now) is not None
    with pytest.raises(TransferError, match="'mini' sent no state"):
        fetch.retry(now + RETRY_SECONDS)


def test_what_is_lost_is_asked_for_behind_the_last_frame_and_only_that_is_sent_again() -> None:
    elements = CHUNK // 4 * 2 + 5
    frames, digest = snapshot(7, elements, b"own part")
    fetch = Fetch("model", "mini", 1, wanted=3, sizes=both(elements), now=0.0)
    assert (fetch.request().ticket, fetch.request().name) == (0, "")
    for number, (header, payload) in enumerate(frames):
        if number != 4:  # the second frame of momentum
            assert not fetch.add_frame(header, payload, 1.0)
    again = fetch.on_sent(sent(1), 2.0)
    assert again is not None
    assert (again.ticket, again.name, again.offset, again.state_hash) == (1, "momentum", CHUNK, digest)
    assert fetch.on_sent(sent(1), 2.0) is None  # told twice
    theta, momentum = np.full(elements, 7, np.float32), np.zeros(elements, np.float32)
    arrays = {"theta": theta.data, "momentum": momentum.data, "optimizer": b"own part"}
    rest = list(snapshot_frames("model", 1, 7, digest, arrays, again))
    assert [(header.name, header.offset) for header, _ in rest] == [
        ("momentum", CHUNK), ("momentum", 2 * CHUNK), ("optimizer", 0),
    ]  # fmt: skip
    assert fetch.add_frame(*rest[0], 3.0)
    np.testing.assert_array_equal(fetch.result()[0], theta)
    # of another state it is sent whole
    assert len(list(snapshot_frames("model", 1, 8, "other", arrays, again))) == len(frames)


def test_a_source_of_which_nothing_comes_is_given_up() -> None:
    fetch = Fetch("model", "mini", 1, wanted=0, sizes=both(100), now=0.0)
    for ticket in range(1, RETRIES):
        assert fetch.on_sent(sent(ticket), 0.0) is not None
    with pytest.raises(TransferError, match="nothing of the state that 'mini' sent 3 times has come"):
        fetch.on_sent(sent(RETRIES), 0.0)


def sent(ticket: int) -> JobFrame:
    return JobFrame(job="model", incarnation=1, kind="sent", name="state", ticket=ticket)


def test_a_joiner_that_loses_a_piece_of_the_state_gets_the_rest_again_and_not_all(tmp_path: Path) -> None:
    lost: list[JobFrame] = []
    pushed: list[tuple[str, int]] = []
    here, joined = threading.Event(), threading.Event()

    def lose(sender: str, receiver: str, header: JobFrame) -> bool:
        if header.kind != "state" or receiver != "late":
            return False
        pushed.append((header.name, header.offset))
        if (header.name, header.offset) == ("theta", CHUNK) and not lost:
            lost.append(header)
            return True
        return False

    def cell(node: Node) -> nn.Module:
        torch.manual_seed(node.rank())
        model = nn.Linear(400, 400)
        sync = nc.DiLoCo(model, every=1)
        for _ in range(2):
            with torch.no_grad():
                model.weight.add_(0.01 * (1 + node.rank()))
            sync.step()
            here.set()
            assert node.name == "late" or joined.wait(60)  # the state stays what it is until late has it
        sync.finish()
        return model

    def watch(direction: str, node: str, message: Any) -> None:
        if isinstance(message, Joined) and node == "late":
            joined.set()

    with Cluster(["a", "b"], tmp_path) as cluster:
        cluster.lose, cluster.watch = lose, watch
        assert_equal_models(cluster.run_with_newcomer(cell, here))
    theta = [("theta", 0), ("theta", CHUNK), ("theta", 2 * CHUNK)]
    momentum = [("momentum", 0), ("momentum", CHUNK), ("momentum", 2 * CHUNK)]
    assert lost
    assert pushed == [*theta, *momentum, ("optimizer", 0), *theta[1:], *momentum, ("optimizer", 0)]
