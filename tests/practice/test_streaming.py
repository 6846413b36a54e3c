"""Streams and files through nc.shard on real kernels: divided, stopped, gone on with, killed and joined."""

import io
import itertools
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, kill, mend, run, running_cluster, shared_cluster
from tests.conftest import wait_until
from tests.practice.recipes import recipe

NODES = ("local", "local-2")

SETUP = """
import itertools, json, os, time
import torch
from torch.utils.data import DataLoader, IterableDataset
from notebook_cluster.training import current_runtime
torch.set_num_threads(1)

class Numbers(IterableDataset):
    "Divides itself between a DataLoader's workers, as torch's documentation has it."
    def __init__(self, count):
        self.count = count
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return iter(range(first, self.count, step))

def flat(batches):
    return [int(one) for batch in batches for one in batch]

def make_model():
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)

trained = []

def train_step(model, optimizer, batch):
    trained.extend(batch)
    loss = model(torch.ones(1, 1)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=2) as cluster:
        run(cluster, SETUP)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    mend(shared)


def printed(cluster: Cluster, source: str, **options: Any) -> dict[str, Any]:
    """What each node printed as JSON."""
    return {name: json.loads(text.splitlines()[-1]) for name, text in run(cluster, source, **options).items()}


def write_tars(folder: Path, files: int, samples: int) -> None:
    folder.mkdir(exist_ok=True)
    numbers = itertools.count()
    for file in range(files):
        with tarfile.open(folder / f"{file:03}.tar", "w") as archive:
            for number in itertools.islice(numbers, samples):
                for kind, text in (("txt", f"text {number}"), ("cls", str(number))):
                    info = tarfile.TarInfo(f"{number:04}.{kind}")
                    info.size = len(text)
                    archive.addfile(info, io.BytesIO(text.encode()))


MARATHON = """
import json, os, time
from notebook_cluster.training import current_runtime

shares = current_runtime().shares
if {again}:
    shares.go_on(json.loads(json.dumps(shares.positions(before=True))))

def numbers():
    yield from range(10_000)

seen = []
try:
    with open(f"lines-{again}@{{nc.node()}}@{{os.getpid()}}", "a", buffering=1) as lines:
        for batch in nc.shard(numbers, 8):
            seen.append(batch)
            lines.write(json.dumps(batch) + "\\n")
            while len(seen) == 40 and not os.path.exists("go"):
                (ledger,) = shares._ledgers.values()
                with shares.changed, open(f"known-{{nc.node()}}", "w") as file:
                    file.write(str(ledger.taken.top - len(ledger.taken.free())))
                time.sleep(0.01)
            time.sleep({pause})
finally:
    with open(f"seen-{again}-{{nc.node()}}.json", "w") as file:
        json.dump(seen, file)
"""


def lines(work: Path, node: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in work.glob(f"lines-0@{node}@*"))


def known(work: Path, node: str) -> int:
    """Elements that a node knows to be taken, its own and those that the others have told it."""
    path = work / f"known-{node}"
    return int(path.read_text() or 0) if path.exists() else 0


def seen(work: Path, again: int, node: str) -> list[int]:
    return list(itertools.chain(*json.loads((work / f"seen-{again}-{node}.json").read_text())))


def test_ten_thousand_samples_with_one_node_killed_one_joined_and_a_stop(work: Path) -> None:
    with running_cluster(local=3) as cluster:
        watcher = Watcher(cluster.execute(MARATHON.format(again=0, pause=0.005)))
        # What a node has taken and not told is given out once more where it is lost.
        wait_until(lambda: all(known(work, node) == 3 * 40 * 8 for node in NODES), 60, watcher.text)
        (path,) = work.glob("lines-0@local-3@*")
        kill(int(path.name.rpartition("@")[2]))
        wait_until(lambda: {row.name: row for row in cluster.state().nodes}["local-3"].condition == "dead")
        assert cluster.add("local", 1) == ["local-4"]
        wait_until(lambda: lines(work, "local-4") == 40, 60, lambda: f"{cluster.state().nodes} {watcher.text()}")
        (work / "go").touch()
        members = ("local", "local-2", "local-4")
        wait_until(lambda: all(lines(work, node) >= 120 for node in members), 60, watcher.text)
        cluster.interrupt()
        assert watcher.wait_end().status == "interrupted"
        cluster.remove("local-3")
        run(cluster, MARATHON.format(again=1, pause=0))

        killed = [number for line in path.read_text().splitlines() for number in json.loads(line)]
        before = {node: seen(work, 0, node) for node in members}
        after = {node: seen(work, 1, node) for node in members}
    for node in members:
        assert 120 * 8 <= len(before[node]) < 400 * 8
        assert [b - a for a, b in itertools.pairwise(before[node][-8:] + after[node])] == [3] * (len(after[node]) + 7)
    every = sorted(itertools.chain(killed, *before.values(), *after.values()))
    assert every == list(range(10_000))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_in_a_loader_stops_and_goes_on(cluster: Cluster, workers: int) -> None:
    cell = f"""
