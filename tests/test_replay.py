"""``%cluster replay``: the page shows of each moment what the panel showed then, and needs nothing but itself."""

import asyncio
import fcntl
import json
import re
import sqlite3
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from benchmarks.journal import write_rounds
from docs import recording
from notebook_cluster.cli import main
from notebook_cluster.client import ClusterError, find_run, read_past_views, read_run, run_name
from notebook_cluster.journal import reading
from notebook_cluster.journal.moments import PastViews
from notebook_cluster.journal.records import CommitRecord, RegisterRecord, SealRecord
from notebook_cluster.journal.store import LOCK_FILE, journal_path
from notebook_cluster.protocol.state import ClusterView, EventView
from notebook_cluster.protocol.views import StateChanged
from notebook_cluster.widgets.model import panel_model
from notebook_cluster.widgets.replay import render_replay, write_replay
from tests.axe import SCRIPT, violations
from tests.browser import CHROMIUM, CHROMIUM_OPTIONS
from tests.cluster import kernel_pid, kill, run, running_cluster
from tests.conftest import shared_folders, wait_until
from tests.fake_cluster import cluster_view, node_view, series_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as BrowserPage

pytest.importorskip("mlx.core")

TRAIN = """
import time
import mlx.core as mx, mlx.nn as nn
model = nn.Linear(4, 1)
sync = nc.LocalSGD(model, every=4, name="digits")
for step in range({steps}):
    time.sleep(0.02)
    sync.step(loss=1 / (step + 1), samples=4)
sync.finish()
nc.report(step=step, accuracy=0.5)
"""
NEVER_IN_A_JOURNAL = ("cpu", "load", "temperature", "threads", "samples_per_s", "waiting", "log_tail")


class Played(NamedTuple):
    """``seen``: what a view was sent while it ran, oldest first."""

    folder: Path
    seen: list[ClusterView]
    past: PastViews
    page: Path


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    """A run with two cells that train, in which a node dies in between, and its page."""
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch:
        (root / "work").mkdir()
        patch.chdir(root / "work")
        seen: list[ClusterView] = []
        with running_cluster("lesson", nodes=2) as cluster:
            cluster.subscribe(lambda event: seen.append(event.state) if isinstance(event, StateChanged) else None)
            run(cluster, TRAIN.format(steps=80))
            kill(kernel_pid(cluster, "local-2"))
            cluster.wait_until(lambda state: any(node.condition == "dead" for node in state.nodes), 60)
            cluster.checkpoint("kept")
            run(cluster, TRAIN.format(steps=40), ("local",))
            assert main(["replay", "lesson", "running.html"]) == 0
            newest = run_name(find_run("lesson"))
            assert main(["replay", newest, "named.html"]) == 0
            cluster.stop()
        assert main(["replay", "lesson", "lesson.html"]) == 0
        folder = find_run("lesson").folder
        yield Played(folder, seen, read_past_views(folder, read_run(folder)), root / "work" / "lesson.html")


def test_each_moment_is_what_a_view_was_sent_then(played: Played) -> None:
    views, whole = played.past
    assert whole
    times = [view.now for view in views]
    assert times == sorted(times)
    compared = 0
    for real in played.seen:
        place = bisect_right(times, real.now) - 1
        if not 0 <= place < len(views) - 1:
            continue
        around = views[place : place + 2]
        compared += 1
        assert real.started == around[0].started
        for what in (_nodes, _cell, _rounds):
            before, then, after = map(what, (around[0], real, around[1]))
            for name in before.keys() | then.keys() | after.keys():
                states = [of.get(name, (-1, -1)) for of in (before, then, after)]
                assert states[0] <= states[1] <= states[2], (name, before, then, after)
    assert compared > 10
    assert max(view.jobs[0].round for view in views if view.jobs) == 30
    assert [node.condition for node in views[-1].nodes] == ["ok", "dead"]


ORDER = ("starting", "replaying", "ok", "dead", "queued", "running")
"""What nodes and cells are here, one after the other."""


def _nodes(view: ClusterView) -> dict[str, tuple[int, int]]:
    return {node.name: (node.incarnation, ORDER.index(node.condition)) for node in view.nodes}


def _cell(view: ClusterView) -> dict[str, tuple[int, int]]:
    if view.cell is None:
        return {}
    return {"cell": (view.cell.id, 9 if view.cell.status == "ok" else ORDER.index(view.cell.status))}


def _rounds(view: ClusterView) -> dict[str, tuple[int, int]]:
    return {job.name: (job.round, 0) for job in view.jobs}


