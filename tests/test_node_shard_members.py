"""nc.shard in real kernels while nodes die and join: what each loop got is written to a file, element by element."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.protocol.node import NodeHello
from tests.conftest import wait_until
from tests.node_kernels import NodeKernels, node_kernels

LOOP = """
import json, os, pathlib, time
root = pathlib.Path({root!r})
with open(root / f"got-{{nc.node()}}", "a", buffering=1) as got:
    number = 0
    for batch in nc.shard(list(range({count})), {size}, epochs={epochs}, **{more}):
        got.write(json.dumps(batch) + "\\n")
        number += 1
        while number >= {stop} and not ((root / "go").exists() and nc.world_size() == {nodes}):
            time.sleep(0.01)
        time.sleep({pause})
print(number)
"""


@pytest.fixture(scope="module")
def kernels() -> Iterator[NodeKernels]:
    with node_kernels("mini", "desk", "old") as kernels:
        yield kernels


def loop(
    root: Path, nodes: int, *, count: int = 600, epochs: int = 1, stop: int = 10, pause: float = 0, **more: object
) -> str:
    """A cell that stops after ``stop`` batches until the file ``go`` is there and the roster has ``nodes`` rows."""
    return LOOP.format(
        root=str(root), nodes=nodes, count=count, size=5, epochs=epochs, stop=stop, pause=pause, more=more
    )


def got(root: Path, name: str) -> list[int]:
    path = root / f"got-{name}"
    return [element for line in path.read_text().splitlines() for element in json.loads(line)] if path.exists() else []


def everything(root: Path, names: tuple[str, ...]) -> list[int]:
    return sorted(element for name in names for element in got(root, name))


def start(kernels: NodeKernels, code: str, names: tuple[str, ...], **more: object) -> dict[str, str]:
    metadata = kernels.metadata(**more)
    return {name: kernels.nodes[name].start(code, metadata) for name in names}


def finish(kernels: NodeKernels, started: dict[str, str]) -> None:
    for name, message_id in started.items():
        reply = kernels.nodes[name].finish(message_id)
        assert reply["status"] == "ok", reply


def test_a_joiner_gets_a_part_of_what_is_left(kernels: NodeKernels, tmp_path: Path) -> None:
    kernels.publish("mini", "desk")
    started = start(kernels, loop(tmp_path, 3), ("mini", "desk"))
    wait_until(lambda: all(len(got(tmp_path, name)) == 50 for name in ("mini", "desk")))
    kernels.publish("mini", "desk", "old")
    joiner = kernels.nodes["old"].start(
        loop(tmp_path, 3),
        {"cell": kernels.cells, "generation": kernels.roster.generation, "nodes": ["old"], "joined": True},
    )
    wait_until(lambda: len(got(tmp_path, "old")) == 50)
    (tmp_path / "go").touch()
    finish(kernels, started | {"old": joiner})
    assert everything(tmp_path, ("mini", "desk", "old")) == list(range(600))
    assert len(got(tmp_path, "old")) in (166, 167)  # a third of the 500 that were left


def test_parts_follow_the_measured_speed(kernels: NodeKernels, tmp_path: Path) -> None:
    kernels.publish("mini", "desk")
    (tmp_path / "go").touch()
    kernels.run("nc.report(loss=1.0); from notebook_cluster.training import current_runtime")
    for name, speed in (("mini", 300.0), ("desk", 100.0)):
        kernels.nodes[name].run(f"current_runtime().report(samples_per_s={speed})")
    finish(kernels, start(kernels, loop(tmp_path, 2, weights="speed"), ("mini", "desk")))
    assert everything(tmp_path, ("mini", "desk")) == list(range(600))
    assert [len(got(tmp_path, name)) for name in ("mini", "desk")] == [450, 150]


STOPPED = """
import json, pathlib, sys, time
from notebook_cluster.training import current_runtime
root, shares = pathlib.Path({root!r}), current_runtime().shares
if {resumes}:
    positions = json.loads(json.dumps(shares.positions(before=True)))
    shares.go_on(None if (root / f"forget-{{nc.node()}}").exists() else positions)
with open(root / f"got-{{nc.node()}}", "a", buffering=1) as got:
    for _ in zip(nc.shard(list(range(8)), seed=7), range(2)):
        pass
    for number, batch in enumerate(nc.shard(list(range(600)), 5, epochs=2)):
        got.write(json.dumps(batch) + "\\n")
        if number == {stop}:
            raise KeyboardInterrupt
"""


def test_a_cell_that_was_stopped_goes_on_where_each_node_was(kernels: NodeKernels, tmp_path: Path) -> None:
    """The last time one has no position, as if it had died and were there again."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for root in (whole, stopped):
        root.mkdir()
    names = ("mini", "desk", "old")

    def cell(root: Path, resumes: bool, stops: dict[str, int]) -> None:
        metadata = kernels.metadata()
        started = {
            name: kernels.nodes[name].start(STOPPED.format(root=str(root), resumes=resumes, stop=stop), metadata)
            for name, stop in stops.items()
        }
        for name, message_id in started.items():
            reply = kernels.nodes[name].finish(message_id)
            assert reply["status"] == ("ok" if stops[name] < 0 else "error"), reply
            assert stops[name] < 0 or reply["ename"] == "KeyboardInterrupt", reply

    kernels.publish(*names)
    cell(whole, False, dict.fromkeys(names, -1))
    cell(stopped, False, {"mini": 50, "desk": 59, "old": 45})
    cell(stopped, True, {"mini": 4, "desk": 3, "old": 11})
    cell(stopped, True, dict.fromkeys(names, -1))
    for name in names:
        assert got(stopped, name) == got(whole, name)

    for path in stopped.glob("got-*"):
        path.unlink()
    cell(stopped, False, {"mini": 20, "desk": 12, "old": 30})
    (stopped / "forget-old").touch()
    kernels.publish("mini", "desk")
    kernels.publish(*names)
    cell(stopped, True, dict.fromkeys(names, -1))
    assert everything(stopped, names) == sorted([*range(600)] * 2)