shares = current_runtime().shares
if {{again}}:
    shares.go_on(json.loads(json.dumps(shares.positions(before=True))))
got = []
try:
    for batch in nc.shard(DataLoader(Numbers(200), batch_size=4, num_workers={workers}), epochs=2):
        got.append(batch.tolist())
        if len(got) == {{stop}} + rank:
            raise KeyboardInterrupt
finally:
    first = got if not {{again}} else first + got
"""
    assert cluster.run(cell.format(again=False, stop=9))[0].status == "interrupted"
    assert cluster.run(cell.format(again=True, stop=20))[0].status == "interrupted"
    run(cluster, cell.format(again=True, stop=-9))
    got = printed(cluster, "print(json.dumps(flat(first)))")
    assert got == {name: [*range(rank, 200, 2)] * 2 for rank, name in enumerate(NODES)}


def test_an_endless_stream_is_left_by_one_and_gone_on_with_by_the_other(cluster: Cluster) -> None:
    got = printed(
        cluster,
        "print(json.dumps([n for n, _ in zip(nc.shard(lambda: itertools.count()), range(5 + 200 * rank))][-1]))",
    )
    assert got == {"local": 8, "local-2": 409}


def test_a_generator_goes_on_after_a_stop_and_is_refused_a_second_time(cluster: Cluster) -> None:
    cell = """
shares = current_runtime().shares
if {again}:
    shares.go_on(shares.positions(before=True))
data = nc.shard(n * n for n in range(30))
kept = [n for _, n in zip(range({count}), data)]
print(json.dumps(kept))
if not {again}:
    raise KeyboardInterrupt
"""
    cluster.run(cell.format(again=False, count=4))
    got = printed(cluster, cell.format(again=True, count=99))
    assert got == {name: [n * n for n in range(8 + rank, 30, 2)] for rank, name in enumerate(NODES)}
    ended, _ = cluster.run("list(data)")
    assert "this generator was read before, and can be read once" in str(ended.results["local"])


def test_a_stream_that_is_shuffled_otherwise_on_each_node_is_refused(cluster: Cluster) -> None:
    ended, _ = cluster.run("""
def shuffled():
    draw = __import__("random").Random(rank)
    yield from draw.sample(range(100_000), 100_000)
for item in nc.shard(shuffled):
    time.sleep(0.001)
""")
    assert ended.status == "error"
    assert "the stream is not the same on every node: its first item is another one on" in str(ended.results)


def test_files_in_another_order_are_refused(cluster: Cluster) -> None:
    write_tars(Path("orders"), 20, 50)
    ended, _ = cluster.run("""
import pathlib
for sample in nc.shard(sorted(pathlib.Path("orders").glob("*.tar"), reverse=rank == 1)):
    time.sleep(0.01)
""")
    assert "its files have other names or another order on" in str(ended.results)


def test_hugging_faces_iterable_dataset(cluster: Cluster) -> None:
    pytest.importorskip("datasets")
    run(
        cluster,
        """
import datasets
def rows(files):
    for file in files:
        for number in range(10):
            yield {"number": 10 * file + number, "text": f"{file}/{number}"}
rows = datasets.IterableDataset.from_generator(rows, gen_kwargs={"files": list(range(6))})
""",
    )
    for options in ("batch_size=4", "batch_size=4, mode='file'", "batch_size=4, mode='file', epochs=2, drop_last=True"):
        got = printed(cluster, f"print(json.dumps([batch for batch in nc.shard(rows, {options})]))")
        assert all(list(batch) == ["number", "text"] for batches in got.values() for batch in batches)
        numbers = {name: [n for batch in batches for n in batch["number"]] for name, batches in got.items()}
        if "drop" in options:
            assert all(len(part) == 2 * 28 for part in numbers.values())
        else:
            assert sorted(itertools.chain(*numbers.values())) == list(range(60))
        files = [{n // 10 for n in part} for part in numbers.values()]
        assert bool(files[0] & files[1]) == ("file" not in options or "epochs" in options)
    for workers in (0, 2):
        loader = f"DataLoader(rows, batch_size=4, num_workers={workers})"
        for mode in ("stride", "file"):
            got = printed(cluster, f"print(json.dumps(flat(b['number'] for b in nc.shard({loader}, mode='{mode}'))))")
            assert sorted(itertools.chain(*got.values())) == list(range(60))
    stopping = """
shares = current_runtime().shares
first, got = (got, []) if {again} else ([], [])
if {again}:
    shares.go_on(shares.positions(before=True))