def test_what_nodes_measured_is_that_of_the_end(played: Played) -> None:
    views = played.past.views
    end, before = views[-1], views[-2]
    for real, found in zip(end.nodes, before.nodes, strict=True):
        known = msgspec.structs.asdict(real)
        for name, value in msgspec.structs.asdict(found).items():
            if name in ("device_name", "memory_kind", "memory_total", "last_round", "checkpoint", "place", "peer"):
                assert value == known[name] or (name == "checkpoint" and known[name].startswith(value)), name
        assert found.loss == pytest.approx(real.loss)
        assert found.step == real.step
        assert found.memory_used > 0
    job, known_job = before.jobs[0], end.jobs[0]
    for name in ("name", "strategy", "round", "parameters", "bytes_sent", "bytes_data_parallel", "settings", "waits"):
        assert getattr(job, name) == getattr(known_job, name), name
    unknown = {name for node in before.nodes for name in NEVER_IN_A_JOURNAL if getattr(node, name)} - {"log_tail"}
    assert unknown == set()


@pytest.mark.parametrize("page", ["running", "named"])
def test_a_cluster_that_runs_is_not_called_ended(played: Played, page: str) -> None:
    """However it was named: by itself, or as the newest of the runs that were kept."""
    text = played.page.with_name(f"{page}.html").read_text()
    assert "ended at" not in text
    assert "was killed after" not in text
    assert "ended at" in played.page.read_text()


def test_the_machine_that_has_the_journal_is_named(played: Played, tmp_path: Path) -> None:
    folder = tmp_path / "night"
    folder.mkdir()
    (folder / "head.json").write_text('{"head": "box"}')
    with open(folder / LOCK_FILE, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ClusterError, match="the journal of 'night' is on box, from where it is led"):
            write_replay(folder, str(tmp_path / "night.html"))
    assert not (tmp_path / "night.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lesson", "lesson.html"], "lesson.html exists already: --overwrite replaces it"),
        (["lesson", "lesson.txt"], "give it a name that ends in .html"),
        (["lesson", "nowhere/lesson.html"], "folder nowhere does not exist"),
        (["lessen", "other.html"], "no run of a cluster 'lessen' was kept here: lesson"),
    ],
)
def test_what_cannot_be_is_said(
    played: Played, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) != 0
    assert said in capsys.readouterr().err


def test_a_journal_that_does_not_reach_back_is_played_from_where_it_does(played: Played, tmp_path: Path) -> None:
    for file in played.folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = read_past_views(played.folder, read_run(played.folder))
    with sqlite3.connect(journal_path(tmp_path)) as connection:
        (middle,) = connection.execute("SELECT id FROM events ORDER BY id LIMIT 1 OFFSET 12").fetchone()
        state = _state_after(connection, middle)
        body = json.dumps({"state": state, "kept": [], "shown": [], "seen": 0})
        connection.execute("INSERT INTO snapshots VALUES (?, ?)", (middle, body.encode()))
        connection.execute("DELETE FROM events WHERE id <= ?", (middle,))
    past = read_past_views(tmp_path, read_run(tmp_path))
    assert not past.whole
    assert past.views[0].now > whole.views[0].now
    assert [msgspec.structs.replace(view, now=0.0) for view in past.views[-1:]] == [
        msgspec.structs.replace(view, now=0.0) for view in whole.views[-1:]
    ]
    assert _rounds(past.views[-2]) == _rounds(whole.views[-2])
    assert "does not reach back to the start of this run" in render_replay(past, [])


def test_of_a_long_run_some_rounds_are_read_the_last_among_them(
    played: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in played.folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    asyncio.run(write_rounds(tmp_path, 3000))
    monkeypatch.setattr(reading, "MOST_COMMITS", 100)
    noted = reading.read_history(journal_path(tmp_path)).rounds
    commits = [one.record for one in noted if isinstance(one.record, CommitRecord)]
    assert not [one for one in noted if isinstance(one.record, SealRecord)]
    assert 50 < len(commits) <= 101
    assert (commits[-1].job, commits[-1].commit.round, commits[-1].bytes_sent) == ("model", 3000, 4096 * 3000)
    assert max(one.commit.round for one in commits if one.job == "digits") == 30  # of each job the last one
    assert {one.record.job for one in noted if isinstance(one.record, RegisterRecord)} == {"digits", "model"}
    assert read_past_views(tmp_path, read_run(tmp_path)).views[-1] == played.past.views[-1]


def _state_after(connection: sqlite3.Connection, row: int) -> Any:
    from notebook_cluster.journal.events import Event
    from notebook_cluster.journal.state import State, apply

    state = State()
    for (body,) in connection.execute("SELECT body FROM events WHERE id <= ? ORDER BY id", (row,)):
        state = apply(state, msgspec.json.decode(body, type=Event))
    return json.loads(msgspec.json.encode(state))


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: apt-get install chromium")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_OPTIONS)
        yield browser
        browser.close()


def opened(browser: "Browser", file: Path, problems: list[str], **options: Any) -> "BrowserPage":
    """The page without a network; ``problems`` gets errors and whatever it asks for."""
    page = browser.new_context(offline=True, viewport={"width": 1100, "height": 900}, **options).new_page()
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: None if request.url == file.as_uri() else problems.append(request.url))
    page.goto(file.as_uri())
    return page


