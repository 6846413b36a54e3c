"""The report of a run: one page that needs no network, from the magic and from the terminal."""

import contextlib
import html
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import nbformat
import pytest
from nbconvert import HTMLExporter

from notebook_cluster.journal.kept_rounds import MAX_ROUNDS, SHOWN_WAITS, Rounds
from notebook_cluster.journal.records import CommitRecord, Record, VoidRecord
from notebook_cluster.journal.state import Cell, State, cells_of_report
from notebook_cluster.protocol.rounds import Commit, OuterSettings
from notebook_cluster.protocol.state import (
    CellView,
    CheckpointView,
    EventView,
    PeerVersions,
    RoundView,
    RunHistory,
    Series,
)
from notebook_cluster.security import runtime_directory
from notebook_cluster.widgets.report import render_report, write_report
from tests.conftest import wait_until
from tests.fake_cluster import cluster_view, node_view, series_until
from tests.shared_notebook import SharedNotebook, shared_notebook
from tests.test_widgets import ATTACK

TRAIN = """%%on_all
import time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
sync = nc.DiLoCo(model, every=2)
for step in range(8):
    if rank == 1 and step % 2:
        time.sleep(0.2)
    sync.step(loss=1.0 / (1 + step), samples=4)
with sync.global_model():
    nc.report(test_accuracy=0.75)
sync.finish()
sync.checkpoint("half-way")
"""


def history(**changes: object) -> RunHistory:
    """Three rounds for which ``desk`` was waited; ``changes`` replace fields."""
    nodes = ["laptop", "mini", "desk"]
    whole = RunHistory(
        rounds=[
            RoundView(job="model", round=number, time=number * 10.0, members=nodes, bytes_sent=1000 * number,
                      waits={"laptop": 3.2, "mini": 1.0, "desk": 0.0}, state_hash="0123456789abcdef")
            for number in (1, 2, 3)
        ],
        rounds_seen=3,
        checkpoints=[CheckpointView(name="half-way", job="model", round=2, path="/home/ada/half-way", time=20.0)],
        cells=[CellView(id=1, source="import torch", status="error", nodes=dict.fromkeys(nodes, "error"), started=1.0,
                        ended=3.0)],
        cells_seen=1,
        peers=[PeerVersions(peer=name, python="3.12.1", platform="linux x86_64", packages={"torch": version})
               for name, version in (("laptop", "2.9.0"), ("mini", "2.8.0"))],
    )  # fmt: skip
    return msgspec.structs.replace(whole, **changes)


