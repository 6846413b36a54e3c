"""Arrays that travel in pieces: any order, twice, from a sender that may be wrong."""

import random

import numpy as np
import pytest

from notebook_cluster.training.outer import state_hash
from notebook_cluster.training.transfer import (
    CHUNK,
    RETRIES,
    RETRY_SECONDS,
    Fetch,
    Pieces,
    TransferError,
    frames_of,
    snapshot_frames,
)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_pieces_in_any_order_and_twice(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    frames = list(frames_of(data)) * 2
    random.Random(size).shuffle(frames)
    pieces = Pieces(limit=size)
    for offset, total, payload in frames:
        pieces.add(offset, total, payload)
    assert pieces.complete
    assert pieces.data == data


@pytest.mark.parametrize(
    ("offset", "total", "size"),
    [(0, CHUNK + 1, CHUNK + 1), (0, 11, 11), (0, -1, 0), (0, 10, 9), (20, 10, 0), (-5, 10, 10)],
)
def test_impossible_pieces_are_refused_before_anything_is_kept(offset: int, total: int, size: int) -> None:
    pieces = Pieces(limit=10)
    with pytest.raises(TransferError):
        pieces.add(offset, total, bytes(size))
    assert not pieces.complete


def test_a_total_that_changes_is_refused() -> None:
    pieces = Pieces(limit=2 * CHUNK)
    pieces.add(0, CHUNK + 5, bytes(CHUNK))
    with pytest.raises(TransferError):
        pieces.add(CHUNK, CHUNK + 6, bytes(6))


def snapshot(round: int, size: int = 100, part: bytes = b"") -> tuple[list, str]:
    theta, momentum = np.full(size, round, np.float32), np.zeros(size, np.float32)
    digest = state_hash(theta, momentum)
    arrays = {"theta": theta.data, "momentum": momentum.data, "optimizer": part}
    return list(snapshot_frames("model", 1, round, digest, arrays)), digest


def test_a_fetch_takes_the_newest_snapshot_that_is_whole() -> None:
    fetch = Fetch("model", "mini", 1, wanted=3, elements=100, now=0.0)
    assert fetch.request().round == 3
    older, _ = snapshot(2)
    assert not any(fetch.add(header, payload, 0.0) for header, payload in older)
    first, _ = snapshot(3)
    assert not fetch.add(*first[0], 0.0)
    newer, digest = snapshot(4, part=b"own")
    assert [fetch.add(header, payload, 0.0) for header, payload in newer] == [False, False, True]
    theta, _, part = fetch.result()
    assert (fetch.round, fetch.state_hash, part) == (4, digest, b"own")
    assert theta[0] == 4


def test_arrays_of_another_size_are_refused() -> None:
    fetch = Fetch("model", "mini", 1, wanted=0, elements=101, now=0.0)
    frames, _ = snapshot(1)
    with pytest.raises(TransferError, match="'mini' sent 400 bytes of 'theta'"):
        fetch.add(*frames[0], 0.0)


def test_arrays_with_another_hash_are_refused() -> None:
    fetch = Fetch("model", "mini", 1, wanted=0, elements=100, now=0.0)
    frames, _ = snapshot(1)
    for header, payload in frames:
        fetch.add(header, bytes(len(payload)), 0.0)
    with pytest.raises(TransferError, match="does not have the hash it announced"):
        fetch.result()


def test_a_silent_source_is_asked_again_and_then_given_up() -> None:
    fetch = Fetch("model", "mini", 1, wanted=0, elements=100, now=0.0)
    assert fetch.retry(RETRY_SECONDS / 2) is None
    now = 0.0
    for _ in range(RETRIES - 1):
        now += RETRY_SECONDS
        assert fetch.retry(now) is not None
    with pytest.raises(TransferError, match="'mini' sent no state"):
        fetch.retry(now + RETRY_SECONDS)
