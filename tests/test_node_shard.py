"""nc.shard: disjoint parts that cover everything, another order each epoch, whatever the data is."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from notebook_cluster.node.shard import Shard, epoch_indices, shard
from notebook_cluster.training.runtime import set_runtime


class Place:
    """As much of a runtime as shard asks for."""

    def __init__(self) -> None:
        self.at, self.size = 0, 1

    def rank(self) -> int:
        return self.at

    def world_size(self) -> int:
        return self.size


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    set_runtime(place)  # type: ignore[arg-type]
    yield place
    set_runtime(None)


def on_each(place: Place, size: int, make: Any) -> list[Any]:
    """``list(make())`` on every rank of a cluster of ``size`` nodes."""
    parts = []
    for place.at in range(size):
        place.size = size
        parts.append(list(make()))
    place.at, place.size = 0, 1
    return parts


@given(st.integers(1, 300), st.integers(1, 9), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_parts_are_disjoint_and_cover_everything(
    count: int, world_size: int, seed: int, epoch: int, shuffle: bool
) -> None:
    parts = [epoch_indices(count, seed, epoch, rank, world_size, shuffle).tolist() for rank in range(world_size)]
    assert sorted(itertools.chain(*parts)) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_order_is_the_same_for_every_version() -> None:
    """Nodes with different numpys must draw the same order: these numbers never change."""
    assert epoch_indices(10, 0, 0, 0, 1).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


def test_epochs_and_seeds_differ(place: Place) -> None:
    epochs = shard(range(50), epochs=2)
    items = list(epochs)
    assert items[:50] != items[50:]
    assert sorted(items[:50]) == sorted(items[50:])
    assert list(epochs)[:50] not in (items[:50], items[50:])
    assert list(shard(range(50), seed=1)) != items[:50]


def test_without_shuffle_the_order_of_the_data_is_kept(place: Place) -> None:
    assert on_each(place, 2, lambda: shard(["a", "b", "c", "d", "e"], shuffle=False)) == [["a", "c", "e"], ["b", "d"]]


def test_membership_is_read_at_each_epoch(place: Place) -> None:
    data = iter(shard(list(range(8)), shuffle=False, epochs=2))
    assert [next(data) for _ in range(8)] == list(range(8))
    place.size, place.at = 2, 1
    assert list(data) == [1, 3, 5, 7]


def test_a_tuple_of_arrays_gives_tuples_of_arrays(place: Place) -> None:
    x, y = np.arange(20).reshape(10, 2), torch.arange(10)
    batches = list(shard((x, y), batch_size=4))
    assert [len(batch[0]) for batch in batches] == [4, 4, 2]
    for numbers, labels in batches:
        assert isinstance(labels, torch.Tensor)
        assert (numbers[:, 0] == 2 * labels.numpy()).all()


def test_one_tensor_gives_tensors(place: Place) -> None:
    parts = on_each(place, 3, lambda: shard(torch.arange(10), batch_size=2))
    assert sorted(torch.cat(list(itertools.chain(*parts))).tolist()) == list(range(10))


class Squares(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.tensor([index, index * index]), index


def test_a_dataset_is_collated_as_torch_does(place: Place) -> None:
    batches = list(shard(Squares(), batch_size=5))
    assert [batch[0].shape for batch in batches] == [(5, 2), (5, 2)]
    assert (batches[0][0][:, 0] == batches[0][1]).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_keeps_its_settings(place: Place, workers: int) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=3, num_workers=workers, collate_fn=len)
    parts = on_each(place, 2, lambda: shard(loader))
    assert parts == [[3, 2], [3, 2]]


def test_single_items_without_a_batch_size(place: Place) -> None:
    items = list(shard((np.arange(4), np.arange(4) * 2)))
    assert sorted((int(a), int(b)) for a, b in items) == [(0, 0), (1, 2), (2, 4), (3, 6)]


@pytest.mark.parametrize(
    ("batch_size", "drop_last", "expected"), [(None, False, [4, 3, 3]), (2, False, [2, 2, 2]), (2, True, [2, 1, 1])]
)
def test_len_is_what_comes(place: Place, batch_size: int | None, drop_last: bool, expected: list[int]) -> None:
    place.size = 3
    for place.at in range(3):
        data = shard(list(range(10)), batch_size, drop_last=drop_last)
        assert len(data) == len(list(data)) == expected[place.at]


def test_a_list_gives_lists(place: Place) -> None:
    assert list(shard(["a", "b", "c"], batch_size=2, shuffle=False)) == [["a", "b"], ["c"]]


def test_mlx_arrays_are_taken_by_index(place: Place) -> None:
    mx = pytest.importorskip("mlx.core")
    (batch,) = shard((mx.arange(4), mx.arange(4) * 2), batch_size=4, shuffle=False)
    assert batch[1].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: shard(iter([1])), "a list_iterator has no length and no"),
        (lambda: shard({"x": 1}), "a dict has no length and no"),
        (lambda: shard("text"), "a str has no length and no"),
        (lambda: shard([]), "the data is empty"),
        (lambda: shard((np.zeros(3), np.zeros(4))), r"different lengths \[3, 4\]"),
        (lambda: shard([1], batch_size=0), "batch_size=0: use an integer of at least 1"),
        (lambda: shard([1], epochs=0), "epochs=0"),
        (lambda: shard([1], seed=-1), "seed=-1"),
    ],
)
def test_what_cannot_be_divided_is_said(place: Place, make: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def test_a_shard_can_be_measured_before_it_is_read(place: Place) -> None:
    assert isinstance(shard([1, 2]), Shard)
    assert len(shard([1, 2], epochs=3)) == 6