class Page(HTMLParser):
    """Elements, attributes and text of a page."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


class Clusterless:
    """What :func:`write_report` asks of a cluster."""

    def state(self) -> object:
        return cluster_view()

    def series(self) -> list[Series]:
        return []

    def history(self) -> RunHistory:
        return history()


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    state = cluster_view()
    page = Page(render_report(state, series_until(100, state.started), history()))
    assert not {"script", "img", "link", "iframe", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    links = [value or "" for name, value in page.attributes if name == "href"]
    assert links
    assert all(re.match("data:(image/svg\\+xml|text/csv);charset=utf-8,", link) for link in links)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert "url(" not in "".join(page.texts)
    assert "@import" not in "".join(page.texts)


def test_text_of_others_never_becomes_markup() -> None:
    node = node_view(0, ATTACK, peer=ATTACK, device_name=ATTACK, reason=ATTACK, condition="dead", scalars={ATTACK: 1.0})
    state = cluster_view(name=ATTACK, nodes=[node], events=[EventView(time=0.0, level="error", text=ATTACK)])
    series = [Series(node=ATTACK, name="loss", step=[1, 2, 3], time=[1.0, 2.0, 3.0], value=[1.0, 2.0, 3.0])]
    waits = {ATTACK: 0.0, "b": 1.0}
    hostile = history(
        rounds=[RoundView(job=ATTACK, round=1, time=0.0, members=[ATTACK], waits=waits, state_hash=ATTACK)],
        checkpoints=[CheckpointView(name=ATTACK, job=ATTACK, round=1, path=ATTACK, time=0.0)],
        cells=[CellView(id=1, source=ATTACK, status="ok", nodes={ATTACK: ATTACK}, started=0.0, ended=1.0)],
        peers=[PeerVersions(peer=ATTACK, python=ATTACK, platform=ATTACK, packages={ATTACK: ATTACK})],
    )
    page = Page(render_report(state, series, hostile))
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_all_parts_of_a_run_are_there() -> None:
    state = cluster_view()
    page = Page(render_report(state, series_until(100, state.started), history()))
    text = "\n".join(page.texts)
    for part in ("digits", "laptop", "mini", "desk", "NVIDIA RTX 4070", "mean of the nodes", "half-way", "import torch",
                 "model: round 3, 48 MB sent by all nodes, no hash mismatch", "01234567", "2.9.0", "2.8.0",
                 "desk: back after 4.1 s", "Loss", "Memory (GB)", "Rounds, and who was waited for"):  # fmt: skip
        assert part in text, part
    assert page.texts.count("9.6 s") == 1  # desk, three rounds
    assert "9.6 s in 3 rounds" in text


def test_versions_and_cells_that_are_not_right_stand_out() -> None:
    markup = render_report(cluster_view(), [], history())
    for text in ("2.9.0", "2.8.0"):
        assert f"<td class=nbc-odd>{text}</td>" in markup
    assert '<div class="nbc-cell-status nbc-odd">error</div>' in markup
    assert "<td>3.12.1</td>" in markup


def test_a_series_of_nan_and_a_run_of_nothing_give_a_page() -> None:
    nan = Series(node="mini", name="loss", step=[1, 2], time=[1.0, 2.0], value=[math.nan, math.nan])
    empty = RunHistory(rounds=[], rounds_seen=0, checkpoints=[], cells=[], cells_seen=0, peers=[])
    assert "<svg" not in render_report(cluster_view(), [nan], empty)
    bare = cluster_view(nodes=[], peers=[], jobs=[], cell=None, events=[])
    assert "Nothing was measured yet" in render_report(bare, [], empty)


def rows_of(markup: str, title: str) -> list[list[str]]:
    """The cells of the first table below the heading ``title``."""
    table = markup.partition(f"<h2>{title}</h2>")[2].partition("<table")[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    return [[html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)] for row in rows]


def reported(node: str, values: list[float], name: str = "test_accuracy", job: str = "") -> Series:
    """A curve at steps 10, 20, 30 ..."""
    steps = [10 * place for place in range(1, len(values) + 1)]
    return Series(node=node, job=job, name=name, step=steps, time=[float(step) for step in steps], value=values)


def test_what_was_reported_is_told_of_the_global_model_and_of_each_node() -> None:
    nan = math.nan
    series = [reported("", [0.5, 0.97, 0.95], job="model"), reported("mini", [0.25, nan]), reported("desk", [nan])]
    heads, *rows = rows_of(render_report(cluster_view(), series, history()), "Results")
    assert heads == ["number", "of", "last", "lowest", "highest", "points"]
    assert [row[1:] for row in rows] == [
        ["global model", "0.9500 at step 30", "0.5000 at step 10", "0.9700 at step 20", "3"],
        ["mini", "NaN at step 20", "0.2500 at step 10", "0.2500 at step 10", "2"],
        ["desk", "NaN at step 10", "\N{EN DASH}", "\N{EN DASH}", "1"],
    ]
    assert {row[0] for row in rows} == {"test_accuracy"}


def test_results_of_many_nodes_are_folded_behind_those_of_the_global_model() -> None:
    series = [reported("", [0.5], job="model"), *(reported(f"node-{place}", [0.5]) for place in range(40))]
    markup = render_report(cluster_view(), series, history())
    assert [row[1] for row in rows_of(markup, "Results")[1:]] == ["global model"]
    assert '<summary class="nbc-fold">of each node: 40 rows</summary>' in markup


def test_the_settings_of_each_job_are_told() -> None:
    (job,) = cluster_view().jobs
    chosen = msgspec.structs.replace(job, settings={"strategy": "DiLoCo", "outer_lr": "0.7", "codec": "int8", "x": "y"})
    before = msgspec.structs.replace(job, name="of before")
    markup = render_report(cluster_view(jobs=[chosen, before]), [], history())
    assert rows_of(markup, "Settings") == [
        ["", "model", "of before"],
        ["strategy", "DiLoCo", "DiLoCo"],
        ["codec", "int8", "\N{EN DASH}"],
        ["outer learning rate", "0.7", "\N{EN DASH}"],
        ["parameters", "\N{EN DASH}", "1,199,882"],
        ["x", "y", "\N{EN DASH}"],
    ]


def test_bytes_are_counted_one_way() -> None:
    """The record of a commit is written before its nodes have said what they sent for it."""
    markup = render_report(cluster_view(), [], history())
    assert set(re.findall(r"[\d.]+ [kM]?B(?= sent by all nodes)", markup)) == {"48 MB"}
    assert '<div class="nbc-fact-value">48 MB</div><div class="nbc-fact-note">by all nodes</div>' in markup


def test_cells_are_whole_and_long_ones_folded() -> None:
    short, long = "import torch\n\nx = '<b>'", "\n".join(f"line_{number} = {number}" for number in range(40))
    cells = [
        CellView(id=number, source=source, status="ok", nodes={"mini": "ok"}, started=1.0, ended=2.0, more=more)
        for number, (source, more) in enumerate([(short, 0), (long, 0), ("x = 1\u202e", 1234)])
    ]
    markup = render_report(cluster_view(), [], history(cells=cells, cells_seen=3))
    assert '<pre class="nbc-code">import torch\n\nx = &#x27;&lt;b&gt;&#x27;</pre>' in markup
    assert "line_39 = 39</pre></details>" in markup
    assert '<span class="nbc-fold-said">40 lines</span>' in markup
    assert "x = 1 \n… 1,234 characters more</pre>" in markup


def test_the_newest_cells_are_whole_as_far_as_there_is_room() -> None:
    cells = {number: Cell(number, "x" * 40_000, (), True, {}, ()) for number in range(600)}
    views = cells_of_report(State(cells=cells))
    assert (len(views), views[0].id, views[-1].id) == (500, 100, 599)
    assert [len(view.source) + view.more for view in views] == [40_000] * 500
    assert [len(view.source) for view in views[-24:]] == [40_000] * 24
    assert sum(len(view.source) for view in views) < 1_200_000


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("folder", "is a folder: name a file in it, for example"),
        ("there.html", "exists already: --overwrite replaces it"),
        ("notes.txt", "give it a name that ends in .html"),
        ("missing/report.html", "does not exist: make it first"),
    ],
)
def test_a_file_that_must_not_be_written_is_refused_in_one_line(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.html").write_text("mine")
    with pytest.raises((OSError, ValueError), match=error) as raised:
        write_report(Clusterless(), str(tmp_path / name))  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    assert (tmp_path / "there.html").read_text() == "mine"


def test_overwriting_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("mine")
    write_report(Clusterless(), str(tmp_path / "there.html"), overwrite=True)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["there.html"]
    assert (tmp_path / "there.html").read_text().startswith("<!DOCTYPE html>")


# ---- what the coordinator keeps --------------------------------------------------------------------------------


def commit(number: int, wait: float) -> CommitRecord:
    """A record as the journal has it."""
    message = Commit(job="model", round=number, attempt=1, state_hash=f"{number:x}", members=["a", "b"])
    outer = OuterSettings(lr_bits=0, momentum_bits=0)
    return CommitRecord(
        "model", message, [], [], [], "", outer, number, 0, 0, time=float(number), waits={"a": wait, "b": 0.0}
    )


def kept_rounds(records: list[Record]) -> Rounds:
    kept = Rounds()
    for record in records:
        kept.replay(record)
    return kept


def test_of_many_rounds_the_newest_and_the_longest_waits_stay() -> None:
    kept = kept_rounds([commit(number, 9.0 if number == 77 else 0.1) for number in range(1, 3 * MAX_ROUNDS)])
    rounds = kept.rounds
    assert len(rounds) <= MAX_ROUNDS
    assert rounds[-1].round == 3 * MAX_ROUNDS - 1
    assert 77 in [one.round for one in rounds]
    assert [one.round for one in kept.waits("model")] == list(range(3 * MAX_ROUNDS - SHOWN_WAITS, 3 * MAX_ROUNDS))
    assert [one.round for one in kept.waits("model", 8)] == list(range(3 * MAX_ROUNDS - 8, 3 * MAX_ROUNDS))


def test_a_round_that_is_void_is_forgotten() -> None:
    void = VoidRecord("model", 2, "h1", 0)
    assert [one.round for one in kept_rounds([commit(1, 0.1), commit(2, 0.1), void]).rounds] == [1]


# ---- a real cluster --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained() -> Iterator[SharedNotebook]:
    """A notebook whose cluster of two nodes has trained four rounds and saved a checkpoint."""
    with shared_notebook("--local 2") as notebook:
        notebook.works(TRAIN)
        yield notebook


def test_the_coordinator_knows_who_was_waited_for_in_each_round(trained: SharedNotebook) -> None:
    with trained.attach() as cluster:
        told = cluster.history()
        (job,) = cluster.state().jobs
    rounds = [one for one in told.rounds if len(one.waits) > 1]
    assert [one.round for one in told.rounds] == list(range(1, job.round + 1))
    assert rounds[0].waits["local-2"] == 0.0
    assert rounds[0].waits["local"] > 0.1
    assert [wait.round for wait in job.waits] == [one.round for one in rounds]
    assert told.rounds[-1].bytes_sent <= job.bytes_sent


def test_the_magic_lists_the_runs(trained: SharedNotebook) -> None:
    def row() -> list[str]:
        """Of the run that goes on, as it was when the cluster was last looked at, every two seconds."""
        heads, *rows = trained.works("%cluster runs").splitlines()
        assert heads.split() == ["cluster", "started", "job", "strategy", "nodes", "rounds", "final", "loss", "end"]
        return rows[0].split() if rows else []

    wait_until(lambda: row()[3:7] == ["model", "DiLoCo", "2", "4"], 60, lambda: f"four rounds, not {row()}")
    assert row()[0] == "lesson"


def test_the_magic_writes_the_run(trained: SharedNotebook) -> None:
    assert trained.works("%cluster report run.html") == "the report of cluster 'lesson' is in run.html\n"
    page = Page((trained.work / "run.html").read_text())
    text = "\n".join(page.texts)
    for part in ("lesson", "local-2", "half-way", "import time, torch", sys.version.split()[0], "torch", "Loss"):
        assert part in text, part
    settings = dict(rows_of((trained.work / "run.html").read_text(), "Settings")[1:])
    assert [settings[name] for name in ("strategy", "every", "codec", "outer momentum", "nesterov", "parameters")] == [
        "DiLoCo", "2 steps", "float32", "0.9", "yes", "72",
    ]  # fmt: skip
    results = rows_of((trained.work / "run.html").read_text(), "Results")
    assert ["test_accuracy", "global model", "0.7500"] in [[*row[:2], row[2].partition(" at ")[0]] for row in results]
    assert trained.fails("%cluster report run.html") == (
        "UsageError: %cluster report: run.html exists already: --overwrite replaces it"
    )
    assert "is in run.html" in trained.works("%cluster report run.html --overwrite")


def test_the_terminal_writes_it_too(trained: SharedNotebook) -> None:
    command = [str(Path(sys.executable).with_name("notebook-cluster")), "report", "lesson", "here.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=trained.work, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "here.html\n", "")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=trained.work, check=False)
    assert (done.returncode, done.stderr) == (
        1, "notebook-cluster: here.html exists already: --overwrite replaces it\n",
    )  # fmt: skip


def test_load_of_the_devices_reaches_the_cards(trained: SharedNotebook) -> None:
    with trained.attach() as cluster:
        wait_until(lambda: all(node.load is not None for node in cluster.state().nodes), 60, "a load of each device")


def test_a_view_that_comes_later_gets_the_curves_from_the_beginning(trained: SharedNotebook) -> None:
    with trained.attach() as cluster:
        (loss,) = [one for one in cluster.series() if one.name == "loss" and one.node == "local"]
    assert loss.value[0] == 1.0
    assert loss.seen == len(loss.value)


def test_a_panel_that_is_closed_and_opened_again_shows_the_curves_from_the_beginning(trained: SharedNotebook) -> None:
    ask = (
        "import time\nfrom notebook_cluster.client import Cluster\n"
        "from notebook_cluster.widgets import close_panel, panel, show_panel\n"
        "with Cluster.attach('lesson') as seen:\n"
        "    for _ in range(2):\n"
        "        show_panel(seen)\n"
        "        (shown,) = panel._panels\n"
        "        end = time.monotonic() + 60\n"
        "        losses = ()\n"
        "        while not len(losses) and time.monotonic() < end:\n"
        "            time.sleep(0.02)\n"
        "            traces = shown._figure.widget.data if shown._figure else ()\n"
        "            losses = next((one.y for one in traces if one.name == 'local' and one.y is not None), ())\n"
        "        close_panel(seen)\n"
        "        print('first loss', float(losses[0]))"
    )
    assert trained.works(ask).count("first loss 1.0") == 2


WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.parametrize("somebody_can_click", [True, False])
def test_nbconvert_shows_a_panel_as_html_with_its_curves(trained: SharedNotebook, somebody_can_click: bool) -> None:
    cell = trained.kernel.until(trained.kernel.start("%cluster panel", allow_stdin=somebody_can_click))
    (bundle,) = [bundle for bundle in cell.bundles.values() if "text/html" in bundle]
    assert (WIDGET in bundle) is somebody_can_click
    shown = nbformat.v4.new_output("display_data", data=bundle)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%cluster panel", outputs=[shown])])
    markup = HTMLExporter(template_name="lab").from_notebook_node(notebook)[0]
    assert WIDGET not in markup
    page = Page(markup[markup.index('class="nbc-panel"') :])
    assert page.tags.count("svg") == 3
    text = "\n".join(page.texts)
    for part in ("lesson", "local-2", "Loss", "Memory (MB)", "Saved half-way at round 4", "who was waited for"):
        assert part in text, part
    assert "lesson" in bundle["text/plain"]
    assert "▁" in bundle["text/plain"]


def test_a_panel_whose_coordinator_is_killed_becomes_a_picture_that_says_what_to_do(trained: SharedNotebook) -> None:
    cell = trained.kernel.until(trained.kernel.start("%cluster panel", allow_stdin=True))
    (display,) = [key for key, bundle in cell.bundles.items() if WIDGET in bundle]
    with trained.attach() as cluster:
        os.kill(cluster.connection.file.pid, signal.SIGKILL)

    def bundle() -> dict[str, str]:
        with contextlib.suppress(queue.Empty):
            message = trained.kernel.client.get_iopub_msg(timeout=0.1)
            # Of whichever cell: the panel was opened by an earlier one.
            if message["msg_type"] == "update_display_data":
                cell.take(message["msg_type"], message["content"])
        return cell.bundles[display]

    wait_until(lambda: WIDGET not in bundle(), 60, "the picture in place of the panel")
    text = "\n".join(Page(bundle()["text/html"]).texts)
    for part in ("ended at ", "%cluster start lesson brings it back", "local-2", "Saved half-way at round 4"):
        assert part in text, part
    trained.works("%cluster start --no-panel")
    with trained.attach() as cluster:
        assert [job.round for job in cluster.state().jobs] == [4]


def test_after_the_stop_the_magic_writes_the_last_run(trained: SharedNotebook) -> None:
    trained.works("%cluster stop")
    said = trained.works("%cluster report after.html")
    assert re.fullmatch(
        r"the report of the last run of cluster 'lesson' \(ended at \d\d:\d\d:\d\d: stopped\) is in after\.html\n", said
    )
    page = Page((trained.work / "after.html").read_text())
    text = "\n".join(page.texts)
    for part in ("lesson", ": stopped", "local-2", "half-way", "import time, torch", "model: round 4", "Loss",
                 'sync.checkpoint("half-way")', "test_accuracy", "by the number of nodes"):  # fmt: skip
        assert part in text, part
    assert "ended" in page.texts  # the state of both nodes
    assert trained.fails("%cluster status").startswith("UsageError: no cluster is running in this notebook")


def test_of_a_name_that_never_ran_there_is_no_report(trained: SharedNotebook) -> None:
    shutil.rmtree(runtime_directory() / "clusters" / "lesson")
    assert trained.fails("%cluster report none.html") == (
        "ClusterError: no cluster 'lesson' runs on this machine, and none that ended has left a run: %cluster start"
    )


def test_without_a_cluster_the_terminal_says_so(jupyter_dirs: Path) -> None:
    command = [str(Path(sys.executable).with_name("notebook-cluster")), "report", "none", "here.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "notebook-cluster: no cluster 'none' runs on this machine, and none that ended has left a run: %cluster start\n"
    )