for batch in nc.shard(DataLoader(rows, batch_size=4, num_workers=2), mode="file", epochs=2):
    got.extend(batch["number"].tolist())
    if {stop} <= len(got):
        raise KeyboardInterrupt
print(json.dumps(first + got))
"""
    whole = printed(cluster, stopping.format(again=False, stop=10_000))
    assert all(len({number // 10 for number in part[:8]}) == 2 for part in whole.values())  # each worker has its file
    assert cluster.run(stopping.format(again=False, stop=32))[0].status == "interrupted"
    assert printed(cluster, stopping.format(again=True, stop=10_000)) == whole
    shuffled = printed(
        cluster,
        """
print(json.dumps([row["number"] for row in nc.shard(rows.shuffle(seed=3, buffer_size=20), epochs=2)]))
""",
    )
    assert sorted(itertools.chain(*shuffled.values())) == sorted([*range(60)] * 2)
    assert shuffled["local"][:30] != shuffled["local"][30:]


FILES = """
import json, os, time, pathlib
from notebook_cluster.training import current_runtime
shares = current_runtime().shares
if {again}:
    shares.go_on(shares.positions(before=True))
with open(f"got-{{nc.node()}}", "a", buffering=1) as got:
    for number, batch in enumerate(nc.shard(sorted(pathlib.Path("shards").glob("*.tar")), 4, seed=1)):
        got.write(json.dumps([int(sample["cls"]) for sample in batch]) + "\\n")
        if number == {stop}:
            raise KeyboardInterrupt
        # Who is dead to the coordinator may not be gone to this node yet.
        while number == 3 and not (os.path.exists("go") and len(shares._roster.nodes) == 2):
            time.sleep(0.01)
"""


def got_of(work: Path, node: str) -> list[int]:
    path = work / f"got-{node}"
    return [number for line in path.read_text().splitlines() for number in json.loads(line)] if path.exists() else []


def test_the_open_file_of_a_killed_node_is_named_and_the_others_are_divided_anew(work: Path) -> None:
    write_tars(work / "shards", 12, 10)
    nodes = ("local", "local-2", "local-3")
    with running_cluster(local=3) as cluster:
        pids = run(cluster, "import os; print(os.getpid())")
        watcher = Watcher(cluster.execute(FILES.format(again=False, stop=5)))
        wait_until(lambda: all(len(got_of(work, node)) == 16 for node in nodes))
        kill(int(pids["local-3"]))
        wait_until(lambda: {row.name: row for row in cluster.state().nodes}["local-3"].condition == "dead")
        (work / "go").touch()
        watcher.wait_end()
        cluster.remove("local-3")
        run(cluster, FILES.format(again=True, stop=-1))
    every = sorted(itertools.chain(*(got_of(work, node) for node in nodes)))
    assert len(set(every)) == len(every)
    missing = set(range(120)) - set(every)
    (file,) = {number // 10 for number in missing}  # what it had not given out of its second file
    assert len(missing) == 4
    assert f"shard: local-3 was lost with {file:03}.tar open" in watcher.text()


def test_the_recipe_of_a_stream(cluster: Cluster) -> None:
    folder = Path("texts")
    folder.mkdir()
    for file in range(3):
        (folder / f"{file}.jsonl").write_text("".join(f"{100 * file + line}\n" for line in range(100)))
    code = "model = make_model(); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\ntrained.clear()\n"
    got = printed(cluster, code + recipe("A stream") + "\nprint(json.dumps(trained))")
    assert sorted(itertools.chain(*got.values())) == sorted([*range(300)] * 2)


def test_the_recipe_of_tar_files(cluster: Cluster) -> None:
    write_tars(Path("shards"), 8, 15)
    code = "model = make_model(); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\ntrained.clear()\n"
    got = printed(cluster, code + recipe("Tar files") + "\nprint(json.dumps(trained))")
    assert sorted(itertools.chain(*got.values())) == sorted([[f"text {n}", n] for n in range(120)] * 2)


def test_a_weighted_sampler_is_divided(cluster: Cluster) -> None:
    got = printed(
        cluster,
        """
from torch.utils.data import WeightedRandomSampler
torch.manual_seed(rank)
sampler = WeightedRandomSampler([0.0] * 50 + [1.0] * 50, 101)
loader = DataLoader(torch.arange(100), batch_size=8, sampler=sampler)
print(json.dumps(flat(nc.shard(loader))))
""",
    )
    assert sorted(len(part) for part in got.values()) == [50, 51]
    assert min(itertools.chain(*got.values())) >= 50
    whole = printed(cluster, "print(json.dumps(flat(nc.shard(loader))))", targets=("local",))
    assert sorted(whole["local"]) == sorted(itertools.chain(*got.values()))
