"""Output and widgets of nodes in a real JupyterLab: widgets act there, and no script of a node runs, in none of the
ways in which that of the notebook's own kernel does, and in none of some more.

What nodes display fetches nothing either: neither from elsewhere nor, with the reader's cookies, from the notebook's
own server; and charts with their data in them are drawn.
"""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    leave,
    needs_chromium,
    open_notebook,
    run_all,
    running_lab,
    save,
    wait_for_kernel,
)
from tests.conftest import wait_until
from tests.hostile_charts import (
    PLOTLY,
    VEGA,
    VEGA_LITE,
    borderline,
    harmless,
    hostile_plotly,
    hostile_vega,
    hostile_vega_lite,
    vega_lite,
)
from tests.hostile_outputs import DISPLAYS, FAILS, FETCHING_MARKUP, FETCHING_WIDGETS, NAMED, SCRIPTED, WIDGETS

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium

# Not "ours": the JupyterLab part, where it is built, shows our own MIME type without running what it carries.
OWN_RUNS = [
    "html", "isolated", "markdown", "update", "javascript", "widgets.HTML", "widgets.HTMLMath",
    "view of another widget", "link", "Output", "append_display_data", "anywidget",
]  # fmt: skip
START = "%load_ext notebook_cluster\n%cluster start --local 1 --no-panel"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        tracker = running.settings / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
        tracker.write_text(json.dumps(json.loads(tracker.read_text()) | {"maxNumberOutputs": 100_000}))
        yield running


@pytest.fixture(scope="module")
def shared_page(lab: Lab) -> Iterator["Page"]:
    with browser_page(lab) as opened:
        yield opened


@pytest.fixture
def page(shared_page: "Page") -> Iterator["Page"]:
    """Each test loads JupyterLab anew: what one has run there is not there any more."""
    yield shared_page
    leave(shared_page)


def write(path: Path, cells: list[str]) -> None:
    """A notebook whose cells may fail without ending Run All."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell, metadata={"tags": ["raises-exception"]}) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, path)


def test_no_script_of_a_node_runs_and_that_of_the_own_kernel_does(page: "Page", lab: Lab, tmp_path: Path) -> None:
    of_nodes = [f"%%on_all\n{source}".replace("WHO", "node") for source in (DISPLAYS, WIDGETS, SCRIPTED, FAILS)]
    own = [source.replace("WHO", "own") for source in (DISPLAYS, WIDGETS, SCRIPTED)]
    write(lab.folder / "safety.ipynb", [START, *of_nodes, NAMED, *own, "%cluster stop"])
    open_notebook(page, "safety.ipynb")
    run_all(page)

    outputs = page.locator(".jp-CodeCell .jp-Cell-outputArea")
    for text in ("node bold", "node updated", "node plain", "node failed", "node html", "node caught"):
        outputs.get_by_text(text).first.wait_for(timeout=PATIENCE)
    for text in ("node widgets are there", "first has a name"):
        outputs.get_by_text(text).first.wait_for(timeout=PATIENCE)
    # The last of the own kernel's payloads is loaded after all of the nodes': what these could run has run by then.
    for what in OWN_RUNS:
        page.wait_for_function("what => (window.ran || []).includes(what)", arg=f"own {what}", timeout=PATIENCE)
    page.screenshot(path=tmp_path / "safety.png", full_page=True)
    ran = page.evaluate("window.ran")
    assert [what for what in ran if not what.startswith("own")] == []

    node_outputs = [outputs.nth(number) for number in range(1, 6)]
    assert sum(area.locator("a[href^=javascript]").count() for area in node_outputs) == 0
    assert sum(area.locator("[onerror], [onload], script, iframe").count() for area in node_outputs) == 0


CONTROLS = """%%on_all --no-replay
import time
import ipywidgets as w
button, slider, told = w.Button(description=f"go {nc.node()}"), w.IntSlider(2, max=9), w.HTML("-")
seen = []
def tell(change):
    seen.append(change)
    told.value = f"<b>{nc.node()} saw {len(seen)}, slider {slider.value}</b>"
button.on_click(tell)
slider.observe(tell, "value")
display(w.VBox([button, slider, told]))
while not any(isinstance(one, w.Button) for one in seen):
    time.sleep(0.01)
print(nc.node(), "is through")
"""


def test_widgets_of_nodes_act_while_their_cell_runs_and_after_a_page_reload(
    page: "Page", lab: Lab, tmp_path: Path
) -> None:
    write(lab.folder / "controls.ipynb", [START.replace("--local 1", "--local 2"), CONTROLS])
    open_notebook(page, "controls.ipynb")
    run_all(page)
    page.get_by_role("button", name="go local-2").click(timeout=PATIENCE)
    page.get_by_text("local-2 saw 1, slider 2").wait_for(timeout=PATIENCE)
    assert page.get_by_text("local saw").count() == 0
    button = page.get_by_role("button", name="go local", exact=True)
    page.locator(".widget-vbox").filter(has=button).locator(".noUi-handle").press("ArrowRight")
    page.get_by_text("local saw 1, slider 3").wait_for(timeout=PATIENCE)
    assert page.get_by_text("local is through").count() == 0
    button.click()
    page.get_by_text("local is through").first.wait_for(timeout=PATIENCE)
    wait_for_kernel(page)
    page.screenshot(path=tmp_path / "controls.png")
    save(page)

    open_notebook(page, "controls.ipynb")
    page.get_by_text("local saw 2, slider 3").wait_for(timeout=PATIENCE)
    page.get_by_role("button", name="go local-2").click()
    page.get_by_text("local-2 saw 2, slider 2").wait_for(timeout=PATIENCE)
    assert (lab.folder / "controls.ipynb").stat().st_size < 20_000
    outputs = nbformat.read(lab.folder / "controls.ipynb", 4).cells[1].outputs
    assert sum("VBox(children=(Button(" in str(output.get("data", {}).get("text/plain")) for output in outputs) == 2


SHOW = """
import json
for number, (mime, chart) in enumerate(json.loads(CHARTS)):
    display({mime: chart, "text/plain": f"chart {number} as text"}, raw=True, metadata={mime: METADATA})
