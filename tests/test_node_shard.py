"""nc.shard: disjoint parts that cover everything, another order each epoch, whatever the data is."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from notebook_cluster.node.data.samplers import epoch_order
from notebook_cluster.node.namespace.shard import Shard, shard
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
    parts = [epoch_order(count, seed, epoch, shuffle)[rank::world_size].tolist() for rank in range(world_size)]
    assert sorted(itertools.chain(*parts)) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_order_is_the_same_for_every_version() -> None:
    """Nodes with different numpys must draw the same order: these numbers never change."""
    assert epoch_order(10, 0, 0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


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
    pictures = [np.full((3, 4), number) for number in range(2)]
    assert [batch[0].sum() for batch in shard(pictures, batch_size=1, shuffle=False)] == [0, 12]


def test_mlx_arrays_are_taken_by_index(place: Place) -> None:
    mx = pytest.importorskip("mlx.core")
    (batch,) = shard((mx.arange(4), mx.arange(4) * 2), batch_size=4, shuffle=False)
    assert batch[1].tolist() == [0, 2, 4, 6]


class ItemsWithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: shard(7), r"a int has no length and no \[index\], so it cannot be divided"),
        (lambda: shard(ItemsWithoutLength()), r"a ItemsWithoutLength has no length, so it cannot be divided"),
        (lambda: shard({1, 2}), r"a set has no \[index\], so it cannot be divided"),
        (lambda: shard({"x": 1}), r"a dict is indexed by keys, .*, for example data\['x'\]"),
        (lambda: shard({"x": [1, 2], "y": [3, 4]}), r"for example list\(zip\(data\['x'\], data\['y'\]\)\)$"),
        (lambda: shard({"x": np.zeros(2), "y": np.ones(2)}), r"for example \(data\['x'\], data\['y'\]\)"),
        (lambda: shard((np.zeros((9, 2)), [0] * 9)), r"part 1 of the tuple is a list, .* np\.asarray\(\) or torch"),
        (lambda: shard((np.zeros((9, 2)), [0] * 3)), "part 1 of the tuple is a list"),
        (lambda: shard((["a text"] * 9, [0] * 9)), r"part 0 of the tuple is a list, .* or list\(zip\(x, y\)\) for a"),
        (lambda: shard([np.zeros((9, 2)), np.zeros(9)]), r"a list of 2 arrays is 2 items. For 9 items .* pass a tuple"),
        (lambda: shard(pandas.DataFrame({"x": [1]})), r"a DataFrame is indexed by labels, .* data\.to_numpy\(\)"),
        (lambda: shard((np.zeros((9, 2)), pandas.DataFrame({"x": [1] * 9})["x"]), 4),
         r"part 1 of the tuple is a Series, which is indexed by labels, not by position: pass \.to_numpy\(\) of it"),
        (lambda: shard((pandas.DataFrame({"x": [1] * 9}), [1] * 9)), "part 0 of the tuple is a DataFrame, which"),
        (lambda: shard((np.zeros(9), {"label": [1] * 9})), r"part 1 of the .* as in \(x, y\['label'\]\)"),
        (lambda: shard([1], weights="fast"), "weights='fast': use \"speed\""),  # type: ignore[arg-type]
        (lambda: shard("text"), "a str is one item, so it cannot be divided"),
        (lambda: shard([]), "the data is empty"),
        (lambda: shard((np.zeros(3), np.zeros(4))), r"different lengths \[3, 4\]"),
        (lambda: shard([1], batch_size=0), "batch_size=0: use an integer of at least 1"),
        (lambda: shard([1], epochs=0), "epochs=0"),
        (lambda: shard([1], seed=-1), "seed=-1"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_said(place: Place, make: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def test_a_tuple_of_samples_is_divided_by_sample(place: Place) -> None:
    assert list(shard(({"x": 1}, {"x": 2, "y": 3}), shuffle=False)) == [{"x": 1}, {"x": 2, "y": 3}]


def test_a_shard_can_be_measured_before_it_is_read(place: Place) -> None:
    assert isinstance(shard([1, 2]), Shard)
    assert len(shard([1, 2], epochs=3)) == 6


class Table:
    """Behaves as a ``datasets.Dataset`` of Hugging Face does where shard uses it; ``datasets`` is not needed for it."""

    def __init__(self, **columns: list[Any]) -> None:
        self._columns = columns
        self.column_names = list(columns)
        self.shape = (len(next(iter(columns.values()))), len(columns))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> dict[str, Any]:
        if isinstance(index, str):
            return {index: self._columns[index]}
        if isinstance(index, int):
            return {name: column[index] for name, column in self._columns.items()}
        if not all(type(one) is int for one in index):
            raise TypeError("indices must be integers")
        return {name: [column[one] for one in index] for name, column in self._columns.items()}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


TABLE = Table(text=[f"text {number}" for number in range(10)], label=list(range(10)))


def test_a_hugging_face_dataset_gives_columns(place: Place) -> None:
    batches = list(itertools.chain(*on_each(place, 2, lambda: shard(TABLE, batch_size=3))))
    assert [len(batch["label"]) for batch in batches] == [3, 2, 3, 2]
    assert sorted(label for batch in batches for label in batch["label"]) == list(range(10))
    assert all(batch["text"] == [f"text {label}" for label in batch["label"]] for batch in batches)


def test_a_hugging_face_dataset_gives_rows_without_a_batch_size(place: Place) -> None:
    rows = list(shard(TABLE))
    assert sorted(row["label"] for row in rows) == list(range(10))
    assert all(row["text"] == f"text {row['label']}" for row in rows)


def test_a_loader_of_a_hugging_face_dataset_keeps_collate_fn_and_batch_size(place: Place) -> None:
    loader = torch.utils.data.DataLoader(TABLE, batch_size=4, collate_fn=lambda rows: [row["label"] for row in rows])  # type: ignore[var-annotated, arg-type]
    parts = on_each(place, 2, lambda: shard(loader))
    assert [[len(batch) for batch in part] for part in parts] == [[4, 1], [4, 1]]
    assert sorted(label for part in parts for batch in part for label in batch) == list(range(10))


def test_a_dataset_that_reads_many_at_once_is_asked_for_many(place: Place) -> None:
    class Many(Squares):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(len(indices))
            return [self[index] for index in indices]

    asked: list[int] = []
    assert [len(batch[1]) for batch in shard(Many(), batch_size=4)] == asked == [4, 4, 2]


def test_a_loader_with_batches_of_its_own_needs_a_batch_size(place: Place) -> None:
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(Squares()), 5, drop_last=False)
    loader = torch.utils.data.DataLoader(Squares(), batch_sampler=sampler)
    with pytest.raises(ValueError, match=r"a BatchSampler makes the batches of this DataLoader, .* pass batch_size="):
        shard(loader)
    assert [len(batch[1]) for batch in shard(loader, batch_size=7)] == [7, 3]


data = torch.utils.data

SAMPLERS: dict[str, tuple[Any, int, set[int]]] = {
    "weighted": (lambda of: data.WeightedRandomSampler([0.0, 1, 0, 3, 0, 0, 0, 0, 2, 0], 40), 40, {1, 3, 8}),
    "weighted without replacement": (
        lambda of: data.WeightedRandomSampler([0.0, 1, 0, 3, 0, 0, 0, 0, 2, 0], 3, replacement=False), 3, {1, 3, 8},
    ),
    "subset": (lambda of: data.SubsetRandomSampler([2, 3, 5, 7]), 4, {2, 3, 5, 7}),
    "with replacement": (lambda of: data.RandomSampler(of, replacement=True, num_samples=200), 200, set(range(10))),
    "more than all": (lambda of: data.RandomSampler(of, num_samples=25), 25, set(range(10))),
    "a list": (lambda of: [3, 1, 4, 1], 4, {1, 3, 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLERS)
def test_torchs_samplers_choose_and_the_nodes_divide_what_they_chose(
    place: Place, recwarn: pytest.WarningsRecorder, name: str
) -> None:
    make, count, chosen = SAMPLERS[name]

    def loader(seed: int = 0) -> Shard:
        return shard(data.DataLoader(Squares(), batch_size=4, sampler=make(Squares())), seed=seed, epochs=2)

    def numbers(batches: Any) -> list[int]:
        return [number for batch in batches for number in batch[1].tolist()]

    whole = numbers(loader())
    assert len(whole) == 2 * count
    assert set(whole) == chosen
    assert sorted(number for part in on_each(place, 3, loader) for number in numbers(part)) == sorted(whole)
    assert (whole[:count] == whole[count:]) == (numbers(loader(seed=1)) == whole) == (name == "a list")
    place.size = 3
    assert len(loader()) == len(list(loader()))
    assert not recwarn.list


def test_a_weighted_sampler_chooses_by_its_weights(place: Place) -> None:
    weights = [1.0, 2, 3, 4, 0, 0, 0, 0, 0, 0]
    loader = data.DataLoader(Squares(), batch_size=100, sampler=data.WeightedRandomSampler(weights, 100_000))
    numbers = torch.cat([batch[1] for batch in shard(loader)])
    assert [round(int((numbers == number).sum()) / 10_000) for number in range(5)] == [1, 2, 3, 4, 0]


def test_a_sampler_that_chooses_more_than_all_takes_each_as_often(place: Place) -> None:
    loader = data.DataLoader(Squares(), batch_size=5, sampler=data.RandomSampler(Squares(), num_samples=20))
    assert sorted(number for batch in shard(loader) for number in batch[1].tolist()) == sorted([*range(10)] * 2)


def test_a_weighted_sampler_without_enough_weights_is_named(place: Place) -> None:
    sampler = data.WeightedRandomSampler([1.0] + [0.0] * 9, 2, replacement=False)
    with pytest.raises(ValueError, match="draws 2 without replacement, but only 1 weights are above 0"):
        shard(data.DataLoader(Squares(), sampler=sampler))


class EveryOther(data.Sampler):  # type: ignore[type-arg]
    def __init__(self) -> None:
        super().__init__()

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 10, 2))


@pytest.mark.parametrize(
    ("options", "name"),
    [({"sampler": EveryOther()}, "EveryOther"), ({"batch_sampler": [[1, 2], [3]]}, "list"),
     ({"batch_sampler": data.BatchSampler(EveryOther(), 5, drop_last=False)}, "EveryOther")],
)  # fmt: skip
def test_a_sampler_of_ones_own_class_is_named_with_the_way_out(
    place: Place, options: dict[str, Any], name: str
) -> None:
    with pytest.warns(UserWarning, match=rf"^shard: the {name} of this DataLoader is not used: .*Subset\(dataset, ind"):
        batches = shard(data.DataLoader(Squares(), **options), batch_size=5)
    assert sorted(number for batch in batches for number in batch[1].tolist()) == list(range(10))


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"shuffle": True, "batch_size": None}])
def test_the_samplers_that_a_loader_makes_itself_are_not_named(
    place: Place, recwarn: pytest.WarningsRecorder, options: dict[str, Any]
) -> None:
    shard(torch.utils.data.DataLoader(Squares(), **options))
    assert not recwarn.list


def test_a_loader_in_order_is_shuffled_unless_the_shard_says_otherwise(place: Place) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=10, shuffle=False)
    ((_, shuffled),) = shard(loader)
    ((_, in_order),) = shard(loader, shuffle=False)
    assert sorted(shuffled.tolist()) == in_order.tolist() == list(range(10)) != shuffled.tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_through_all_epochs(place: Place, workers: int) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=workers)
    numbers = [number for batch in shard(loader, epochs=2) for number in batch[1].tolist()]
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10))
