"""The charts of a report: what is drawn of good and of odd numbers, and how somebody chooses and saves one."""

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote
from xml.etree import ElementTree

import msgspec
import pytest

from notebook_cluster.protocol.state import CellView, ClusterView, EventView, PeerVersions, RoundView, Series
from notebook_cluster.widgets.pictures import Line, LinearAxis, LogAxis, short_labels, spread_out, svg_chart
from notebook_cluster.widgets.report import render_report
from notebook_cluster.widgets.timeline import timeline
from tests.axe import SCRIPT, violations
from tests.browser import CHROMIUM, CHROMIUM_OPTIONS
from tests.conftest import wait_until
from tests.fake_cluster import cluster_view, node_view
from tests.test_report import Page, history, reported
from tests.test_widgets import ATTACK

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as BrowserPage

LONG = "a-machine-of-the-laboratory-at-the-end-of-the-corridor-{:02}-abc"


def loss(node: str, values: Sequence[float], job: str = "model") -> Series:
    steps = list(range(1, len(values) + 1))
    return Series(
        node=node, job=job, run=1001, name="loss", step=steps, time=[100.0 + s for s in steps], value=[*values]
    )


def view(names: Sequence[str]) -> ClusterView:
    nodes = [msgspec.structs.replace(node_view(rank, name), place=rank) for rank, name in enumerate(names)]
    return cluster_view(nodes=nodes, started=100.0)


def saved(markup: str, ending: str) -> list[str]:
    """What the links of a page save in files of this kind."""
    found = re.findall(r'download="[^"]*\.(\w+)"[^>]* href="data:[\w/+]+;charset=utf-8,([^"]*)"', markup)
    return [unquote(data) for kind, data in found if kind == ending]


# ---- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [0.5], [0.0], [-3.0], [2.0] * 30, [5e-324], [5e-324, 1.0], [1e308, -1e308], [1.7e308, 1.0], [1e-320, 2e-320],
        [math.nan, 1.0, math.inf, -math.inf, 2.0], [1e16, 1e16 + 2], [100000.1, 100000.2], [1e-300, 1e300], [-1.0, 0.0],
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("log", [False, True])
def test_whatever_is_measured_no_picture_has_a_number_that_is_none(values: list[float], log: bool) -> None:
    points = [(float(place), value) for place, value in enumerate(values)]
    svg = svg_chart("Loss", "steps", [Line("desk", "#000000", points)], log=log, labels=True)
    assert not re.search(r"\b(nan|inf)\b", svg, re.IGNORECASE)
    if svg:
        places = [float(text) for text in re.findall(r'(?<=[ML ])-?[\d.]+(?=[ hLM"])', svg)]
        assert all(-1 <= place <= 461 for place in places)


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, -math.inf]])
def test_where_nothing_can_be_drawn_there_is_no_picture(values: list[float]) -> None:
    points = [(float(place), value) for place, value in enumerate(values)]
    assert svg_chart("Loss", "steps", [Line("desk", "#000000", points)]) == ""
    markup = render_report(view(["desk"]), [loss("desk", values)], history(rounds=[]))
    assert "<svg" not in markup
    assert "Nothing was measured yet" in markup


def test_a_logarithmic_axis_has_powers_of_ten_and_what_is_not_above_zero_is_a_gap() -> None:
    points = [(1.0, 100.0), (2.0, 0.0), (3.0, 1.0), (4.0, -1.0), (5.0, 0.01)]
    svg = svg_chart("Loss", "steps", [Line("desk", "#000000", points)], log=True)
    (path,) = re.findall(r'<path d="([^"]*)" fill', svg)
    assert path.count("M") == 3
    assert {"0.01", "1", "100"} <= set(re.findall(r">([\d.]+)</text>", svg))
    middle = LogAxis(0.01, 100.0, 0.0, 10.0).place(1.0)
    assert middle == pytest.approx(5.0)


def test_a_constant_and_a_narrow_range_have_ticks_that_differ() -> None:
    for low, high in ((2.0, 2.0), (0.0, 0.0), (1.0, 1.001), (100000.1, 100000.9)):
        axis = LinearAxis(low, high, 0.0, 100.0)
        assert len(axis.ticks()) >= 2
        assert 0.0 <= axis.place(low) <= 100.0
        svg = svg_chart("Loss", "steps", [Line("a", "#000000", [(1.0, low), (2.0, high)])])
        numbers = re.findall(r'text-anchor="end">([^<]*)</text>', svg)[1:]
        assert len(set(numbers)) == len(numbers)
    assert LinearAxis(0.0, 0.0, 0.0, 1.0).ticks()[0] >= 0