MADE_ANEW = """
import json, pathlib
from notebook_cluster.training import current_runtime
root, shares = pathlib.Path({root!r}), current_runtime().shares
if {resumes}:
    shares.go_on(json.loads(json.dumps(shares.positions(before=True))))
numbers, count = list(range(24)), 0
with open(root / f"got-{{nc.node()}}", "a", buffering=1) as got:
    for epoch in range(5):
        for batch in nc.shard({data}, 4):
            got.write(json.dumps(batch) + "\\n")
            count += 1
            if count == {stop}:
                raise KeyboardInterrupt
"""


def test_a_shard_that_is_made_anew_for_each_epoch_is_shuffled_anew_and_goes_on(
    kernels: NodeKernels, tmp_path: Path
) -> None:
    names = ("mini", "desk")
    kernels.publish(*names)

    def cell(name: str, data: str, stop: int = -1, resumes: bool = False) -> list[list[tuple[int, ...]]]:
        """On each node: its epochs."""
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        replies = kernels.run(MADE_ANEW.format(root=str(root), data=data, stop=stop, resumes=resumes))
        assert all(reply["status"] == ("error" if stop > 0 else "ok") for reply in replies), replies
        return [[tuple(got(root, node)[at : at + 12]) for at in range(0, 60, 12)] for node in names]

    whole = cell("whole", "numbers")
    assert all(sorted(mine + others) == list(range(24)) for mine, others in zip(*whole, strict=True))
    assert len({frozenset(epoch) for epoch in whole[0]}) == 5
    assert cell("alike", "list(numbers)") == whole, "what is made alike for each epoch is the same data"
    cell("stopped", "numbers", stop=8)
    assert cell("stopped", "numbers", resumes=True) == whole


PLACES = """
import numpy as np
x, y = np.arange(24), np.arange(24) + 100
made = lambda data: nc.shard(data, 4)
all_of = lambda shard: np.concatenate(list(shard)).tolist()
first_of, seeded = [], []
for epoch in range(3):
    left = nc.shard(x, 4, epochs=2)
    for number, batch in enumerate(left):
        if number == 0:
            first_of.append(left.position()["epochs"][0]["epoch"])
        if number == (1 if nc.rank() == 0 else 4):  # in its second epoch, which rank 0 has not begun
            break
    assert all_of(nc.shard(x, 4)) == all_of(nc.shard(x, 4))
    for one, other in zip(nc.shard(x, 4), nc.shard(y, 4)):
        assert (one + 100 == other).all()
    for one, other in zip(*[made(data) for data in (x, x)]):
        assert (one == other).all()
    first, second = [all_of(made(data)) for data in (x + 1, y + 1)]
    assert [number + 100 for number in first] == second
    seeded.append(all_of(nc.shard(x, 4, seed=epoch)))
assert first_of == [0, 2, 4], first_of
assert seeded == [all_of(nc.shard(x, 4, seed=seed)) for seed in range(3)]
"""


def test_shards_of_other_places_or_data_begin_alike_and_a_break_leaves_all_nodes_in_one_epoch(
    kernels: NodeKernels,
) -> None:
    kernels.publish("mini", "desk")
    replies = kernels.run(PLACES)
    assert [reply["status"] for reply in replies] == ["ok", "ok"], replies


PLAYED = """
import gc, weakref
gc.disable()  # what hangs in a circle stays until Python looks for it, which may be long
import numpy as np
kept = []
for turn in range(4):
    data = np.random.rand(40)
    kept.append(weakref.ref(data))
    for number, batch in enumerate(nc.shard(data, batch_size=5)):
        if turn % 2 and number == 1:
            break
del data
left = [one() for one in kept]
gc.enable()
assert left == [None] * 4
"""


def test_data_that_is_made_anew_in_each_turn_is_not_kept(kernels: NodeKernels) -> None:
    kernels.publish("mini", "desk")
    replies = kernels.run(PLAYED)
    assert [reply["status"] for reply in replies] == ["ok", "ok"], replies


def test_the_part_of_a_node_killed_between_batches_goes_to_the_others(kernels: NodeKernels, tmp_path: Path) -> None:
    """In the second of three epochs."""
    kernels.publish("mini", "desk", "old")
    names = ("mini", "desk", "old")
    started = start(kernels, loop(tmp_path, 2, count=300, epochs=3, stop=30, pause=0.01), names)
    wait_until(lambda: all(len(got(tmp_path, name)) == 150 for name in names))
    os.kill(kernels.nodes["old"].said(NodeHello)[-1].pid, signal.SIGKILL)
    kernels.publish("mini", "desk")
    (tmp_path / "go").touch()
    started.pop("old")
    finish(kernels, started)
    counts = [everything(tmp_path, names).count(element) for element in range(300)]
    assert counts == [3] * 300
    assert len(got(tmp_path, "old")) == 150
