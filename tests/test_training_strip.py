"""The strip under a cell that trains: what it says, when it comes, and that it stays as the cell's last picture."""

import re
from collections.abc import Iterator

import msgspec
import pytest

from notebook_cluster.protocol.runs import run_number
from notebook_cluster.protocol.state import ClusterView, JobView, Series
from notebook_cluster.widgets.curves import Curves
from notebook_cluster.widgets.strip import Training, strip_html, strip_text
from tests.conftest import wait_until
from tests.fake_cluster import cluster_view, node_view
from tests.notebook_kernel import Cell
from tests.shared_notebook import SharedNotebook, listen, shared_notebook

CELL = 7
ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m"


def job_view(**values: object) -> JobView:
    told: dict[str, object] = {
        "name": "digits", "strategy": "DiLoCo", "round": 12, "attempt": 1, "phase": "training",
        "members": ["laptop", "mini"], "bytes_sent": 3_000_000, "bytes_data_parallel": 61_000_000, "cell": CELL,
    }  # fmt: skip
    return JobView(**(told | values))  # type: ignore[arg-type]


def state_of(*jobs: JobView, **of_second: object) -> ClusterView:
    nodes = [
        node_view(0, "laptop", step=1_200, loss=0.5, samples_per_s=900.0, epoch=3, epoch_share=0.45, step_cell=CELL),
        node_view(1, "mini", **({"step": 1_180, "loss": 0.7, "samples_per_s": 600.0, "step_cell": CELL} | of_second)),
    ]
    return cluster_view(nodes=nodes, jobs=list(jobs) or [job_view()])


def training(**values: object) -> Training:
    told: dict[str, object] = {
        "cell": CELL, "status": "running", "nodes": {"laptop": "running", "mini": "running"}, "before": {},
    }  # fmt: skip
    return Training(**(told | values))  # type: ignore[arg-type]


def losses(node: str, *values: float, run: int = run_number(CELL, 0), job: str = "digits") -> Series:
    steps = list(range(1, len(values) + 1))
    return Series(
        node=node, name="loss", step=steps, time=[float(s) for s in steps], value=list(values), job=job, run=run
    )


def test_it_says_round_step_epoch_speed_and_what_was_sent() -> None:
    said = strip_text(training(), state_of(), Curves([losses("laptop", 0.5), losses("mini", 0.9, 0.7)]))
    assert said == (
        "digits · training · Round 12 · Step 1,200 · Loss, mean of the nodes 0.6000 · Samples/s 1,500 · Sent 3.0 MB"
    )
    shown = strip_html(training(), state_of(), Curves())
    assert "epoch 3, 45%" in shown
    assert "data-parallel: 61 MB, 20x as much" in shown
    assert "svg" not in shown  # nothing was measured yet: no empty axes


def test_a_length_that_the_loop_says_stands_for_the_epoch() -> None:
    state = state_of(of_steps=2_000, step=1_300)
    assert "of 2,000" in strip_html(training(), state, Curves())


@pytest.mark.parametrize("odd", [{"of_steps": -5, "epoch": -1}, {"epoch": 10**30, "epoch_share": 7.0, "step": 10**40}])
def test_odd_numbers_of_a_node_are_left_out(odd: dict[str, object]) -> None:
    shown = strip_html(training(), state_of(**odd), Curves())
    assert "-5" not in shown
    assert "000,000,000,000,000" not in shown


def test_what_earlier_cells_sent_is_not_this_cell_s() -> None:
    said = strip_text(training(before={"digits": (2_000_000, 41_000_000)}), state_of(), Curves())
    assert "Sent 1.0 MB" in said
    attached = strip_text(training(before=None), state_of(), Curves())
    assert "Sent in all cells 3.0 MB" in attached


def test_the_loss_of_the_global_model_is_drawn_where_it_is_measured() -> None:
    of_nodes = [losses("laptop", 3.0, 2.0, 1.0), losses("mini", 4.0, 3.0, 2.0)]
    without = strip_html(training(), state_of(), Curves(of_nodes))
    assert "Loss: mean of the nodes' batches" in without.replace("&#x27;", "'")
    measured = [*of_nodes, losses("", 2.5, 1.5)]
    shown = strip_html(training(), state_of(job_view(loss=1.5, loss_round=11)), Curves(measured))
    assert 'aria-label="Loss of the global model, faint: each node"' in shown
    assert "<title>global model</title>" in shown
    assert "Loss of the global model 1.5000" in strip_text(training(), state_of(), Curves(measured))


