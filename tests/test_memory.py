"""Arrays in memory that was used before: found again when nobody has them, never while somebody does."""

import random
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch

from notebook_cluster.memory import ArrayPool, first_gap, with_range

COUNT = 1 << 20
SIZE = 4 * COUNT


def place(array) -> int:
    return array.ctypes.data


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array.reshape(-1, 2)[5:, ::2],
        lambda array: torch.from_numpy(array).reshape(1024, 1024)[5:],
        lambda array: memoryview(array).cast("B")[100:],
    ],
    ids=["itself", "view", "tensor", "memoryview"],
)
def test_memory_is_used_again_only_when_nobody_has_it(hold) -> None:
    memory = ArrayPool(16 * SIZE)
    first = memory.array(COUNT, np.float32)
    at, held = place(first), hold(first)
    del first
    second = memory.array(COUNT, np.float32)
    assert place(second) != at
    del held
    assert place(memory.array(COUNT, np.float32)) == at
    assert (second.size, second.dtype) == (COUNT, np.float32)


def test_it_is_found_for_another_type_of_the_same_size_only() -> None:
    memory = ArrayPool(16 * SIZE)
    at = place(memory.array(COUNT, np.float32))
    assert place(memory.array(COUNT // 2, np.float32)) != at
    again = memory.array(COUNT // 2, np.float64)
    assert (place(again), again.dtype, again.size) == (at, np.float64, COUNT // 2)


class Holder:
    def __init__(self, array) -> None:
        self.array = array


@pytest.mark.parametrize("pooled", [True, False])
def test_references_are_those_beside_the_holders(pooled: bool) -> None:
    memory = ArrayPool(16 * SIZE if pooled else 0)
    holder = Holder(memory.array(COUNT, np.float32))
    assert memory.references(holder, "array") == 0
    second = Holder(holder.array)
    assert memory.references(holder, "array") == 1
    del second
    for hold in (
        lambda array: array[5:],
        lambda array: torch.from_numpy(array),
        lambda array: memoryview(array).cast("B")[100:],
        lambda array: torch.from_numpy(array).reshape(1024, 1024)[5:],
    ):
        held = hold(holder.array)
        assert memory.references(holder, "array") == 1
        del held
        assert memory.references(holder, "array") == 0
    view = holder.array[5:]
    memory.forget()
    assert memory.references(holder, "array") == 1
    del view
    assert memory.references(holder, "array") == 0


def test_no_more_is_kept_than_was_asked_for() -> None:
    memory = ArrayPool(2 * SIZE)
    arrays = [memory.array(COUNT, np.float32) for _ in range(3)]
    places = list(map(place, arrays))
    for array, value in zip(arrays, range(3), strict=True):
        array[...] = value
    assert [float(array.sum()) / COUNT for array in arrays] == [0, 1, 2]
    del arrays, array
    found = [memory.array(COUNT, np.float32) for _ in range(2)]
    assert set(map(place, found)) == set(places[1:])
    # one that is larger than all that may be kept is new memory
    assert memory.array(3 * COUNT, np.float32).size == 3 * COUNT
    assert set(map(place, found)) == set(places[1:])


def test_what_is_forgotten_stays_with_who_has_it() -> None:
    memory = ArrayPool(16 * SIZE)
    array = memory.array(COUNT, np.float32)
    array[...] = 3
    memory.forget()
    other = memory.array(COUNT, np.float32)
    assert place(other) != place(array)
    other[...] = 4
    assert (array == 3).all()


def test_a_python_without_global_lock_gets_new_memory_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ArrayPool(16 * SIZE)
    at = place(memory.array(COUNT, np.float32))
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    kept = [memory.array(COUNT, np.float32) for _ in range(2)]
    assert at not in map(place, kept)
    assert len(memory._kept) == 1
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert place(memory.array(COUNT, np.float32)) == at


def test_threads_never_get_the_same_memory() -> None:
    memory = ArrayPool(64 * SIZE)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            array = memory.array(COUNT // 4, np.float32)
            array[::4096] = number
            if not (array[::4096] == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_more_is_kept_until_it_is_forgotten() -> None:
    """A second user who asks for less takes nothing from the first."""
    memory = ArrayPool(SIZE)
    memory.keep_up_to(3 * SIZE)
    memory.keep_up_to(2 * SIZE)
    arrays = [memory.array(COUNT, np.float32) for _ in range(3)]
    places = set(map(place, arrays))
    del arrays
    arrays = [memory.array(COUNT, np.float32) for _ in range(3)]
    assert set(map(place, arrays)) == places
    memory.forget()
    del arrays
    kept = [memory.array(COUNT, np.float32) for _ in range(2)]
    assert len(memory._kept) == 1
    assert place(memory._kept[0]) == place(kept[1])


# ---- what has come ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_the_bytes_that_came_and_each_is_new_once(seed: int) -> None:
    drawn, size = random.Random(seed), 60
    ranges, here = (), set()
    while len(here) < size:
        start = drawn.randrange(size)
        stop = min(size, start + drawn.choice((1, 3, 16)))
        ranges, new = with_range(ranges, start, stop)
        came = {byte for low, high in new for byte in range(low, high)}
        assert came == set(range(start, stop)) - here
        here |= came
        assert {byte for low, high in ranges for byte in range(low, high)} == here
        assert all(end < begin for (_, end), (begin, _) in pairwise(ranges))
        assert first_gap(ranges) == min(set(range(size + 1)) - here)
    assert ranges == ((0, size),)
    assert with_range(ranges, 5, 9) == (ranges, ())
