"""nc.shard of data without a length: by stride and by file, with positions, whoever comes and goes."""

import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.node.data.stream_readers import BatchMaker, StrideReader
from notebook_cluster.node.data.streams import StreamSource, hash_of_item
from notebook_cluster.node.data.taken import Taken, unpacked
from notebook_cluster.node.namespace.shard import Shard, shard
from tests.test_node_shard import Place, on_each, place
from tests.test_node_shard_positions import kept_of, run_again
from tests.test_node_shares import STARTERS, World, all_is_given_once, key

__all__ = ["place"]


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Divides itself between a DataLoader's workers, as torch's documentation has it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return iter(range(first, self.count, step))


def gen(count: int = 20) -> Iterator[int]:
    yield from range(count)


def write_tar(path: Path, samples: list[dict[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for number, sample in enumerate(samples):
            for kind, content in sample.items():
                info = tarfile.TarInfo(f"train/{path.stem}-{number:04}.{kind}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return path


def tars(folder: Path, counts: list[int]) -> list[Path]:
    """Files with so many samples, numbered through."""
    numbers = itertools.count()
    return [
        write_tar(folder / f"{index:03}.tar", [{"txt": b"%d" % next(numbers), "seg.png": b"x"} for _ in range(count)])
        for index, count in enumerate(counts)
    ]


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


STREAMS: dict[str, Callable[[], Any]] = {
    "a function": lambda: gen,
    "a generator": gen,
    "an iterable": lambda: dict.fromkeys(range(20)).keys(),
    "an IterableDataset": lambda: Numbers(20),
    "a list of iterables by stride": lambda: [range(12), range(12, 20)],
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("nodes", [1, 3])
def test_by_stride_each_item_comes_once(place: Place, name: str, nodes: int) -> None:
    mode: Any = "stride" if "list" in name else None
    parts = on_each(place, nodes, lambda: shard(STREAMS[name](), mode=mode))
    assert parts == [list(range(rank, 20, nodes)) for rank in range(nodes)]


def test_batches_of_a_stream(place: Place) -> None:
    assert list(shard(gen, 8)) == [[*range(8)], [*range(8, 16)], [16, 17, 18, 19]]
    assert list(shard(gen, 8, drop_last=True)) == [[*range(8)], [*range(8, 16)]]
    assert [batch.tolist() for batch in shard(Numbers(5), 4)] == [[0, 1, 2, 3], [4]]
    assert list(shard(lambda: gen(0), 8)) == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [None, 3])
def test_a_loader_of_an_iterable_dataset(place: Place, workers: int, size: int | None) -> None:
    loader = torch.utils.data.DataLoader(Numbers(20), batch_size=size, num_workers=workers)
    parts = on_each(place, 2, lambda: shard(loader, epochs=2))
    got = [[int(one) for batch in part for one in np.ravel(batch)] for part in parts]
    assert got == [[*range(0, 20, 2)] * 2, [*range(1, 20, 2)] * 2]
    assert max(len(np.ravel(batch)) for batch in parts[0]) == (size or 1)


def test_a_stream_begins_anew_each_epoch_and_hears_which(place: Place) -> None:
    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            self.count = 2 + epoch

    told = shard(Told(0), epochs=2)
    assert list(told) == [0, 1, 0, 1, 2]
    assert list(told) == [0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_a_generator_is_read_once(place: Place) -> None:
    with pytest.raises(ValueError, match=r"epochs=2: a generator can be read once\. .* nc\.shard\(lambda"):
        shard(gen(), epochs=2)
    once = shard(gen())
    assert list(once) == list(range(20))
    with pytest.raises(RuntimeError, match="was read before"):
        list(once)


def test_an_endless_stream_is_left_by_the_loop(place: Place) -> None:
    place.at, place.size = 1, 2
    assert [item for item, _ in zip(shard(lambda: itertools.count()), range(4), strict=False)] == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: shard(Numbers), "Numbers is a class: pass one of its objects"),
        (lambda: shard(gen, shuffle=True), "shuffle=True: by stride .* own order"),
        (lambda: shard([1, 2], mode="stride"), "a list has a length and an index"),
        (lambda: shard(gen, mode="file"), 'mode="file" needs a list of .tar files'),
        (lambda: shard(["a.json"], mode="file"), r"as 'a\.json', pass functions"),
        (lambda: shard(gen, mode="part"), "mode='part': use"),  # type: ignore[arg-type]
        (lambda: len(shard(gen)), "a stream has no length"),
    ],
)
def test_what_does_not_go_with_a_stream_is_said(place: Place, make: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()


@pytest.mark.parametrize("nodes", [1, 2])
def test_tar_files_are_divided_by_file(place: Place, tmp_path: Path, nodes: int) -> None:
    counts = [5, 3, 0, 7, 1, 4]
    files = tars(tmp_path, counts)
    where = [file for file, count in enumerate(counts) for _ in range(count)]
    parts = on_each(place, nodes, lambda: shard(files, 4))
    numbers = [[number_of(sample) for batch in part for sample in batch] for part in parts]
    assert sorted(itertools.chain(*numbers)) == list(range(20))
    of = [{where[number] for number in part} for part in numbers]
    assert nodes == 1 or not of[0] & of[1]
    assert [[len(batch) for batch in part][:-1] for part in parts] == [[4] * (len(part) - 1) for part in parts]


def test_a_sample_of_a_tar_file(place: Place, tmp_path: Path) -> None:
    files = [str(file) for file in tars(tmp_path, [2, 1])]
    assert list(shard(files, shuffle=False))[1] == {"__key__": "train/000-0001", "txt": b"1", "seg.png": b"x"}
    assert [number_of(sample) for sample in shard(files, mode="stride")] == [0, 1, 2]


def test_a_broken_tar_file_is_named(place: Place, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar" * 1000)
    with pytest.raises(tarfile.TarError, match=r"a\.tar cannot be read as a tar file"):
        list(shard([tmp_path / "a.tar"]))


def test_a_list_of_functions_by_file(place: Place) -> None:
    files = [lambda first=first: range(first, first + 10) for first in range(0, 60, 10)]
    parts = on_each(place, 2, lambda: shard(files, 4, mode="file"))
    assert [len(part) for part in parts] == [8, 8]
    assert all(len({number // 10 for number in itertools.chain(*part)}) == 3 for part in parts)
    assert sorted(number for part in parts for batch in part for number in batch) == list(range(60))
    assert parts[0] != on_each(place, 2, lambda: shard(files, 4, mode="file", seed=1))[0]


POSITIONED: dict[str, Callable[[], Shard]] = {
    "stride": lambda: shard(gen, 3, epochs=2),
    "stride, single": lambda: shard(gen, epochs=2),
    "stride, full only": lambda: shard(gen, 3, epochs=2, drop_last=True),
    "a loader": lambda: shard(torch.utils.data.DataLoader(Numbers(20), batch_size=3), epochs=2),
    "a loader with workers": lambda: shard(
        torch.utils.data.DataLoader(Numbers(20), batch_size=3, num_workers=2), epochs=2
    ),
    "files": lambda: shard([range(7), range(7, 9), range(9, 20)], 3, mode="file", epochs=2),
    "files, full only": lambda: shard([range(7), range(7, 9), range(9, 20)], 3, mode="file", epochs=2, drop_last=True),
}


def plain(batch: Any) -> Any:
    return batch.tolist() if hasattr(batch, "tolist") else batch


@pytest.mark.parametrize("name", POSITIONED)
def test_a_stream_goes_on_at_every_position(place: Place, name: str) -> None:
    make = POSITIONED[name]
    place.at, place.size = 1, 2
    whole = [plain(batch) for batch in make()]
    numbers = range(len(whole) + 1) if "workers" not in name else (1, 3, 4)
    for number in numbers:
        first = make()
        loop = iter(first)
        before = [plain(next(loop)) for _ in range(number)]
        for in_hand, again in ((True, 0), (False, 1)):
            if not number and not in_hand:
                continue
            second = make()
            second.go_on(json.loads(json.dumps(first.position(in_hand))))
            assert before[: number - again] + [plain(batch) for batch in second] == whole, (number, in_hand)


def stream_key(**fields: Any) -> Any:
    return key(count=0, shuffle=False, **fields)


class StreamWorld(World):
    """Of a stream with ``end`` items, which a node learns when it has asked for one that is not there."""

    end = 60

    def take(self, name: str, size: int) -> bool:
        before = len(self.given[name])
        came = super().take(name, size)
        got = self.given[name][before:]
        self.given[name][before:] = [position for position in got if position < self.end]
        if any(position >= self.end for position in got):
            self.nodes[name].seen_of_stream(self.ledgers[name], self.end, "")
        return came


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.lists(st.sampled_from(["join", "lose"]), max_size=4), st.booleans())
def test_each_item_is_given_out_once_whoever_comes_and_goes(seed: int, changes: list[str], by_speed: bool) -> None:
    all_is_given_once(StreamWorld(seed, stream_key(by_speed=by_speed)), changes)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 120), st.sampled_from(["abc", "ab", "bcd", "abcd", "cbad"]))
def test_a_stopped_stream_goes_on(seed: int, steps: int, names: str) -> None:
    world = StreamWorld(seed, stream_key())
    for name in STARTERS:
        world.take(name, 1)
    for _ in range(steps):
        world.happen()
    kept, before = kept_of(world), {name: list(given) for name, given in world.given.items()}
    again = run_again(world, kept, tuple(names), seed + 1)
    again.finish()
    got = sorted([number for given in before.values() for number in given] + again.all_given())
    assert len(set(again.all_given())) == len(again.all_given())
    assert set(got) == set(range(60))
    if set(STARTERS) <= set(names):  # of another it is not known what it took last
        assert got == list(range(60))
    if names == "abc":
        world.finish()
        assert {name: before[name] + again.given[name] for name in STARTERS} == world.given


def test_speeds_divide_a_stream_whose_end_is_not_known() -> None:
    world = StreamWorld(1, stream_key(by_speed=True))
    world.end = 4000
    world.speeds = {"a": 30.0, "b": 10.0, "c": 0.0}
    world.finish()
    assert [round(len(world.given[name]) / 100) for name in STARTERS] == [20, 7, 13]


def test_a_stream_that_differs_between_nodes_is_named() -> None:
    world = StreamWorld(1, stream_key())
    for name in "ab":
        world.take(name, 4)
        world.nodes[name].seen_of_stream(world.ledgers[name], -1, name)
    while world.happen(takes=False):
        pass
    with pytest.raises(ValueError, match="not the same on every node: its first item is another one on 'b' than here"):
        world.take("a", 4)


def test_a_stream_that_differs_is_named_where_the_word_came_before_this_node_had_read_of_it() -> None:
    world = StreamWorld(1, stream_key(), ("a", "b"))
    world.take("a", 4)
    world.nodes["a"].seen_of_stream(world.ledgers["a"], -1, "a")
    while world.happen(takes=False):
        pass
    world.take("b", 4)
    world.nodes["b"].seen_of_stream(world.ledgers["b"], -1, "b")
    with pytest.raises(ValueError, match="its first item is another one on 'a' than here"):
        world.take("b", 4)


@pytest.mark.parametrize("late", ["before the end", "after the last batch", "after the loop", "after a break"])
def test_a_short_stream_that_differs_is_named_also_when_the_word_comes_late(late: str) -> None:
    world = StreamWorld(1, stream_key(), ("a", "b"))
    world.end = 8
    for name in "ab":
        world.take(name, 2)
        world.nodes[name].seen_of_stream(world.ledgers[name], -1, name)
    a, ledger = world.nodes["a"], world.ledgers["a"]
    if late == "after a break":
        a.abandon([ledger])
    elif late != "before the end":
        while world.take("a", 4):
            pass
        assert late != "after the loop" or a.close([ledger])
    while world.happen(takes=False):
        pass
    if late == "before the end":
        with pytest.raises(ValueError, match="not the same on every node"):
            world.take("a", 4)
    assert late == "after the loop" or a.close([ledger])
    while world.happen(takes=False):
        pass
    told = [message.text for message in world.told if "on 'b' than here" in message.text]
    assert len(told) == (late != "before the end")
    assert all(
        "nc.shard: the stream is not the same on every node: its first item is another one" in one for one in told
    )


@given(st.lists(st.integers(0, 300)), st.lists(st.integers(0, 300)), st.integers(0, 40))
def test_what_is_taken_of_a_stream(first: list[int], second: list[int], full: int) -> None:
    one, two = Taken(0), Taken(0)
    one.mark([*range(8 * full), *first])
    two.mark(second)
    one = unpacked(one.settled().packed(), 0)
    assert one.base >= 8 * full
    one.join(two)
    taken = {*range(8 * full), *first, *second}
    assert [position in one for position in range(400)] == [position in taken for position in range(400)]
    assert one.free().tolist() == [position for position in range(one.base, one.top) if position not in taken]
    assert all(one.all_below(end) == (set(range(end)) <= taken) for end in range(0, 400, 7))


def test_a_long_stream_takes_little_memory() -> None:
    taken = Taken(0)
    for begin in range(0, 3_000_000, 1000):
        taken.mark(range(begin, begin + 1000))
    assert len(taken.bits) < 1 << 17
    assert taken.all_below(3_000_000)
    assert len(taken.packed()) < 1000


@given(st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=4).map(sorted), max_size=6))
def test_a_reader_finds_items_by_number(requests: list[list[int]]) -> None:
    reader = StrideReader(StreamSource(lambda epoch: iter(range(20))), BatchMaker(None, False))
    for positions in map(sorted, map(set, requests)):  # type: ignore[arg-type]
        answer = reader[0, positions]
        exist = [position for position in positions if position < 20]
        assert answer.batch == ((exist,) if exist else ())
        assert answer.end == 20 or len(exist) == len(positions)


def test_hashes_of_items() -> None:
    items: list[Any] = [
        1, 2, "1", b"1", None, [1], (1,), {"a": 1}, {"a": 2}, np.arange(3), np.arange(4), torch.arange(3),
        torch.arange(3) * 2, {"x": torch.zeros(2, dtype=torch.bfloat16)},
    ]  # fmt: skip
    hashes = [hash_of_item(item) for item in items]
    assert len(set(hashes)) == len(hashes)
    assert hashes == [hash_of_item(item) for item in items]