print("WHO charts are there")
"""


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that lets every page fetch from it, and the paths that were fetched."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *parts: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/canary", paths
    finally:
        server.shutdown()
        server.server_close()


def hostile(there: str) -> list[tuple[str, Any]]:
    """Charts that fetch from ``there``."""
    return [
        *((VEGA, chart) for chart in hostile_vega(there)),
        *((VEGA_LITE, chart) for chart in hostile_vega_lite(there)),
        *((PLOTLY, chart) for chart in hostile_plotly(there)),
    ]


def show(charts: list[tuple[str, Any]], who: str, metadata: Any) -> str:
    """The cell that displays ``charts``."""
    source = SHOW.replace("CHARTS", repr(json.dumps(charts))).replace("METADATA", repr(metadata)).replace("WHO", who)
    return source if who == "own" else f"%%on_all\n{source}"


def markup(source: str, there: str) -> str:
    """The cell on all nodes that displays ``source`` with addresses that lead ``there`` and to the notebook's files."""
    text = source.replace("THERE", there).replace("HERE", "files/canary.txt").replace("WHO", "node")
    return f"%%on_all\n{text}"


def test_nothing_that_a_node_displays_fetches_and_its_charts_are_drawn(
    page: "Page", lab: Lab, listener: tuple[str, list[str]], tmp_path: Path
) -> None:
    there, fetched = listener
    (lab.folder / "canary.txt").write_text("a,b\n1,2\n")
    ours = [
        *(f"{lab.url}/{path}" for path in ("files/canary.txt", "api/contents/canary.txt", "lab?canary")),
        "canary.txt",
    ]
    charts = hostile(there) + [case for address in ours for case in hostile(address)[::3]]
    # The tooltips of vega-embed would show the picture of a column with this name.
    tooltip = vega_lite(
        data={"values": [{"x": 1, "y": 1, "image": there, "title": "x"}]},
        mark={"type": "point", "filled": True, "size": 50_000, "tooltip": {"content": "data"}},
    )
    embed = {"embed_options": {"config": there, "patch": there, "loader": {"baseURL": there}}}
    for address in (there, *ours):
        charts.extend(borderline(address))
    cells = [
        START,
        show(charts, "node", {}), show([(VEGA_LITE, tooltip)], "node", embed), show(list(harmless()), "node", {}),
        markup(FETCHING_MARKUP, there), markup(FETCHING_MARKUP, f"{lab.url}/files/canary.txt"),
        markup(FETCHING_WIDGETS, there), markup(FETCHING_WIDGETS, f"{lab.url}/files/canary.txt"),
    ]  # fmt: skip
    # The notebook's own kernel may: so the canaries are seen when something fetches them, after all of the nodes'.
    own = show([(VEGA_LITE, vega_lite(data={"url": f"{there}?own"})), *hostile(f"{there}?own")[:1]], "own", {})
    write(lab.folder / "fetch.ipynb", [*cells, own])
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    open_notebook(page, "fetch.ipynb")
    run_all(page)
    outputs = page.locator(".jp-CodeCell .jp-Cell-outputArea")
    for text in ("node charts are there", "node markup is there", "node widgets are there", "own charts are there"):
        outputs.get_by_text(text).last.wait_for(timeout=3 * PATIENCE)
    wait_for_kernel(page, timeout=180)
    page.wait_for_function(DRAWN, timeout=PATIENCE)
    wait_until(lambda: any("?own" in path for path in fetched))
    assert outputs.get_by_text("the rest is left out").count() == 0
    charted = page.locator(".jp-CodeCell").nth(2)
    assert charted.locator(".vega-actions a").all_text_contents() == ["Save as PNG"]
    charted.locator("canvas").scroll_into_view_if_needed()
    charted.locator("canvas").hover()
    page.wait_for_function(
        "() => document.querySelectorAll('.jp-CodeCell')[2].querySelector('[title*=image]') !== null"
    )
    save(page)
    page.screenshot(path=tmp_path / "fetch.png", full_page=True)
    assert of_nodes(fetched) == []
    assert of_nodes(requested) == []

    # The same in a page of nbconvert, which cleans nothing.
    nbconvert = [sys.executable, "-m", "nbconvert", "--to", "html", str(lab.folder / "fetch.ipynb")]
    subprocess.run(nbconvert, check=True, env=lab.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    converted = page.context.new_page()
    converted.on("request", lambda request: requested.append(request.url))
    converted.route(re.compile("^http"), lambda route: route.abort())
    requested.clear()
    converted.goto((lab.folder / "fetch.html").as_uri())
    assert converted.locator(".jp-OutputArea-output").get_by_text("node markup is there").count() == 2
    assert of_nodes(requested) == []
    converted.close()


def of_nodes(addresses: list[str]) -> list[str]:
    """Those of ``addresses`` that only nodes have named."""
    return [address for address in addresses if "canary" in address and not re.search(r"(\?|%3F)own", address)]


DRAWN = """() => {
    const drawn = canvas => {
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return data.some(value => value !== 0 && value !== 255);
    };
    const cell = document.querySelectorAll('.jp-CodeCell')[3];
    const canvases = [...cell.querySelectorAll('.vega-embed canvas')];
    const lines = cell.querySelectorAll('.js-plotly-plot .trace');
    return canvases.length === 4 && canvases.every(drawn) && lines.length === 1;
}"""
