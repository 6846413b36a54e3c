"""The renderers of a ClusterView, and the data behind the panel."""

import math
import queue
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bs4
import msgspec
import pytest

from notebook_cluster.magics.display.folding import framed
from notebook_cluster.magics.execution.handle_view import running_html
from notebook_cluster.protocol.clock import ABSENT
from notebook_cluster.protocol.state import CellView, ClusterView, EventView, RoundWait, RunHistory, Series
from notebook_cluster.protocol.thinning import MAX_POINTS, ThinnedCurve
from notebook_cluster.protocol.views import Finding
from notebook_cluster.widgets import render_findings, render_html, render_peers, render_text
from notebook_cluster.widgets.actions import Actions
from notebook_cluster.widgets.curves import CurveChoice, Curves, smoothed
from notebook_cluster.widgets.formatting import (
    GLOBAL,
    NO_PLACE,
    PALETTE,
    byte_count,
    node_colour,
    node_colours,
    number,
    plain,
)
from notebook_cluster.widgets.model import panel_model, peer_row
from notebook_cluster.widgets.pictures import Line, svg_chart, thin
from notebook_cluster.widgets.report import render_report
from notebook_cluster.widgets.static_html import charts, page, style
from notebook_cluster.widgets.subshell import Pace
from notebook_cluster.widgets.text import sparkline
from tests.fake_cluster import cluster_view, node_view, peer_view, series_until

NO_HISTORY = RunHistory(rounds=[], rounds_seen=0, checkpoints=[], cells=[], cells_seen=0, peers=[])
ATTACK = '"><img src=x onerror=alert(1)><script>alert(2)</script>'


