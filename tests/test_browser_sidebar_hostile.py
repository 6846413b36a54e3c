"""The sidebar in a real page with what no test cluster does: HTML as names, curves without a number, failures of all
kinds. The page's WebSocket ends in the test, which sends what the server would."""

import json
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from notebook_cluster.protocol import state as s
from notebook_cluster.protocol.sidebar import ClusterRow, Curve, CurvePoints, Done, Overview, ServerInfo, Sharing
from notebook_cluster.server.browser import to_json
from tests import axe
from tests.browser import PATIENCE, Lab, browser_page, lab_with_extension, needs_extension
from tests.fake_cluster import cluster_view, node_view, peer_view
from tests.sidebar_page import show_sidebar, use_theme

if TYPE_CHECKING:
    from playwright.sync_api import Page, WebSocketRoute

pytestmark = needs_extension

HTML = '<img src=x onerror="window.hacked = 1"><b>desk</b>'
OTHER_VERSION = "cluster 'old' was started by notebook-cluster 0.0.9 (protocol 1), this is 0.1.0 (protocol 2)"


def nodes() -> list[s.NodeView]:
    conditions = ("ok", "lost", "suspect", "asleep", "rejoining", "refused")
    return [
        node_view(0, HTML, loss=math.nan, peer=HTML, device_name=HTML, checkpoint=HTML),
        *(node_view(rank, f"node-{rank}", condition=one, reason=HTML) for rank, one in enumerate(conditions, start=1)),
        node_view(7, "silent", loss=math.inf, memory_used=0, memory_peak=0, memory_total=0, samples_per_s=None),
    ]


def overview() -> Overview:
    events = [s.EventView(time=1.7e9, level=level, text=HTML) for level in ("info", "warning", "error")]  # type: ignore[arg-type]
    state = cluster_view(name=HTML, nodes=nodes(), events=events, invitation=f"192.0.2.1:4000 {HTML}")
    rows = [
        ClusterRow(name=HTML, condition="running", reason="", state=state),
        ClusterRow(name="old", condition="unreachable", reason=OTHER_VERSION, state=None),
        ClusterRow(name="gone", condition="ended", reason="cluster 'gone' has ended: stopped", state=cluster_view()),
    ]
    peers = [
        peer_view(HTML, device=HTML, trusted=False, pairing=True, reason=HTML),
        peer_view("attic", trusted=False, reason=HTML),
        peer_view("refused", condition="refused", reason=HTML),
    ]
    sharing = Sharing(on=True, name=HTML, code=HTML, command=HTML, qr_svg_data_url="javascript:window.hacked = 1")
    return Overview(peers=peers, clusters=rows, sharing=sharing, server=ServerInfo(version="1", protocol=2))


def curves() -> CurvePoints:
    def curve(node: str, name: str, values: list[float]) -> Curve:
        count = list(range(len(values)))
        return Curve(node=node, job="", name=name, step=count, time=[1.7e9 + one for one in count], value=values)

    nothing = [math.nan, math.inf, -math.inf]
    return CurvePoints(
        cluster=HTML, reset=True,
        series=[
            curve(HTML, "loss", [3.0, 2.0, math.nan, 1.5, 1.0]), curve("node-1", "loss", nothing),
            curve("nobody", HTML, [1.0]), curve(HTML, "memory", nothing),
        ],
    )  # fmt: skip


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_with_extension(tmp_path_factory.mktemp("lab")) as running:
        yield running


@pytest.fixture(scope="module")
def errors() -> list[str]:
    """What went wrong in the page's own code."""
    return []


@pytest.fixture(scope="module")
def page(lab: Lab, errors: list[str]) -> Iterator["Page"]:
    """The sidebar with :func:`overview` and :func:`curves`; every action fails with HTML."""

    def serve(socket: "WebSocketRoute") -> None:
        def answer(message: Any) -> None:
            socket.send(to_json(Done(id=json.loads(message)["id"], error=f"no: {HTML}")))

        socket.on_message(answer)
        socket.send(to_json(overview()))
        socket.send(to_json(curves()))

    with browser_page(lab) as opened:
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.route_web_socket(re.compile("/notebook-cluster/stream"), serve)
        opened.goto("/lab")
        show_sidebar(opened)
        opened.locator(".nbc-side-cluster").nth(2).wait_for(timeout=PATIENCE)
        yield opened


def assert_is_text(page: "Page", part: str) -> None:
    """HTML is there as text and nowhere as elements."""
    assert HTML in page.locator(part).inner_text()
    assert page.locator(f"{part} :is(img, b:not(.nbc-side-shared b, [data-level] b))").count() == 0
    assert page.evaluate("window.hacked") is None


def test_names_with_html_are_text_in_the_sidebar(page: "Page") -> None:
    assert_is_text(page, ".nbc-side-all")
    assert page.locator(".nbc-side-node").count() == 8
    assert "NaN" not in page.locator(".nbc-side-all").inner_html()


def test_names_with_html_are_text_in_what_failed(page: "Page") -> None:
    page.get_by_role("button", name="Detach").click()
    alert = page.locator(".nbc-side-cluster").get_by_role("alert")
    alert.wait_for(timeout=PATIENCE)
    assert alert.inner_text().startswith(f"no: {HTML}")
    assert_is_text(page, ".nbc-side-all")


def test_a_curve_has_gaps_where_it_has_no_number_and_one_without_any_is_not_drawn(page: "Page") -> None:
    def drawn(name: str) -> list[str | None]:
        item = page.get_by_role("listitem", name=f"node {name},")
        return [path.get_attribute("d") for path in item.locator(".nbc-side-spark path").all()]

    (first,) = drawn(HTML)
    assert first is not None
    assert (first.count("M"), first.count("L")) == (2, 2)
    assert drawn("node-1") == []


def test_clusters_of_another_version_and_ended_ones_say_so_and_have_no_buttons(page: "Page") -> None:
    for name, said in (("old", OTHER_VERSION), ("gone", "cluster 'gone' has ended: stopped")):
        part = page.get_by_role("region", name=f"cluster {name}")
        assert said in part.inner_text()
        assert part.get_by_role("button").count() == 0


def test_the_dashboard_shows_the_same_as_text(page: "Page") -> None:
    page.get_by_role("button", name="Dashboard").click()
    page.get_by_role("img", name="Loss over 4 s, from 1.0000 to 3.0000").wait_for(timeout=PATIENCE)
    assert_is_text(page, ".nbc-dash")
    assert page.locator(".nbc-dash-table tbody tr").count() == 8
    assert "NaN" not in page.locator(".nbc-dash").inner_html()
    assert "No values yet." in page.locator(".nbc-dash-chart").filter(has_text="Memory").inner_text()


@pytest.mark.skipif(not axe.SCRIPT.exists(), reason="no axe-core: npm ci in labextension/")
@pytest.mark.parametrize("theme", ["JupyterLab Dark", "JupyterLab Light"])
def test_everyone_can_read_what_is_wrong(page: "Page", theme: str) -> None:
    use_theme(page, theme)
    page.locator(".nbc-side-node").first.get_by_role("button").last.click()  # asks once more, in red
    for part in (".nbc-side:not(.nbc-dash)", ".nbc-dash"):
        assert axe.violations(page, part) == []


def test_nothing_went_wrong_in_the_page(page: "Page", errors: list[str]) -> None:
    assert page.evaluate("window.hacked") is None
    assert errors == []