def test_what_was_measured_in_an_earlier_cell_is_not_this_cell_s() -> None:
    state = state_of(job_view(loss=0.125, loss_round=9), loss=0.25)
    assert "Loss" not in strip_text(training(), state, Curves())


def test_a_node_that_has_failed_counts_no_more() -> None:
    curves = Curves([losses("laptop", 0.5), losses("mini", 9.0)])
    some = training(nodes={"laptop": "running", "mini": "error"})
    assert "Loss, mean of the nodes 0.5000 · Samples/s 900" in strip_text(some, state_of(), curves)
    shown = strip_text(training(nodes={"laptop": "error", "mini": "error"}), state_of(), curves)
    assert "Loss, mean of the nodes 4.7500" in shown


@pytest.mark.parametrize("gone", ["dead", "lost", "asleep", "restarted", "removed"])
def test_a_node_that_is_lost_counts_no_more(gone: str) -> None:
    curves = Curves([losses("laptop", 0.5), losses("mini", 9.0)])
    state = state_of(**({} if gone in ("restarted", "removed") else {"condition": gone}))
    if gone == "removed":
        state = msgspec.structs.replace(state, nodes=state.nodes[:1])
    status = "running" if gone == "asleep" else "lost"
    shown = strip_html(training(nodes={"laptop": "running", "mini": status}), state, curves)
    said = re.sub("<[^>]+>", " ", shown)
    assert re.search(r"Loss, mean of the nodes\s+0\.5000\s+last batches\s+Samples/s\s+900\s+1 node\s", said), said


def test_where_all_nodes_are_lost_their_last_loss_stays_and_no_speed() -> None:
    nodes = [node_view(rank, name, condition="lost") for rank, name in enumerate(("laptop", "mini"))]
    curves = Curves([losses("laptop", 0.5), losses("mini", 0.7)])
    said = strip_text(training(), cluster_view(nodes=nodes, jobs=[job_view()]), curves)
    assert "Loss, mean of the nodes 0.6000" in said
    assert "Samples/s" not in said


def test_a_loss_that_became_nan_is_said() -> None:
    curves = Curves([losses("laptop", 1.0, float("nan")), losses("mini", 1.0, float("nan"))])
    assert "Loss, mean of the nodes NaN" in strip_text(training(), state_of(), curves)


def test_of_many_nodes_one_line_is_drawn() -> None:
    curves = Curves([losses(f"n{index}", 2.0, 1.0) for index in range(12)])
    shown = strip_html(training(), state_of(), curves)
    assert shown.count("<path") == 1
    assert len(shown) < 20_000


def test_where_a_node_was_started_again_no_line_leads_back() -> None:
    again = losses("mini", 3.0, 2.0, 1.0)
    again = msgspec.structs.replace(
        again, step=[*again.step, 1, 2], time=[*again.time, 4.0, 5.0], value=[*again.value, 1.5, 1.0]
    )
    shown = strip_html(training(), state_of(), Curves([losses("laptop", 3.0, 2.0), again]))
    paths = [re.findall(r"[ML]([0-9.]+) ", path) for path in re.findall(r'<path d="([^"]+)"', shown)]
    starts = [path.count("M") for path in re.findall(r'<path d="([^"]+)"', shown)]
    assert sorted(starts) == [1, 1, 2]  # of the laptop, of the mean, and of mini, twice
    (mean,) = [path for path, begun in zip(paths, starts, strict=True) if begun == 1 and len(path) == 3]
    assert [float(x) for x in mean] == sorted(float(x) for x in mean)


def test_the_step_of_a_cell_before_is_not_told() -> None:
    before = {"step": 40, "step_cell": CELL - 1}
    assert "Step 1,200" in strip_text(training(), state_of(step_cell=CELL - 1, step=2_000), Curves())
    stale = cluster_view(nodes=[node_view(0, "laptop", **before), node_view(1, "mini", **before)], jobs=[job_view()])
    assert "Step" not in strip_text(training(), stale, Curves())


def test_a_lost_node_is_named_as_lost_and_text_of_nodes_is_text() -> None:
    nodes = {"laptop": "running", "mini": "running", ATTACK: "lost"}
    state = state_of(job_view(name=ATTACK, strategy=ATTACK, waiting_for=["mini"]), condition="lost")
    shown = strip_html(training(nodes=nodes), state, Curves([losses("laptop", 1.0, job=ATTACK)]))
    assert 'title="mini: lost"' in shown
    assert "round 13 waits for mini" in shown
    assert "<script" not in shown
    assert "onerror=" not in re.sub(r"&lt;.*?&gt;", "", shown)


