"""A loop that makes one sync object after the other under one name, as in a search for the best learning rate."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.protocol.views import CellChanged, CellEnded
from tests.cluster import Watcher, kill, mend, run, stop_all, text_of
from tests.conftest import shared_folders, wait_until
from tests.training_cells import SETUP, job

NAMES = ("local", "local-2", "local-3")
TURNS = 20

LOOP = """
def small(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))

def loss_of(model, seed):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x[:, :2].tanh()).square().mean()

def digest(model):
    return state_hash(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy(), np.empty(0, np.float32))

class Averaged:
    "A strategy beside the user's own optimizer."
    def __init__(self, make, **options):
        self.make, self.options = make, options

    def turn(self, name, lr, steps, fresh=True, seed=0):
        model = small(seed + rank)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        sync = self.make(model, name=name, fresh=fresh, **self.options)
        began = sync.round
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, 100 * step + rank)
            loss.backward()
            optimizer.step()
            sync.step(loss=loss, samples=4)
        sync.finish()
        return f"{began}:{sync.round}:{digest(model)}"

class EveryStep(Averaged):
    "One that takes the place of the optimizer."
    def turn(self, name, lr, steps, fresh=True, seed=0):
        model = small(seed + rank)
        sync = self.make(model, lr, name=name, fresh=fresh, **self.options)
        began = sync.round
        for step in range(steps):
            loss = loss_of(model, 100 * step + rank)
            loss.backward()
            sync.step(loss=loss, samples=4)
        sync.finish()
        return f"{began}:{sync.round}:{digest(model)}"

def parallel(model, lr, **options):
    return nc.DataParallel(model, torch.optim.Adam(model.parameters(), lr=lr), **options)

STRATEGIES = {
    "DiLoCo": Averaged(nc.DiLoCo, every=3),
    "streaming": Averaged(nc.DiLoCo, every=4, fragments=2, overlap=1, codec="int8"),
    "LocalSGD": Averaged(nc.LocalSGD, every=3),
    "randomk": Averaged(nc.LocalSGD, every=3, codec="randomk-8"),
    "SparseLoCo": Averaged(nc.SparseLoCo, every=3),
    "DeMo": EveryStep(nc.DeMo),
    "DataParallel": EveryStep(parallel),
    "server": EveryStep(parallel, mode="server"),
    "topk": EveryStep(parallel, codec="topk-8"),
}
LRS = [0.01, 0.03]
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[None]:
    with shared_folders() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            with Cluster.start("sweep", local=3) as cluster:
                run(cluster, SETUP + LOOP)
            yield
        finally:
            stop_all()


@pytest.fixture
def cluster(shared: None) -> Iterator[Cluster]:
    """That of all tests; a view of its own, as a test may kill the coordinator."""
    with Cluster.start("sweep") as cluster:
        yield cluster
    with Cluster.start("sweep") as again:
        mend(again)


def said_by_all(cluster: Cluster, source: str) -> list[str]:
    """The words that every node printed, which must be the same."""
    ended, outputs = cluster.run(source)
    assert ended.status == "ok", (ended, text_of(outputs))
    texts = {text_of([o for o in outputs if o.content.get("name") != "stderr"], name) for name in NAMES}
    assert len(texts) == 1, texts
    return texts.pop().split()


