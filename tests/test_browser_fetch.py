"""What nodes display fetches nothing in a real JupyterLab: neither from elsewhere nor, with the reader's cookies, from
the notebook's own server; and charts with their data in them are drawn."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import PATIENCE, Lab, needs_chromium, open_notebook, run_all, running_lab, save, wait_for_kernel
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
from tests.test_browser_safety import write

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium

START = "%load_ext notebook_cluster\n%cluster start --local 1 --no-panel"
SHOW = """
import json
for number, (mime, chart) in enumerate(json.loads(CHARTS)):
    display({mime: chart, "text/plain": f"chart {number} as text"}, raw=True, metadata={mime: METADATA})
print("WHO charts are there")
"""
MARKUP = r"""
import base64
from IPython.display import HTML, SVG, Markdown, Latex, GeoJSON, display
math = r"\style{background-image:url(THERE?math)}{x} \href{THERE?math}{x} \class{x}{y} \require{THERE}"
# MathJax is told to be safe in notebooks, and lets this style pass.
math += r" \style{cursor:url(THERE?cursor),auto}{x}"
forms = [
    "<img src='THERE'>", "<img srcset='THERE 2x'>", "<div style='background:url(THERE)'>x</div>",
    "<table background='THERE'><tr><td background='THERE'>x</td></tr></table>", "<link rel=stylesheet href='THERE'>",
    "<video src='THERE' poster='THERE'></video>", "<audio src='THERE'></audio>", "<object data='THERE'></object>",
    "<embed src='THERE'>", "<iframe src='THERE'></iframe>", "<svg><image href='THERE'/><use href='THERE#a'/></svg>",
    "<style>@import 'THERE'; body { background: url(THERE) }</style>", "<base href='THERE'>",
    "<meta http-equiv=refresh content='0;url=THERE'>", "<input type=image src='THERE'>", "<q cite='THERE'>x</q>",
    "<div style=\"border-image:url(THERE) 9;list-style:url(THERE);cursor:url(THERE),auto\">x</div>",
    "<ul style='list-style-image:url(THERE)'><li style='content:url(THERE)'>x</li></ul>",
    "<div style='width:image-set(\"THERE\" 1x);color:u\\72l(THERE)'>x</div>", "<img src='HERE'>",
    "$" + math + "$", "$$" + math + "$$", "\\[" + math + "\\]", "\\begin{equation}" + math + "\\end{equation}",
    "<pre>$" + math + "$</pre>", "<span>$\\style{background-image:</span>url(THERE)}{x}$",
]
for form in forms:
    display(HTML(form))
    display({"text/html": form}, raw=True, metadata={"text/html": {"isolated": True}})
    display(Markdown(form))
drawing = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'><image href='THERE' width='9' height='9'/>" \
    "<style>@import 'THERE'; rect { fill: url(THERE#a) }</style><rect width='9' height='9'/></svg>"
display(SVG(drawing))
encoded = base64.b64encode(drawing.encode()).decode()
display(HTML(f"<img src='data:image/svg+xml;base64,{encoded}'>"))
display(Markdown("![x](THERE) ![x](HERE)"), Latex("$" + math + "$"))
place = {"type": "FeatureCollection", "features": []}
altair6 = {"data": {"url": "THERE"}}
others = {
    "application/geo+json": place, "application/pdf": "JVBERi0=", "application/json": {"a": "THERE"},
    "text/vnd.mermaid": "graph TD\nA-->B", "application/vnd.jupyter.stdout": "THERE",
    "application/javascript": "fetch('THERE')", "image/svg+xml": drawing, "image/png": "THERE",
    "text/latex": "$" + math + "$", "application/xhtml+xml": "<img src='THERE'/>",
    "application/vnd.jupyter.widget-view+json": {"model_id": "x"}, "application/vnd.vegalite.v5.json": altair6,
    "application/vnd.notebook-cluster.output+json": {"html": "<img src='THERE'>"},
    "application/vnd.bokehjs_load.v0+json": "x",
}
for mime, value in others.items():
    for metadata in ({"url": "THERE", "url_prefix": "THERE", "url_template": "THERE"}, {}):
        display({mime: value, "text/plain": mime}, raw=True, metadata={mime: metadata})
handle = display(HTML("first"), display_id="fetches")
handle.update({"text/html": "<img src='THERE'>"}, raw=True)
print("\x1b]8;;THERE\x07link\x1b]8;;\x07 THERE")
print("WHO markup is there")
"""
WIDGETS = r"""
import ipywidgets as w
math = r"$\style{background-image:url(THERE?math)}{x} \href{THERE?math}{x} \style{cursor:url(THERE?widget),auto}{x}$"
texts = [
    "<img src='THERE'>", "<div style='background:url(THERE)'>x</div>", "THERE", "url(THERE)",
    "image-set('THERE' 1x)", "red;background:url(THERE)", "x\" src=\"THERE", "</style><img src='THERE'>", math,
]
made = 0
for name in dir(w):
    kind = getattr(w, name)
    is_widget = isinstance(kind, type) and issubclass(kind, w.DOMWidget)
    if not is_widget or name in ("DOMWidget", "CoreWidget", "Controller"):
        continue
    same = []
    for text in texts:
        try:
            widget = kind()
        except Exception:
            break
        same.append(widget)
        made += 1
        for part in (widget, widget.layout, getattr(widget, "style", None)):
            if part is None or isinstance(part, str):
                continue
            for key in part.keys:
                if key in ("layout", "style", "comm") or key.startswith(("_model", "_view")) and key != "_view_count":
                    continue
                for value in (text, [text], text.encode()):
                    buffers = [value] if isinstance(value, bytes) else None
                    state = {} if buffers else {key: value}
                    data = {"method": "update", "state": state, "buffer_paths": [[key]] if buffers else []}
                    part.comm.send(data, buffers=buffers)
    display(w.VBox(same))
for form in ("url", "svg+xml", "png"):
    picture = w.Image(value=b"THERE", format="png")
    display(picture)
    picture.comm.send({"method": "update", "state": {"format": form}, "buffer_paths": []})
display(w.Video(value=b"THERE", format="url"), w.Audio(value=b"THERE", format="url"))
out = w.Output()
display(out)
with out:
    display({"text/html": "<img src='THERE'>"}, raw=True)
    display({"application/vnd.vegalite.v5+json": {"data": {"url": "THERE"}, "mark": "point", "encoding": {}}}, raw=True)
hostile = {"data": {"url": "THERE"}, "mark": "point", "encoding": {}}
stored = {"output_type": "display_data", "data": {"application/vnd.vegalite.v5+json": hostile}, "metadata": {}}
late = w.Output()
display(late)
late.comm.send({"method": "update", "state": {"outputs": [stored]}, "buffer_paths": []})
assert made > 100, made
display(w.Label("WHO widgets are there"))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        tracker = running.settings / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
        tracker.write_text(json.dumps(json.loads(tracker.read_text()) | {"maxNumberOutputs": 100_000}))
        yield running


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
        markup(MARKUP, there), markup(MARKUP, f"{lab.url}/files/canary.txt"),
        markup(WIDGETS, there), markup(WIDGETS, f"{lab.url}/files/canary.txt"),
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