def test_labels_keep_apart_and_inside() -> None:
    assert spread_out([5.0, 5.0, 5.0], 0.0, 30.0, 10.0) == [5.0, 15.0, 25.0]
    assert spread_out([29.0, 29.5, 30.0], 0.0, 30.0, 10.0) == [10.0, 20.0, 30.0]
    names = [LONG.format(number) for number in range(14)]
    labels = short_labels([*names, "desk"], 20)
    assert len(set(labels)) == 15
    assert all(len(label) <= 20 for label in labels)
    assert [f"{number:02}" in label for number, label in enumerate(labels[10:14], 10)] == [True] * 4
    assert len(set(short_labels(["x" * 40 + tail for tail in ("a" * 40 + "b", "a" * 40 + "c", "d")], 20))) == 3


# ---- the charts ----------------------------------------------------------------------------------------------------


def test_the_global_model_is_strong_and_nodes_are_smoothed_behind_it() -> None:
    noisy = [2.0 + (-1) ** step for step in range(200)]
    markup = render_report(view(["desk"]), [loss("desk", noisy), loss("", [2.0, 1.5, 1.0])], history())
    picture = markup.partition("nbc-over-steps nbc-linear")[2].partition("</svg>")[0]
    (behind,) = re.findall(r'<path d="([^"]*)"[^>]*stroke-opacity="0.45"', picture)
    heights = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)", behind)]
    assert max(heights[100:]) - min(heights[100:]) < 60  # of 288 pixels, on which the raw loss jumps up and down
    assert picture.index('stroke-opacity="0.45"') < picture.index('stroke-width="2.6"')
    assert "Nodes behind it: an exponential running mean (0.9)" in markup
    assert "mean of the nodes" not in markup


def test_the_points_that_are_saved_are_those_that_were_measured() -> None:
    values = [2.0 + (-1) ** step for step in range(200)]
    markup = render_report(view(["desk"]), [loss("desk", values), loss("", [0.5]), reported("desk", [1.0])], history())
    tables = [list(csv.DictReader(io.StringIO(text))) for text in saved(markup, "csv")]
    losses = next(table for table in tables if len(table) == 201)
    own = [row for row in losses if row["node"] == "desk"]
    assert [float(row["value"]) for row in own] == values
    assert own[0] == {
        "metric": "loss",
        "node": "desk",
        "job": "model",
        "run": "1",
        "step": "1",
        "time": "101.000",
        "value": "3.0",
    }
    rounds = next(table for table in tables if "waited_for" in table[0])
    assert [(row["round"], row["waited_for"], row["wait"]) for row in rounds] == [
        ("1", "desk", "3.2"), ("2", "desk", "3.2"), ("3", "desk", "3.2"),
    ]  # fmt: skip


def test_the_pictures_that_are_saved_are_whole_files() -> None:
    hostile = f"{ATTACK}\ud800\uffff"
    state = view([hostile, "b"])
    series = [loss(hostile, [1.0, 2.0]), loss("b", [1.0, 3.0]), reported(hostile, [1.0], name=hostile)]
    waits = {hostile: 0.0, "b": 1.0}
    rounds = [RoundView(job=hostile, round=1, time=110.0, members=[hostile], waits=waits)]
    markup = render_report(state, series, history(rounds=rounds))
    pictures = saved(markup, "svg")
    assert len(pictures) == 9  # two numbers with two axes each, and the rounds
    for picture in pictures:
        assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"
    assert not {"script", "img"} & set(Page(markup).tags)


def test_of_very_many_points_the_links_save_fewer() -> None:
    series = [loss(f"node-{number}", [1.0 / (1 + step) for step in range(2000)]) for number in range(40)]
    markup = render_report(view([f"node-{number}" for number in range(40)]), series, history())
    assert len(markup) < 9_000_000
    assert 25_000 < saved(markup, "csv")[0].count("\n") <= 50_001


def test_the_timeline_has_a_lane_for_each_node_and_a_bar_for_each_wait() -> None:
    rounds = [
        RoundView(job="model", round=number, time=100.0 + 10 * number, members=["a", "b"],
                  waits={"a": float(number % 2) * 2, "b": 2.0 - float(number % 2) * 2})
        for number in range(1, 8)
    ]  # fmt: skip
    svg, more = timeline(rounds, 100.0, {"a": "#111111", "b": "#222222"})
    assert (more, svg.count('fill="#111111"'), svg.count('fill="#222222"')) == (0, 3, 4)
    assert "<title>model round 7: 2.0 s</title>" in svg
    assert "8.0 s in 4 rounds" in svg
    many = [msgspec.structs.replace(rounds[0], waits={f"n{number}": 0.0, "x": 1.0}) for number in range(40)]
    svg, more = timeline(many, 100.0, {})
    assert (more, svg.count("in 1 round<")) == (16, 24)
    assert timeline([], 0.0, {}) == ("", 0)
    assert timeline([RoundView(job="m", round=1, time=1.0, members=["a"])], 0.0, {}) == ("", 0)
    nan = RoundView(job="m", round=1, time=1.0, members=["a"], waits={"a": math.nan, "b": 0.0})
    assert timeline([nan], 0.0, {}) == ("", 0)