@pytest.mark.parametrize(
    "strategy", ["DiLoCo", "streaming", "LocalSGD", "randomk", "SparseLoCo", "DeMo", "DataParallel", "server", "topk"]
)
def test_each_turn_of_a_fresh_loop_is_a_training_of_its_own(cluster: Cluster, strategy: str) -> None:
    made = f"STRATEGIES[{strategy!r}]"
    alone = [
        said_by_all(cluster, f"print({made}.turn('{strategy}-alone-{index}', LRS[{index}], 7))") for index in (0, 1)
    ]
    said = said_by_all(
        cluster, f"for turn in range({TURNS}): print({made}.turn('{strategy}', LRS[turn % 2], 7), flush=True)"
    )
    assert [row.partition(":")[0] for row in said] == ["0"] * TURNS
    assert said == (alone[0] + alone[1]) * (TURNS // 2)
    assert alone[0] != alone[1]


def test_the_next_turn_may_have_another_shape_codec_and_strategy(cluster: Cluster) -> None:
    said = said_by_all(
        cluster,
        """
for width, make in ((4, nc.DiLoCo), (7, nc.LocalSGD), (5, nc.SparseLoCo)):
    model = nn.Linear(8, width)
    sync = make(model, every=1, name="shapes", fresh=True, **({"codec": "int8"} if make is nc.DiLoCo else {}))
    sync.step(samples=1)
    sync.finish()
    print(sync.round)
""",
    )
    assert said == ["1", "1", "1"]


def test_a_turn_that_is_not_fresh_goes_on_where_the_last_one_has_finished(cluster: Cluster) -> None:
    said = said_by_all(
        cluster, "for turn in range(3): print(STRATEGIES['DiLoCo'].turn('on', 0.01, 6, fresh=False, seed=turn))"
    )
    assert [row.rpartition(":")[0] for row in said] == ["0:2", "2:4", "4:6"]


def test_a_second_object_beside_an_unfinished_one_is_an_error_and_the_cell_run_again_is_not(cluster: Cluster) -> None:
    cell = """
sync = nc.DiLoCo(small(rank), every=1, name="beside")
sync.step(samples=1)
print(sync.round)
"""
    said_by_all(cluster, cell)
    assert said_by_all(cluster, cell) == ["2"]
    ended, outputs = cluster.run(cell + "other = nc.DiLoCo(small(rank), every=1, name='beside', fresh=True)")
    assert {result.error_value for result in ended.results.values()} == {
        "job 'beside' has a sync object in this cell that is not finished: call finish() on it before this one is "
        "made, or give this one another name="
    }, text_of(outputs)


def test_nodes_with_more_turns_than_others_go_on_by_themselves(cluster: Cluster) -> None:
    ended, outputs = cluster.run(
        "for turn in range(2 + rank): print(STRATEGIES['LocalSGD'].turn('unequal', 0.01, 3), flush=True)"
    )
    assert ended.status == "ok", text_of(outputs)
    texts = [text_of(outputs, name).split() for name in NAMES]
    assert [len(rows) for rows in texts] == [2, 3, 4]
    assert all(row.startswith("0:1:") for rows in texts for row in rows)
    assert texts[0] == texts[1][:2] == texts[2][:2]
    assert texts[1][2] == texts[2][2]


def test_a_node_that_left_its_turn_by_an_error_waits_for_the_others_before_the_next(cluster: Cluster) -> None:
    """It catches the error of its own: what it does then is not mixed into what they do."""
    said = said_by_all(
        cluster,
        """
alone = STRATEGIES["DiLoCo"].turn("caught-alone", 0.01, 6)
for turn in range(3):
    try:
        if turn == 1 and rank == 1:
            nc.DiLoCo(nn.Linear(9, 9), every=3, name="caught", fresh=True)  # refused: another model
            print("was not refused")
        else:
            result = STRATEGIES["DiLoCo"].turn("caught", 0.01, 6)
    except RuntimeError:
        result = alone
    if turn != 1:
        print(result == alone)
""",
    )
    assert said == ["True", "True"]


def test_a_node_restarted_in_mid_loop_passes_the_turns_that_are_over_and_takes_part_in_the_next(
    cluster: Cluster,
) -> None:
    cell = """
for turn in range(6):
    print(turn, STRATEGIES["DiLoCo"].turn("restarted", 0.01, 9), nc.node(), flush=True)
    if turn == 2 and nc.node() == "local-3" and not os.path.exists("once"):
        pathlib.Path("once").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if turn == 3:
        pathlib.Path(f"fourth-{nc.node()}").touch()
        while not os.path.exists("fourth-local-3"):
            time.sleep(0.02)
"""
    watcher = Watcher(cluster.execute(cell))
    wait_until(lambda: Path("fourth-local").exists() and Path("fourth-local-2").exists(), 60, "the fourth turn")
    cluster.restart("local-3")
    ended = watcher.wait_end(60)
    assert {name: result.status for name, result in ended.results.items()} == dict.fromkeys(NAMES, "ok")
    rows = {name: [row.split()[:2] for row in watcher.text(name).splitlines() if row[:1].isdigit()] for name in NAMES}
    assert rows["local"] == rows["local-2"]
    results = [result for _, result in rows["local"]]
    assert results[0] == results[1] == results[2] == results[4] == results[5]
    assert rows["local-3"][-2:] == rows["local"][-2:]
    said = watcher.text("local-3")
    assert "[restarted] the other nodes are done with sync object 1 of this cell: here it exchanges nothing" in said
    assert job(cluster, "restarted").hash_mismatches == 0


def test_what_goes_on_is_said_once_for_all_nodes(cluster: Cluster) -> None:
    source = """
print("of its own:", rank)
print(STRATEGIES["DiLoCo"].turn("said", 0.01, 6, fresh=False))
"""
    run(cluster, source)
    line = (
        "training 'said' goes on at round 2: parameters and outer momentum go on; the optimizer, the scheduler and the "
        "data begin anew (fresh=True starts over)"
    )
    stream, notes = cluster.execute(source), list[str]()
    while not isinstance(event := stream.get(60), CellEnded):
        notes += [event.note] if isinstance(event, CellChanged) and event.note else []
        assert event is not None
    assert event.status == "ok"
    assert notes == [line]
    assert [told.text for told in cluster.state().events if "'said' goes on" in told.text] == [line]


def test_a_coordinator_killed_in_mid_loop_and_started_again_changes_no_turn(cluster: Cluster, tmp_path: Path) -> None:
    cell = f"""
folder = pathlib.Path({str(tmp_path)!r})
for turn in range(12):
    print(STRATEGIES["DiLoCo"].turn("killed", LRS[turn % 2], 7), flush=True)
    if turn in (3, 7) and rank == 1:
        (folder / f"turn-{{turn}}").touch()
"""
    number = cluster.execute(cell).cell
    process = cluster.connection.file.pid
    for turn in (3, 7):
        wait_until((tmp_path / f"turn-{turn}").exists, 60, f"turn {turn}")
        kill(process)
        with Cluster.start("sweep") as again:
            assert again.connection.file.pid != process
            process = again.connection.file.pid
    with Cluster.attach("sweep") as last:
        watcher = Watcher(last.watch(number))
        ended = watcher.wait_end(60)
    assert {name: result.status for name, result in ended.results.items()} == dict.fromkeys(NAMES, "ok")
    texts = {watcher.text(name) for name in NAMES}
    assert len(texts) == 1, texts
    rows = texts.pop().split()
    assert rows == rows[:2] * 6
    assert {row.partition(":")[0] for row in rows} == {"0"}