def go_to(page: "BrowserPage", place: int) -> None:
    move = "(bar, at) => { bar.value = at; bar.dispatchEvent(new Event('input')); }"
    page.locator("#slider").evaluate(move, place)


@pytest.mark.browser
def test_the_page_plays_the_run_without_a_network_and_ends_as_the_panel_did(
    browser: "Browser", played: Played, tmp_path: Path
) -> None:
    problems: list[str] = []
    page = opened(browser, played.page, problems)
    panel = page.locator("#panel .nbc-panel")
    assert panel.locator(".nbc-pill").first.text_content() == "no nodes yet"
    assert panel.locator(".nbc-empty").inner_text().strip() == "No nodes yet.", "nothing can be added here"
    page.locator("#speed").select_option("16")
    page.locator("#play").click()
    wait_until(lambda: page.locator("#play").text_content() == "Again", 60, "the run to be over")
    end = read_run(played.folder)
    model = panel_model(end.view, end.ended)
    assert panel.locator(".nbc-fact-value").all_text_contents() == [fact["value"] for fact in model["facts"]]
    assert [one for one in panel.locator(".nbc-node .nbc-number").all_text_contents() if one] == [
        node[name] for node in model["nodes"] for name in ("step", "loss", "round", "wait")
    ]
    assert page.locator("#curves svg").count() > 0
    # The panel itself, which was told nothing but the last state.
    alone = tmp_path / "alone.html"
    past = PastViews(played.past.views[-1:], True)
    alone.write_text(render_replay(past, end.curves, end.ended))
    other = opened(browser, alone, problems)
    read = "one => one.outerHTML"
    assert panel.evaluate(read) == other.locator("#panel .nbc-panel").evaluate(read)
    # Back, and to a moment in the middle: as if it had been played to there.
    go_to(page, 0)
    assert panel.locator(".nbc-pill").first.text_content() == "no nodes yet"
    dead = next(
        place for place, view in enumerate(played.past.views) if any(node.condition == "dead" for node in view.nodes)
    )
    go_to(page, dead)
    assert panel.locator(".nbc-node").nth(1).locator(".nbc-pill").text_content() == "dead"
    assert panel.locator(".nbc-button >> visible=true").count() == 0
    assert page.locator("#play").text_content() == "Play"
    # The same picture, each alone in its window, which is then drawn from nothing: at a broken pixel letters differ.
    go_to(page, len(played.past.views) - 1)
    pictures = []
    for one in (page, other):
        one.locator("#panel .nbc-panel").evaluate("panel => document.body.replaceChildren(panel)")
        one.set_viewport_size({"width": 1000, "height": 800})
        pictures.append(one.locator(".nbc-panel").screenshot(animations="disabled"))
    assert pictures[0] == pictures[1]
    assert problems == []


@pytest.mark.browser
@pytest.mark.skipif(not SCRIPT.exists(), reason="no axe-core: npm ci in labextension/")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible_and_fits_a_narrow_window(browser: "Browser", played: Played, scheme: str) -> None:
    problems: list[str] = []
    page = opened(browser, played.page, problems, color_scheme=scheme)
    page.set_viewport_size({"width": 700, "height": 800})
    go_to(page, len(played.past.views) // 2)
    assert violations(page, "main") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 700
    page.locator("#slider").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#slider").input_value() == str(len(played.past.views) // 2 + 1)
    assert problems == []


@pytest.mark.browser
def test_the_run_that_the_site_has_is_played(browser: "Browser", tmp_path: Path) -> None:
    found = recording.read()
    file = tmp_path / "site.html"
    file.write_text(render_replay(PastViews(found.views, True), found.series, found.ended))
    problems: list[str] = []
    page = opened(browser, file, problems)
    go_to(page, len(found.views) - 1)
    model = panel_model(found.views[-1], found.ended)
    assert page.locator("#panel .nbc-node .nbc-node-name").all_text_contents() == [
        one["name"] for one in model["nodes"]
    ]
    assert len(model["nodes"]) == 3
    assert page.locator("#curves svg").count() == 3
    assert problems == []


@pytest.mark.browser
def test_what_nodes_and_cells_say_stays_text(browser: "Browser", tmp_path: Path) -> None:
    attack = '</script><img src=x onerror="document.title=1"><script>document.title=2</script>'
    states = [
        cluster_view(nodes=[node_view(0, "mini", step, reason=attack)], events=[EventView(100.0, "error", attack)])
        for step in (1, 2)
    ]
    file = tmp_path / "attack.html"
    file.write_text(render_replay(PastViews(states, True), series_until(120, states[0].started)))
    problems: list[str] = []
    page = opened(browser, file, problems)
    go_to(page, 1)
    assert attack in str(page.locator("#panel .nbc-event-text").first.text_content())
    assert page.locator("img").count() == 0
    assert re.match(r"[\w-]+: ", page.title())
    assert problems == []