def test_the_name_of_an_earlier_run_is_not_in_bold_and_none_is_longer_than_its_room() -> None:
    earlier = Line("global model, model run 1", "#000000", [(0.0, 1.0)], strong=True, faint=True)
    now = Line("w" * 60, "#000000", [(0.0, 2.0)], strong=True)
    labels = re.findall(r"<text [^>]*>([^<]{15,})</text>", svg_chart("Loss", "steps", [earlier, now], labels=True))
    assert all(len(label) <= 18 for label in labels)
    assert svg_chart("Loss", "steps", [earlier, now], labels=True).count('font-weight="600"') == 1


# ---- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM}: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_OPTIONS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with twelve nodes of long names, several numbers, and a folded cell."""
    names = [LONG.format(number) for number in range(12)]
    state = view([*names[:11], ATTACK])
    state = msgspec.structs.replace(state, events=[EventView(time=100.0, level="error", text=ATTACK)])
    series = [loss(name, [2.0 / (1 + step) for step in range(80)]) for name in names]
    series += [
        loss("", [1.0, 0.5, 0.25]),
        reported("", [0.5, 0.9], job="model"),
        reported(names[0], [-1.0], name=ATTACK),
    ]
    waits = dict.fromkeys(names, 1.0) | {names[3]: 0.0}
    rounds = [
        RoundView(job="model", round=one, time=100.0 + 9 * one, members=names, waits=waits) for one in range(1, 9)
    ]
    cells = [CellView(id=1, source="x = 1\n" * 40 + ATTACK, status="error", nodes={names[0]: "error"})]
    # A table wider than the window.
    peers = [PeerVersions(peer=name, python="3.12.1", platform="linux x86_64", packages={}) for name in names]
    file = tmp_path_factory.mktemp("report") / "run.html"
    file.write_text(render_report(state, series, history(rounds=rounds, cells=cells, peers=peers)))
    return file


def seen(page: "BrowserPage") -> list[str]:
    """Titles of the pictures of a number that are seen."""
    pictures = page.locator(".nbc-views svg")
    return [str(one.get_attribute("aria-label")) for one in pictures.all() if one.is_visible()]


@pytest.mark.skipif(not SCRIPT.exists(), reason="no axe-core: npm ci in labextension/")
@pytest.mark.parametrize(("scheme", "colours"), [("light", "none"), ("dark", "none"), ("dark", "active")])
def test_the_page_is_accessible_and_fits_a_narrow_window(
    browser: "Browser", report: Path, scheme: str, colours: str
) -> None:
    page = browser.new_page(viewport={"width": 900, "height": 800}, color_scheme=scheme, forced_colors=colours)  # type: ignore[arg-type]
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(report.as_uri())
    for fold in page.locator("details").all():
        fold.evaluate("one => one.open = true")
    assert problems == []
    for zoom in (1, 2):
        assert violations(page, ".nbc-panel", zoom) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 900
    wide = page.locator(".nbc-wide").filter(has_text="3.12.1").last
    assert wide.evaluate("one => one.scrollWidth > one.clientWidth")
    wide.focus()
    page.keyboard.press("ArrowRight")
    wait_until(lambda: wide.evaluate("one => one.scrollLeft") > 0, 30, "the table to scroll")
    page.close()


def test_the_keyboard_chooses_what_is_drawn_and_a_link_saves_it(browser: "Browser", report: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(report.as_uri())
    assert seen(page) == ["Loss"]
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert seen(page) == ["test_accuracy"]
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert page.locator(".nbc-view >> visible=true").locator(".nbc-picture.nbc-over-time.nbc-linear").is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.locator(".nbc-view >> visible=true").locator(".nbc-picture.nbc-over-time.nbc-logarithmic").is_visible()
    assert seen(page) == ["Loss"]
    page.keyboard.press("Tab")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "digits-loss-over-time-log.svg"
    ElementTree.fromstring(Path(download.value.path()).read_text())
    page.keyboard.press("Tab")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "digits-loss.csv"
    assert Path(download.value.path()).read_text().startswith("metric,node,job,run,step,time,value\n")
    page.close()