class Tags(HTMLParser):
    """The elements and attributes of a piece of HTML, and whether every element is closed in order."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.attributes: list[str] = []
        self.open: list[str] = []
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def assert_style_is_whole(markup: str) -> None:
    """A rule that the page leaves out would have applied to nothing in it."""
    kept = markup.split("<style>")[1].split("</style>")[0]
    tree = bs4.BeautifulSoup(markup, "html.parser")
    assert kept
    left_out = style()
    for rule in re.findall(r"[^{}]+\{(?:[^{}]|\{[^{}]*\})*\}", kept):
        assert rule in left_out
        left_out = left_out.replace(rule, "", 1)
    selectors = re.findall(r"([^{}]+)\{", re.sub(r"@[^{]*\{", "", left_out))
    assert selectors
    assert [one for one in selectors if tree.select(re.sub(r":(hover|focus-visible|disabled)", "", one))] == []


def assert_harmless(markup: str) -> None:
    tags = Tags(markup)
    assert not {"img", "script", "iframe", "object", "link", "a"} & set(tags.found)
    assert not [name for name in tags.attributes if name.startswith("on") or name in ("src", "href", "srcdoc")]
    assert tags.open == []


def test_html_never_turns_text_of_a_node_into_markup() -> None:
    node = node_view(0, ATTACK, peer=ATTACK, device_name=ATTACK, reason=ATTACK, condition="dead", log_tail=[ATTACK],
                     waiting=ATTACK, checkpoint=ATTACK, scalars={ATTACK: 1.0})  # fmt: skip
    peer = peer_view(ATTACK, device=ATTACK, address=ATTACK, reason=ATTACK, trusted=False, condition="untrusted")
    state = cluster_view(nodes=[node], peers=[peer], events=[EventView(time=0, level="error", text=ATTACK)])
    curve = Series(node=ATTACK, name="loss", step=[1, 2], time=[1.0, 2.0], value=[3.0, 2.0])
    assert_harmless(render_html(state, [curve]))
    assert_harmless(render_peers([peer], html=True))
    assert "&lt;img src=x onerror" in render_html(state, [curve])


def test_html_of_an_ordinary_cluster_is_well_formed_and_has_its_curves() -> None:
    state = cluster_view()
    markup = render_html(state, series_until(120, state.started))
    assert_harmless(markup)
    assert markup.count("<svg") == 3
    assert markup.count("<path") == 9
    assert all(word in markup for word in ("laptop", "mini", "desk", "attic", "NVIDIA RTX 4070", "12 GB"))


def test_html_loads_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?://|@import|url\(", render_html(cluster_view()))


@pytest.mark.parametrize("nodes", [0, 2, 9])
@pytest.mark.parametrize("as_class", [False, True])
def test_saved_html_has_what_applies_to_it_of_the_style(nodes: int, as_class: bool) -> None:
    views = [node_view(number, f"node-{number}") for number in range(nodes)]
    state = cluster_view(nodes=views, peers=[peer_view("mini")])
    assert_style_is_whole(render_html(state, series_until(120, state.started), as_class=as_class))


def test_text_has_a_line_for_each_node_and_no_control_characters() -> None:
    state = cluster_view(nodes=[node_view(0, "laptop", reason="\x1b[31mred\x1b[0m\r\x07", condition="lost")])
    text = render_text(state, series_until(120, state.started))
    assert re.search(r"^ +0  laptop .*lost: red", text, re.MULTILINE)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


def test_columns_of_the_text_are_aligned() -> None:
    lines = render_text(cluster_view()).splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("rank"))
    ends = {line.index(" MB") if " MB" in line else line.index(" GB of") for line in lines[header + 1 : header + 4]}
    assert len(ends) == 1


def test_a_cluster_without_nodes_is_shown() -> None:
    state = cluster_view(nodes=[], peers=[], jobs=[], cell=None, events=[])
    assert "No nodes yet" in render_html(state)
    assert "no nodes yet" in render_text(state)


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "NaN"), (math.inf, "∞"), (-math.inf, "-∞")])
def test_a_loss_that_is_not_finite_is_named(value: float, shown: str) -> None:
    state = cluster_view(nodes=[node_view(0, "laptop", loss=value)])
    curve = Series(node="laptop", name="loss", step=[1, 2, 3], time=[1.0, 2.0, 3.0], value=[2.0, value, 1.0])
    assert shown in render_text(state, [curve])
    markup = render_html(state, [curve])
    assert shown in markup
    assert "nan" not in re.findall(r' d="([^"]*)"', markup)[0]


def test_the_model_of_a_state_is_plain_json() -> None:
    import json

    state = cluster_view(nodes=[node_view(0, "laptop", loss=math.nan, memory_total=0, scalars={"accuracy": math.inf})])
    json.dumps(panel_model(state), allow_nan=False)


@pytest.mark.parametrize(
    ("changes", "blocked"),
    [
        ({}, ""),
        ({"condition": "lost"}, "nothing is heard from it"),
        ({"condition": "lost", "reason": "it is not shared any more"}, "it is not shared any more"),
        ({"condition": "connected"}, "already in the cluster"),
        ({"condition": "untrusted", "trusted": False, "reason": "foreign key"}, "foreign key"),
        ({"condition": "refused", "reason": "speaks protocol 2"}, "speaks protocol 2"),
        ({"condition": "asleep"}, "asleep: its nodes come back when it wakes"),
        (
            {"condition": "untrusted", "trusted": False},
            "not trusted: run notebook-cluster share there, it shows a code",
        ),
    ],
)
def test_a_peer_says_why_it_cannot_be_added(changes: dict[str, Any], blocked: str) -> None:
    peer = peer_view("attic", **changes)
    assert peer_row(peer)["blocked"] == blocked
    assert (f"no: {blocked}" if blocked else "yes") in render_peers([peer])


def test_an_untrusted_peer_with_an_open_code_can_be_added_with_it() -> None:
    peer = peer_view("library", condition="untrusted", trusted=False, pairing=True, reason="not paired yet")
    assert peer_row(peer)["blocked"] == ""
    assert peer_row(peer)["needs_code"]
    assert "with its --code" in render_peers([peer])
    assert "can be added with its code" in render_peers([peer], html=True)


def test_of_two_peers_with_one_name_each_is_added_by_its_address() -> None:
    twins = [peer_view("mini", address="10.0.0.2:5000"), peer_view("mini", address="10.0.0.3:5000"), peer_view("attic")]
    rows = panel_model(cluster_view(peers=twins))["peers"]
    assert [row["target"] for row in rows] == ["10.0.0.2:5000", "10.0.0.3:5000", "attic"]


@pytest.mark.parametrize("found_by", ["mdns", "typed", "local", "remembered", "dialled"])
def test_every_way_to_find_a_peer_has_its_words(found_by: str) -> None:
    assert peer_row(peer_view("attic", found_by=found_by))["found"]


def test_round_trip_jitter_and_sleep_are_shown() -> None:
    peer = peer_view("attic", round_trip_ms=1.84, jitter_ms=0.42, slept=720.0)
    assert "1.8 ms ± 0.4 ms · slept 12 min 00 s" in render_peers([peer])
    assert "34 ms ± 12 ms" in render_peers([peer_view("attic", round_trip_ms=34.2, jitter_ms=12.1)])


def test_a_node_asleep_is_not_down() -> None:
    model = panel_model(cluster_view(nodes=[node_view(0, "laptop", condition="asleep")], cell=None))
    assert (model["status"], model["level"]) == ("laptop is asleep", "asleep")
    assert model["nodes"][0]["condition"] == "asleep"


def test_an_invitation_is_a_command_and_its_qr_code_and_not_in_what_is_saved() -> None:
    state = cluster_view(invitation="192.168.1.7:41733 tiger-lamp-42")
    invited = panel_model(state)["invitation"]
    assert invited["command"] == "notebook-cluster share --dial 192.168.1.7:41733 --code tiger-lamp-42"
    assert invited["qr"].startswith("data:image/svg+xml")
    assert invited["command"] in render_text(state)
    assert "tiger-lamp-42" not in render_html(state)
    assert panel_model(cluster_view())["invitation"] is None
    assert panel_model(state, "ended")["invitation"] is None


def findings() -> list[Finding]:
    return [
        Finding(subject="clock", level="ok", text="the clocks agree"),
        Finding(
            subject="versions", level="warning", text="numpy differs", fix="%%on mini\n%pip install numpy==2.4.1",
            table=[["package", "local", "mini"], ["numpy", "2.4.1", "2.3.0"]],
        ),
        Finding(subject="port", level="error", text="desk cannot be reached"),
    ]  # fmt: skip


def test_findings_come_worst_first_with_table_and_fix() -> None:
    lines = render_findings(findings()).splitlines()
    assert lines[0] == "doctor: 1 error, 1 warning, 1 check well"
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == ["error", "warning", "ok"]
    assert [line.split() for line in lines[3:5]] == [["package", "local", "mini"], ["numpy", "2.4.1", "2.3.0"]]
    assert [line.strip() for line in lines[5:7]] == ["fix: %%on mini", "%pip install numpy==2.4.1"]


def test_findings_as_html_have_the_fix_to_copy_and_nothing_of_a_peer_becomes_markup() -> None:
    markup = render_findings(findings(), html=True)
    assert '<pre class="nbc-fix nbc-code">%%on mini\n%pip install numpy==2.4.1</pre>' in markup
    assert "<td>2.3.0</td>" in markup
    hostile = Finding(subject=ATTACK, level="info", text=ATTACK, fix=ATTACK, table=[[ATTACK], [ATTACK, "\x1b[31m"]])
    assert_harmless(render_findings([hostile], html=True))
    assert "\x1b" not in render_findings([hostile])


def test_no_finding_at_all_is_said() -> None:
    assert render_findings([]) == "doctor: nothing to say"


def test_no_peers_says_what_to_do() -> None:
    assert "notebook-cluster share" in render_peers([])
    assert "notebook-cluster share" in render_peers([], html=True)


def test_numbers_are_written_for_people() -> None:
    assert [byte_count(n) for n in (0, 999, 1000, 999_600, 1.23e9, 48e9)] == [
        "0 B", "999 B", "1.0 kB", "1.0 MB", "1.2 GB", "48 GB",
    ]  # fmt: skip
    assert [number(n) for n in (0.0, 0.12345, 12.3456, 1e-7)] == ["0", "0.1235", "12.346", "1.000e-07"]


def test_text_from_elsewhere_is_one_line_without_escapes_or_direction_marks() -> None:
    assert plain("a\x1b]0;x\x07\n\u202eb") == "a b"
    assert plain("x" * 300, 10) == "x" * 9 + "…"


def test_thinning_keeps_ends_and_spikes_within_the_limit() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[5432] = (5432.0, 99.0)
    thinned = thin(points, 300)
    assert len(thinned) <= 300
    assert thinned[0] == points[0]
    assert thinned[-1] == points[-1]
    assert (5432.0, 99.0) in thinned
    assert thinned == sorted(thinned)


def test_a_curve_stays_bounded_however_long_the_run() -> None:
    curve = ThinnedCurve()
    for start in range(0, 20_000, 100):
        steps = list(range(start, start + 100))
        values = [99.0 if step == 5432 else 0.5 for step in steps]
        curve.extend(steps, [float(step) for step in steps], values)
    assert len(curve.value) <= MAX_POINTS
    assert curve.step[0] == 0
    assert curve.step[-1] == 19_999
    assert list(curve.step) == sorted(set(curve.step))
    assert 99.0 in curve.value


def test_a_history_that_was_thinned_before_keeps_its_share_of_the_curve() -> None:
    curve = ThinnedCurve()
    curve.extend(list(range(0, 100_000, 100)), [float(s) for s in range(0, 100_000, 100)], [0.5] * 1000, seen=100_000)
    for step in range(100_000, 110_000):
        curve.add(step, float(step), 0.5)
    early = sum(step < 100_000 for step in curve.step)
    assert early > 300
    assert max(b - a for a, b in zip(curve.step, curve.step[1:], strict=False)) < 1000


def test_a_gap_stays_in_a_thinned_curve() -> None:
    curve = ThinnedCurve()
    for step in range(10_000):
        curve.add(step, float(step), math.nan if 4000 <= step < 4100 else 1.0)
    assert any(math.isnan(value) for value in curve.value)


def test_points_that_the_history_held_are_not_drawn_twice() -> None:
    first = Series(node="mini", name="loss", step=[1, 2], time=[1.0, 2.0], value=[3.0, 2.5])
    again = Series(node="mini", name="loss", step=[2, 3], time=[2.0, 3.0], value=[2.5, 2.0])
    curves = Curves([first])
    curves.add_new([again])
    assert list(curves.get("mini", "loss").step) == [1, 2, 3]


def test_a_second_run_begins_a_new_line() -> None:
    curves = Curves([Series(node="mini", name="loss", step=[1, 2, 1], time=[1.0, 2.0, 3.0], value=[3.0, 2.0, 3.0])])
    assert [step for step, value in curves.get("mini", "loss").by_step() if math.isnan(value)] == [1]


def test_a_chart_of_one_point_or_of_none_is_drawn() -> None:
    assert "M" in svg_chart("Loss", "steps", [Line("mini", "#112233", [(1.0, 0.0)])])
    assert svg_chart("Loss", "steps", [Line("mini", "#112233", [(1.0, math.nan)])]) == ""
    assert sparkline([2.0, math.nan, 1.0]) == "█▁"


def test_pace_sends_at_most_once_an_interval_and_never_loses_the_last() -> None:
    pace = Pace(0.5)
    taken = []
    for tick in range(100):
        now = 100 + tick / 100
        pace.ask()
        taken += [now] if pace.take(now) else []
    assert taken == [100.0, 100.5]
    assert pace.wait(100.99) == pytest.approx(0.01)
    assert pace.take(101.0)
    assert pace.wait(101.1) is None


def test_a_message_that_names_no_action_is_answered_and_not_done() -> None:
    actions = Actions(SimpleNamespace(), lambda call: call())  # type: ignore[arg-type]
    for message in (None, [], {"action": "__class__", "id": "1"}, {"action": "add", "target": "", "id": "2"}):
        actions.ask(message)
    assert {answer["status"] for answer in actions.answers()} == {"failed"}


def test_a_typed_code_goes_to_the_cluster_and_into_no_answer() -> None:
    calls: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def add(peer: str, *, code: str) -> list[str]:
        calls.put((peer, code))
        raise RuntimeError("wrong code, 4 tries are left")

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    actions = Actions(SimpleNamespace(add=add), ended.put)  # type: ignore[arg-type]
    actions.ask({"action": "add", "target": "library", "id": "1", "code": "tiger-lamp-42"})
    assert "tiger" not in str(actions.answers())
    ended.get(timeout=60)()
    assert calls.get(timeout=60) == ("library", "tiger-lamp-42")
    assert actions.answers() == [{"id": "1", "text": "wrong code, 4 tries are left", "status": "failed"}]


def test_a_click_has_the_cluster_led_from_elsewhere_and_from_here_again() -> None:
    def hand_over(to: str) -> str:
        if to == "book":
            raise RuntimeError("mini cannot reach book")
        return "" if to == "local" else to

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    actions = Actions(SimpleNamespace(hand_over=hand_over), ended.put)  # type: ignore[arg-type]
    for place, peer in enumerate(("mini", "local", "book")):
        actions.ask({"action": "hand_over", "target": peer, "id": str(place)})
        ended.get(timeout=60)()
    assert [(answer["text"], answer["status"]) for answer in actions.answers()] == [
        ("The cluster is led from mini now", "done"),
        ("The cluster is led from this machine now", "done"),
        ("mini cannot reach book", "failed"),
    ]


def test_the_figure_shows_each_node_in_its_colour_with_a_bounded_number_of_points() -> None:
    from notebook_cluster.widgets.figure import POINTS_PER_CURVE, CurvesFigure

    figure = CurvesFigure()
    curves = Curves(series_until(1400, 0.0))
    colours = {"laptop": PALETTE[0], "mini": PALETTE[1], "desk": PALETTE[2]}
    assert figure.draw(curves, colours, 0.0) is True
    assert figure.draw(curves, colours, 0.0) is False
    loss, over_time, memory = (figure.widget.data[place::3] for place in range(3))
    assert over_time[0].y[-1] == loss[0].y[-1]
    assert over_time[0].x[-1] == 140.0  # step 1400, in seconds
    assert [trace.name for trace in loss] == ["laptop", "mini", "desk"]
    assert [trace.line.color for trace in loss] == [trace.line.color for trace in memory]
    assert [trace.line.color for trace in loss] == list(PALETTE[:3])
    assert all(0 < len(trace.x) <= POINTS_PER_CURVE for trace in figure.widget.data)
    assert max(memory[0].y) < 10  # in GB


def test_a_node_keeps_its_colour_when_others_go_and_has_not_that_of_the_global_model() -> None:
    assert GLOBAL not in PALETTE
    assert len(set(PALETTE)) == len(PALETTE)
    sidebar = Path(__file__).parents[1] / "labextension" / "src" / "sidebar" / "palette.ts"
    assert re.findall(r"^  '(#\w{6})'", sidebar.read_text(), re.MULTILINE) == list(PALETTE)
    nodes = [node_view(0, "laptop", place=0), node_view(1, "mini", place=1), node_view(2, "desk", place=2)]
    fewer = [nodes[0], msgspec.structs.replace(nodes[2], rank=1), msgspec.structs.replace(nodes[1], rank=None)]
    assert node_colours(fewer) == node_colours(nodes) == dict(zip(["laptop", "mini", "desk"], PALETTE, strict=False))
    assert node_colour(node_view(1, "kept before", place=None)) == PALETTE[1]


def test_what_nodes_reported_is_drawn_in_place_of_the_loss_on_a_logarithmic_axis() -> None:
    from notebook_cluster.widgets.figure import CurvesFigure

    steps = list(range(900))
    values = {"accuracy <b>": [0.5 + 0.4 * (step % 2) for step in steps], "memory": [1e9] * 900}
    times = [float(step) for step in steps]
    told = [Series(node="mini", name=name, step=steps, time=times, value=value) for name, value in values.items()]
    curves = Curves([Series(node="desk", name="loss", step=[1], time=[1.0], value=[2.0]), *told])
    assert curves.metrics() == ["loss", "accuracy <b>"]
    figure = CurvesFigure()
    figure.draw(curves, {}, 0.0, CurveChoice("accuracy <b>", log=True))
    by_node = {trace.name: trace for trace in figure.widget.data[::3]}
    assert (len(by_node["desk"].x), len(by_node["mini"].x)) == (0, 300)
    assert max(by_node["mini"].y[100:]) - min(by_node["mini"].y[100:]) < 0.05  # it jumps by 0.4
    layout = figure.widget.layout
    assert (layout.yaxis.type, layout.yaxis2.type, layout.yaxis3.type) == ("log", "log", "linear")
    assert [title.text for title in layout.annotations] == [
        "accuracy  b <br>over steps", "accuracy  b <br>over time", "Memory (GB)",
    ]  # fmt: skip
    assert [axis.ticksuffix for axis in (layout.xaxis, layout.xaxis2, layout.xaxis3)] == ["", " min", " min"]
    figure.draw(curves, {}, 0.0)
    assert (len(by_node["desk"].x), len(by_node["mini"].x), layout.yaxis.type) == (1, 0, "linear")


def test_of_the_nodes_in_a_chart_all_curves_are_running_means_or_none() -> None:
    from notebook_cluster.widgets.figure import CurvesFigure

    def jumping(node: str, count: int) -> Series:
        steps = list(range(count))
        values = [float(step % 2) for step in steps]
        return Series(node=node, name="loss", step=steps, time=[float(step) for step in steps], value=values, job="m")

    def highest(*series: Series) -> list[float]:
        figure, choice = CurvesFigure(), CurveChoice(smooth=True)
        figure.draw(Curves(list(series)), {}, 0.0, choice)
        drawn = charts(Curves(list(series)), {}, 0.0, choice)
        heights = [max(trace.y[-5:]) for trace in figure.widget.data[::3]]
        assert (">1<" in drawn) == (max(heights) == 1)
        return heights

    assert highest(jumping("desk", 40), jumping("mini", 30)) == [1, 1]
    assert max(highest(jumping("desk", 400), jumping("mini", 30))) < 0.7


def test_a_chart_without_a_point_has_no_axes() -> None:
    from notebook_cluster.widgets.figure import CurvesFigure

    figure = CurvesFigure()
    figure.draw(Curves([Series(node="mini", name="memory", step=[0], time=[1.0], value=[1e9])]), {}, 0.0)
    layout = figure.widget.layout
    assert [axis.visible for axis in (layout.xaxis, layout.yaxis2, layout.xaxis3)] == [False, False, True]


def test_a_running_mean_has_no_pull_to_its_first_value_and_gaps_stay() -> None:
    assert smoothed([4.0]) == [4.0]
    assert smoothed([3.0] * 50) == pytest.approx([3.0] * 50)
    assert 1.0 < max(smoothed([100.0 if step == 20 else 1.0 for step in range(40)])) < 20.0
    assert [math.isnan(value) for value in smoothed([1.0, math.nan, 1.0])] == [False, True, False]
    assert smoothed([1.0, math.inf, 1.0])[2] == 1.0


def test_of_more_than_six_nodes_each_has_a_row() -> None:
    for count, compact in ((6, False), (7, True)):
        state = cluster_view(nodes=[node_view(index, f"n{index}") for index in range(count)])
        assert panel_model(state)["compact"] is compact
        assert ("nbc-nodes nbc-compact" in render_html(state)) is compact


def test_lists_are_folded_and_say_the_newest_of_them_but_peers_that_can_be_added() -> None:
    event = EventView(time=time.time(), level="warning", text="mini is <lost>")
    connected = peer_view("mini", condition="connected")
    markup = render_html(cluster_view(events=[event], peers=[connected]))
    assert "<details open>" not in markup
    assert re.search(r"<summary [^>]*><span[^>]*>Events</span><span[^>]*>[0-9:]{8} mini is &lt;lost&gt;", markup)
    assert "1, none to be added" in markup
    found = peer_view("air", condition="found", trusted=True)
    assert "<details open><summary" in (markup := render_html(cluster_view(peers=[connected, found])))
    assert "2, 1 peer can be added" in markup
    assert "<details open>" not in render_html(cluster_view(peers=[connected, found]), ended="ended")


def test_a_reloaded_page_reads_the_newest_points_and_a_joined_node() -> None:
    from notebook_cluster.widgets.figure import CurvesFigure

    figure = CurvesFigure()
    figure.draw(Curves(series_until(10, 0.0)[:2]), {"laptop": PALETTE[0]}, 0.0)
    assert figure.draw(Curves(series_until(20, 0.0)), {"laptop": PALETTE[0], "mini": PALETTE[1]}, 0.0) is False
    data = figure.widget.get_state(["_widget_data"])["_widget_data"]
    assert [trace["name"] for trace in data] == ["laptop"] * 3 + ["mini"] * 3 + ["desk"] * 3
    assert data[0]["x"]["shape"] == (11,)


def test_new_points_are_one_message_and_a_new_view_reads_what_was_drawn_last() -> None:
    pytest.importorskip("plotly")
    from notebook_cluster.widgets.figure import CurvesFigure

    figure, told, colours = CurvesFigure(), [], {"laptop": PALETTE[0]}
    figure.draw(Curves(series_until(20, 0.0)), colours, 0.0)
    figure.widget.observe(lambda change: told.append(change["new"]), "_py2js_update")
    figure.draw(Curves(series_until(30, 0.0)), colours, 0.0)
    (message,) = filter(None, told)
    assert (sorted(message["style_data"]), sorted(message["style_traces"]), message["layout_data"]) == (
        ["x", "y"], list(range(9)), {},
    )  # fmt: skip
    kept = figure.widget._widget_data
    assert [len(trace["x"]) for trace in kept] == [len(trace.x) for trace in figure.widget.data]
    assert max(len(trace["x"]) for trace in kept) == 16
    told.clear()
    figure.draw(Curves(series_until(30, 0.0)), {"laptop": PALETTE[1]}, 0.0)
    (message,) = filter(None, told)
    assert set(message["style_data"]) == {"line.color"}
    assert kept[0]["line"]["color"] == PALETTE[1]
    told.clear()
    figure.draw(Curves(series_until(30, 0.0)), {"laptop": PALETTE[1]}, 0.0)
    assert told == []


def test_a_cluster_that_just_started_shows_no_charts_and_no_memory_yet() -> None:
    state = cluster_view()
    fresh = msgspec.structs.replace(
        state, nodes=[msgspec.structs.replace(node, memory_used=0, memory_peak=0) for node in state.nodes]
    )
    markup = render_html(fresh, series_until(1, state.started))
    assert "<svg" not in markup
    assert "0 B of" not in markup
    assert f"{ABSENT} of" in markup


def test_the_picture_of_an_ended_cluster_has_no_node_that_looks_alive() -> None:
    state = cluster_view()
    alive = msgspec.structs.replace(
        state, nodes=[msgspec.structs.replace(node, condition="ok", busy=False) for node in state.nodes], cell=None
    )
    assert ">ended<" in render_html(alive, ended="ended at 12:00:00: stopped")
    assert ">ok<" not in render_html(alive, ended="ended at 12:00:00: stopped")
    assert ">ok<" in render_html(alive)


def test_a_card_shows_load_temperature_battery_and_link_where_they_are_known() -> None:
    node = node_view(1, "mini", load=0.934, temperature=61.4, cpu=1.25)
    peer = peer_view("mini", condition="connected", battery=54.2, plugged=False, jitter_ms=0.4)
    (card,) = panel_model(cluster_view(nodes=[node], peers=[peer]))["nodes"]
    assert card["vitals"] == "GPU 93 % · 61 °C · this node 1.2 CPU cores · battery 54 % · link 1.8 ms ± 0.4 ms"
    said = f"mini: {card['vitals']} · waited 0.4 s · 940 samples/s"
    assert f"  {said} · saved digits at round 2, " in render_text(cluster_view(nodes=[node], peers=[peer]))
    (bare,) = panel_model(cluster_view(nodes=[node_view(0, "laptop")], peers=[]))["nodes"]
    assert bare["vitals"] == ""


def test_a_card_shows_samples_a_second_only_while_its_node_works() -> None:
    busy, idle = node_view(0, "laptop"), node_view(1, "mini", busy=False)
    cell = cluster_view().cell
    assert cell is not None

    def rates(status: str, ended: str = "") -> list[str]:
        told = msgspec.structs.replace(cell, status=status, nodes={"laptop": "running", "mini": "ok"})
        cards = panel_model(cluster_view(nodes=[busy, idle], cell=told), ended)["nodes"]
        return [card["extra"] for card in cards]

    assert rates("running") == ["900 samples/s", ""]
    assert rates("running", "ended at 12:00:00: stopped") == ["", ""]
    busy = msgspec.structs.replace(busy, busy=False)
    assert rates("running") == ["900 samples/s", ""]
    assert rates("ok") == ["", ""]


def test_measurements_that_cannot_be_stay_short_or_are_left_out() -> None:
    node = node_view(1, "mini", load=1e300, temperature=1e300, cpu=1e300, samples_per_s=1e300)
    peer = peer_view("mini", condition="connected", battery=1e300, round_trip_ms=None)
    model = panel_model(cluster_view(nodes=[node], peers=[peer]))
    assert model["nodes"][0]["vitals"] == "GPU 100 % · mains 100 %"
    assert len(model["nodes"][0]["extra"]) <= 40
    assert "Samples/s" not in {fact["label"] for fact in model["facts"]}


def test_samples_of_all_nodes_that_are_there_are_added_while_a_cell_runs() -> None:
    nodes = [node_view(0, "laptop"), node_view(1, "mini"), node_view(2, "desk", condition="lost")]
    facts = {fact["label"]: fact for fact in panel_model(cluster_view(nodes=nodes))["facts"]}
    assert (facts["Samples/s"]["value"], facts["Samples/s"]["note"]) == ("1,840", "of 2 nodes")
    assert "Samples/s" not in {fact["label"] for fact in panel_model(cluster_view(cell=None))["facts"]}


@pytest.mark.parametrize("condition", ["lost", "dead", "asleep"])
def test_the_last_loss_of_a_node_that_is_gone_is_shown_only_once_the_cluster_has_ended(condition: str) -> None:
    gone = node_view(1, "mini", condition=condition, step=30, loss=0.1234, scalars={"accuracy": 0.875})
    view = cluster_view(nodes=[node_view(0, "laptop"), gone])
    for render in (render_text, render_html):
        assert "0.1234" not in render(view)
        assert "0.875" not in render(view)
        assert "0.1234" in render(view, ended="stopped")
    assert [panel_model(view)["nodes"][1][name] for name in ("step", "loss", "extra")] == ["30", ABSENT, ""]


def test_who_has_failed_and_of_what_is_said_until_the_next_cell() -> None:
    cell = CellView(
        id=7, source="train()", status="running", nodes={"laptop": "running", "mini": "error"},
        errors={"mini": "ValueError: <b>no</b> data"},
    )  # fmt: skip
    failed = node_view(1, "mini", busy=False, failed="cell 7: ValueError: <b>no</b> data")
    state = cluster_view(cell=cell, nodes=[node_view(0, "laptop"), failed])
    _, mini = panel_model(state)["nodes"]
    assert (mini["condition"], mini["level"], mini["reason"]) == ("failed", "bad", "cell 7: ValueError: <b>no</b> data")
    assert "cell 7: ValueError: &lt;b&gt;no&lt;/b&gt; data" in render_html(state)
    assert "failed: cell 7: ValueError" in render_text(state)
    facts = {fact["label"]: fact["note"] for fact in panel_model(state)["facts"]}
    assert facts["Samples/s"] == "of 1 node"
    history = RunHistory(rounds=[], rounds_seen=0, checkpoints=[], cells=[cell], cells_seen=1, peers=[])
    assert "mini: ValueError: &lt;b&gt;no&lt;/b&gt; data" in render_report(state, [], history)
    after = msgspec.structs.replace(state, nodes=[node_view(0, "laptop"), node_view(1, "mini", busy=False)])
    assert panel_model(after)["nodes"][1]["condition"] == "ok"


def test_who_was_waited_for_in_rounds_before_the_newest_start_is_not_shown() -> None:
    waits = [
        RoundWait(round=number, node="mini", seconds=0.5, time=100.0 + place)
        for place, number in enumerate((4, 5, 1, 2, 1, 2, 3))
    ]
    state = cluster_view()
    state = msgspec.structs.replace(state, jobs=[msgspec.structs.replace(state.jobs[0], waits=waits)])
    head, mini = panel_model(state)["waits"]
    assert (head["name"], mini["said"]) == ("3 rounds", "1.5 s in 3 rounds")
    assert [said for _, _, said in mini["bars"]] == [f"round {number}: 0.5 s" for number in (1, 2, 3)]


def waited(*waits: tuple[int, str, float, float]) -> ClusterView:
    """A cluster with those rounds: number, who was waited for, how long, when it was committed."""
    rows = [RoundWait(round=round, node=node, seconds=seconds, time=time) for round, node, seconds, time in waits]
    state = cluster_view(nodes=[node_view(0, "laptop"), node_view(1, "desk")])
    return msgspec.structs.replace(state, jobs=[msgspec.structs.replace(state.jobs[0], waits=rows)])


def test_rounds_and_who_was_waited_for_lie_on_one_line_of_time() -> None:
    state = waited((1, "gone", 0.5, 100.5), (2, "desk", 2.0, 104.0), (3, "desk", 1.0, 110.0))
    head, desk, gone = panel_model(state)["waits"]
    assert (head["name"], head["said"]) == ("3 rounds", "in 10.0 s")
    assert head["bars"] == [[5.0, 0.0, "round 1"], [40.0, 0.0, "round 2"], [100.0, 0.0, "round 3"]]
    assert (desk["name"], desk["said"], desk["colour"]) == ("desk", "3.0 s in 2 rounds", PALETTE[1])
    assert desk["bars"] == [[20.0, 20.0, "round 2: 2.0 s"], [90.0, 10.0, "round 3: 1.0 s"]]
    assert (gone["said"], gone["colour"]) == ("0.5 s in 1 round", NO_PLACE)
    assert gone["bars"] == [[0.0, 5.0, "round 1: 0.5 s"]]
    html = render_html(state)
    assert html.count('class="nbc-wait"') == 3
    assert 'title="round 2: 2.0 s" style="left:20.0%;width:20.0%"' in html
    shown = "who was waited for, last 3 rounds\n  desk  3.0 s in 2 rounds\n  gone  0.5 s in 1 round\n"
    assert shown in render_text(state)
    assert "who was waited for" not in render_text(cluster_view())
    assert "who was waited for" not in render_html(cluster_view())


def test_of_many_nodes_those_that_were_waited_for_longest_have_a_lane() -> None:
    state = waited(*((number, f"node-{number}", float(number), 100.0 + number) for number in range(1, 12)))
    _, *lanes = panel_model(state)["waits"]
    assert [lane["name"] for lane in lanes] == [*(f"node-{number}" for number in range(11, 3, -1)), "3 nodes more"]
    assert (lanes[-1]["said"], lanes[-1]["bars"]) == ("6.0 s in 3 rounds", [])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0])
def test_a_wait_that_is_no_length_of_time_has_no_bar(wrong: float) -> None:
    state = waited((1, "desk", wrong, 100.0), (2, "desk", 0.5, 100.0), (3, "desk", 0.5, 90.0))
    assert panel_model(state)["waits"][0]["name"] == "2 rounds"
    places = re.findall(r"left:([^%]*)%;width:([^%]*)%", render_html(state))
    assert len(places) == 4
    assert all(0 <= float(number) <= 100 for place in places for number in place)
    assert panel_model(waited((1, "desk", wrong, 100.0)))["waits"] == []


def test_columns_are_thinned_as_points_are() -> None:
    import numpy

    from notebook_cluster.widgets import columns

    curve = ThinnedCurve()
    values = [math.nan if 900 <= step < 950 else 99.0 if step == 543 else math.sin(step) for step in range(1800)]
    curve.extend([*range(900), *range(900)], [float(step) for step in range(1800)], values)
    seconds, told = columns.by_time(curve, 10.0)
    places, y = columns.thin(told, 300)
    x = seconds[places]
    assert len(x) == len(y) <= 300
    assert (x[0], x[-1]) == (-10.0, 1789.0)
    assert (numpy.diff(x) > 0).all()
    assert 99.0 in y
    assert numpy.isnan(y).any()
    steps, again = columns.by_step(curve)
    assert (steps[900], len(steps)) == (0.0, 1801)
    assert numpy.isnan(again[900])


NOT_NUMBERS = [2.0, math.nan, 1.5, math.inf, 1.0, -math.inf, math.nan, 0.5]


def broken_run() -> tuple[ClusterView, list[Series]]:
    """A node called ATTACK whose loss is not finite now and then, and whose memory is no number at all."""
    state = cluster_view(
        nodes=[node_view(0, ATTACK, loss=math.nan, samples_per_s=math.nan, scalars={ATTACK: math.inf})]
    )
    places = list(range(len(NOT_NUMBERS)))
    times = [state.started + place for place in places]
    loss = Series(node=ATTACK, name="loss", step=places, time=times, value=NOT_NUMBERS)
    memory = Series(node=ATTACK, name="memory", step=places, time=times, value=[math.nan] * len(places))
    return state, [loss, memory]


@pytest.mark.parametrize(
    ("render", "pictures"),
    [(render_html, 2), (lambda *run: render_report(*run, NO_HISTORY), 4)],  # the report's with both kinds of axis
    ids=["html", "report"],
)
def test_in_pictures_what_is_not_finite_is_a_gap(render: Callable[..., str], pictures: int) -> None:
    markup = render(*broken_run())
    paths = re.findall(r'<path d="([^"]*)" fill', markup)
    assert len(paths) == pictures  # loss over steps and over time; nothing of the memory can be drawn
    for path in paths:
        assert path.count("M") == 4  # 2.0, 1.5, 1.0 and 0.5 stand alone
        assert not re.search("nan|inf", path)
    assert ">NaN<" in markup
    assert not re.search("<img|<script", markup)


def test_in_text_what_is_not_finite_is_left_out_and_named() -> None:
    state, series = broken_run()
    text = render_text(state, series)
    assert re.search(r" NaN .* █▆▃▁$", text, re.MULTILINE)
    assert "nan" not in text


def test_in_the_figure_what_is_not_finite_is_a_gap_and_no_name_is_markup() -> None:
    import numpy

    from notebook_cluster.widgets.figure import CurvesFigure

    figure = CurvesFigure()
    state, series = broken_run()
    raw = CurveChoice(smooth=False)
    assert figure.draw(Curves(series), {}, state.started, raw) is True
    loss, _, memory = figure.widget.data
    assert [None if numpy.isnan(y) else float(y) for y in loss.y] == [2.0, None, 1.5, None, 1.0, None, None, 0.5]
    assert numpy.isnan(memory.y).all()
    assert not re.search("[<>]", loss.name)
    before = figure.widget.data[0].y
    figure.draw(Curves(series), {}, state.started, raw)
    assert figure.widget.data[0].y is before  # nothing is sent again because NaN is not NaN


def test_the_model_of_a_run_full_of_nan_says_nothing_that_is_no_text() -> None:
    import json

    state, _ = broken_run()
    model = panel_model(state)
    json.dumps(model, allow_nan=False)
    assert "nan" not in json.dumps(model)
    (card,) = model["nodes"]
    assert (card["loss"], card["extra"].endswith("∞")) == ("NaN", True)
    assert "Samples/s" not in {fact["label"] for fact in model["facts"]}


def test_stop_names_who_is_busy_after_a_while_only_and_kills_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_cluster.widgets.actions.STOP_SECONDS", 0.2)
    views = [cluster_view(), cluster_view(cell=None)]
    asked: list[bool] = []

    def interrupt(force: bool) -> list[str]:
        asked.append(force)
        return ["laptop", "mini"]

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    cluster = SimpleNamespace(interrupt=interrupt, state=lambda: views[0])
    actions = Actions(cluster, ended.put)  # type: ignore[arg-type]

    def stop() -> str:
        actions.ask({"action": "interrupt", "id": str(len(asked))})
        ended.get(timeout=60)()
        return actions.answers()[-1]["text"]

    assert stop() == "Still busy: laptop, mini. Stop cell again kills and restarts it"
    assert stop() == "Killed and started again: laptop, mini"
    views.pop(0)
    assert stop() == "Interrupted"
    assert asked == [False, True, False]


def test_a_node_whose_work_was_refused_is_not_down_and_counts_on() -> None:
    node = node_view(1, "mini", condition="refused", reason="the work of 'mini' for round 3 holds NaN or infinity")
    model = panel_model(cluster_view(nodes=[node_view(0, "laptop"), node]))
    assert (model["status"], model["level"]) == ("training · exchanging", "info")
    card = model["nodes"][1]
    assert (card["condition"], card["level"], card["reason"]) == ("refused", "warning", node.reason)
    assert "refused: the work of 'mini' for round 3" in render_text(cluster_view(nodes=[node]))


@pytest.mark.parametrize(
    ("sent", "data_parallel", "saved"),
    [(48_000_000, 4_800_000_000, "4.8 GB"), (5000, 4000, None), (0, 4000, None)],
)
def test_bytes_saved_are_said_where_any_were(sent: int, data_parallel: int, saved: str | None) -> None:
    state = cluster_view()
    job = msgspec.structs.replace(state.jobs[0], bytes_sent=sent, bytes_data_parallel=data_parallel)
    facts = {fact["label"]: fact for fact in panel_model(msgspec.structs.replace(state, jobs=[job]))["facts"]}
    assert (facts["Saved"]["value"] if "Saved" in facts else None) == saved


@pytest.mark.parametrize("render", [render_text, render_html])
def test_what_a_node_replays_and_does_without_is_shown_while_the_cluster_is_there(render: Callable[..., str]) -> None:
    lacks = "without cell 1, which was skipped: %cluster restart attic --all-cells runs it again"
    changes: dict[str, Any] = {"condition": "replaying", "replaying": "replaying cell 2 of 3, 40 s", "left_out": lacks}
    view = cluster_view(nodes=[node_view(0, "attic", **changes)])
    assert "replaying cell 2 of 3, 40 s" in render(view)
    assert lacks in render(view)
    assert "cell 2 of 3" not in render(view, ended="stopped")


def test_texts_in_pages_of_ours_are_no_mathematics() -> None:
    for markup in (page([], "doctor"), running_html("ok", "$x$"), framed([], "$x$", "")):
        assert markup.startswith('<div class="mathjax_ignore tex2jax_ignore"')