def test_an_ended_strip_says_how_and_not_as_of_when() -> None:
    ended = training(status="ok", nodes={"laptop": "ok", "mini": "ok"}, ended=83.0)
    shown = strip_html(ended, state_of(), Curves())
    assert "trained after 1 min 23 s" in shown
    assert "as it was at" not in shown
    assert "Samples/s" not in shown
    stopped = training(status="interrupted", ended=2.0)
    assert "stopped after 2.0 s" in strip_text(stopped, state_of(), Curves())


TRAIN = """%%on_all
import threading, torch
def train(go_on=lambda step: step < 40):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = nc.DiLoCo(model, every=4, name='line')
    data = torch.randn(600, 8)
    step = 0
    while go_on(step):
        for (x,) in nc.shard((data,), batch_size=10):
            loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            step += 1
            if sync.step(loss, samples=len(x)):
                with sync.global_model():
                    nc.report(loss=sync.round / 100)
            if not go_on(step):
                break
    sync.finish()
"""
SMALL = "%%on_all\ntrain()"
LONG = "%%on_all\nimport time\ntrain(lambda step: time.sleep(0.01) is None)"


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    with shared_notebook("--local 2") as shared:
        shared.works(TRAIN)
        yield shared


def strips(cell: Cell) -> list[str]:
    return [cell.displays[name] for name in cell.displays if name.startswith("nbc-strip-")]


def of_strip(cell: Cell) -> str:
    return next(cell.bundles[name]["text/html"] for name in cell.bundles if name.startswith("nbc-strip-"))


def test_a_cell_that_trains_has_one_strip_which_ends_with_its_last_numbers(notebook: SharedNotebook) -> None:
    cell = notebook.start(SMALL)
    listen(notebook.kernel, cell, until="trained after")
    (said,) = strips(cell)
    assert re.search(
        r"^line · trained after [\d.]+ s · Round 10 · Step 40 · Loss of the global model 0\.1000 · Sent", said
    )
    shown = of_strip(cell)
    assert "epoch 2, 33%" in shown  # 30 steps of this node's 300 elements are an epoch
    assert shown.count("✓") == 2
    assert "<script" not in shown


def test_a_cell_that_trains_nothing_has_none(notebook: SharedNotebook) -> None:
    cell = notebook.start("%%on_all\nprint('here')")
    notebook.kernel.until(cell)
    assert strips(cell) == []
    assert "strip" not in notebook.works("import threading\nprint([thread.name for thread in threading.enumerate()])")


def listen_until_changed(notebook: SharedNotebook, cell: Cell, before: str) -> None:
    """Until the strip shows something else than ``before`` while the cell runs."""

    def changed() -> bool:
        notebook.kernel.until(cell, "training")
        message = notebook.kernel.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == cell.request:
            cell.take(message["msg_type"], message["content"])
        return strips(cell)[0] != before

    wait_until(changed, 60, "another strip")
    assert not cell.done


def test_it_moves_while_the_cell_runs_and_says_that_it_was_stopped(notebook: SharedNotebook) -> None:
    cell = notebook.start(LONG)
    notebook.kernel.until(cell, "· training · Round")
    assert "Step 40" not in strips(cell)[0]  # of the cell before
    notebook.kernel.until(cell, "Samples/s")
    before = strips(cell)[0]
    listen_until_changed(notebook, cell, before)
    assert "as it was at" in of_strip(cell)
    with notebook.attach() as cluster:
        cluster.interrupt()
    listen(notebook.kernel, cell, until="stopped after")
    assert cell.error is not None


def test_with_nobody_to_see_it_move_it_is_shown_once_at_the_end(notebook: SharedNotebook) -> None:
    cell = notebook.kernel.start(SMALL, allow_stdin=False)
    notebook.kernel.until(cell)
    (said,) = strips(cell)
    assert "trained after" in said


def test_capture_keeps_one(notebook: SharedNotebook) -> None:
    notebook.works(f"%%capture taken\nget_ipython().run_cell_magic('on_all', '', {SMALL.partition(chr(10))[2]!r})")
    assert notebook.value("sum('nbc-strip' in str(one.data.get('text/html', '')) for one in taken.outputs)") == "1"


def test_an_async_cell_has_it_below_its_handle(notebook: SharedNotebook) -> None:
    cell = notebook.start("%%on_all --async\ntrain()")
    listen(notebook.kernel, cell, until="trained after")
    assert len(strips(cell)) == 1
