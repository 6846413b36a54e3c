"""Output and widgets of nodes in a real JupyterLab: widgets act there, and no script of a node runs, in none of the
ways in which that of the notebook's own kernel does, and in none of some more."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.browser import (
    PATIENCE,
    Lab,
    needs_chromium,
    open_notebook,
    run_all,
    running_lab,
    save,
    wait_for_kernel,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium

# Not "ours": the JupyterLab part, where it is built, shows our own MIME type without running what it carries.
OWN_RUNS = [
    "html", "isolated", "markdown", "update", "javascript", "widgets.HTML", "widgets.HTMLMath",
    "view of another widget", "link", "Output", "append_display_data", "anywidget",
]  # fmt: skip
START = "%load_ext notebook_cluster\n%cluster start --local 1 --no-panel"
DISPLAYS = """
from IPython.display import HTML, SVG, Markdown, display, update_display
def script(what):
    return f'''<img src=x onerror="(window.ran = window.ran || []).push('WHO {what}')">'''
display(HTML(script("html") + "<b>WHO bold</b>"))
display(HTML(f'<svg><script>window.ran = ["WHO script"]</script></svg><a href="javascript:{script("link")}">x</a>'))
display(HTML(r"$\\href{javascript:window.ran=['WHO latex']}{WHO latex}$"))
display(Markdown(script("markdown") + " [WHO link](javascript:alert(1))"))
onload = "(window.ran = window.ran || []).push('WHO svg')"
display(SVG(f'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9" onload="{onload}"><circle r="9"/></svg>'))
handle = display(HTML("first"), display_id="same")
update_display(HTML(script("update") + "<i>WHO updated</i>"), display_id="same")
metadata = {"text/html": {"isolated": False}, "x": script("metadata")}
display({"text/html": script("isolated")}, raw=True, metadata=metadata)
display({"application/javascript": "window.ran = ['WHO javascript']", "text/plain": "WHO plain"}, raw=True)
title = {"data": [{"y": [1, 2]}], "layout": {"title": {"text": script("plotly")}}}
display({"application/vnd.plotly.v1+json": title, "text/plain": "WHO chart"}, raw=True)
print(script("stdout"))
ours = {"token": script("ours"), "place": 0, "nodes": [script("ours")]}
mime = "application/vnd.notebook-cluster.output+json"
display({mime: ours, "text/html": script("ours"), "text/plain": "x"}, raw=True)
"""
WIDGETS = """
import ipywidgets as w
text = script("widget")
display(w.HTML(script("widgets.HTML") + "<b>WHO html</b>", description=script("description")))
display(w.HTMLMath(script("widgets.HTMLMath") + r"$\\href{javascript:window.ran=['WHO math']}{WHO math}$"))
display(w.Button(description=text, tooltip=text, icon=text), w.Checkbox(description=text, description_allow_html=True))
display(w.ToggleButtons(options=[text], tooltips=[text], icons=[text]), w.RadioButtons(options=[text]))
display(w.Dropdown(options=[text], description=text), w.SelectMultiple(options=[text]), w.Combobox(options=[text]))
display(w.Tab([w.Label(text)], titles=[text]), w.Accordion([w.Label(text)], titles=[text]), w.TagsInput(value=[text]))
display(w.Text(text, placeholder=text), w.Textarea(text), w.Valid(False, readout=text))
display(w.SelectionSlider(options=[text]), w.Password(text), w.Select(options=[text]), w.FileUpload(description=text))
display(w.IntSlider(readout_format="d", description=text), w.Label("WHO widgets are there"))
class Disguised(w.Text):
    _view_name = __import__("traitlets").Unicode("HTMLView").tag(sync=True)
display(Disguised(script("view of another widget")))
a, b = w.Text(script("link")), w.HTML("")
w.jslink((a, "value"), (b, "value"))
display(a, b)
out = w.Output()
display(out)
with out:
    display(HTML(script("Output") + "<b>WHO caught</b>"))
out.append_display_data(HTML(script("append_display_data")))
"""
SCRIPTED = """
import anywidget
class Scripted(anywidget.AnyWidget):
    _esm = "export default { render({ el }) { el.innerHTML = '%s' } }" % script("anywidget").replace("'", "\\\\'")
display(Scripted())
"""
FAILS = """
class Error(Exception):
    pass
Error.__name__ = '''<img src=x onerror="(window.ran = window.ran || []).push('WHO error name')">'''
raise Error('''WHO failed <img src=x onerror="(window.ran = window.ran || []).push('WHO error')">'''
            "\\x1b]8;;javascript:alert(1)\\x07link\\x1b]8;;\\x07\\x1b[31m<script>window.ran = ['WHO ansi']</script>")
"""
NAMED = """
from notebook_cluster.magics.display.output import CellDisplay
from notebook_cluster.magics.display.publishing import ShellPublisher
from notebook_cluster.protocol.views import Output
def named(who):
    return f'''<img src=x onerror="(window.ran = window.ran || []).push('{who} node name')">'''
shown = CellDisplay(ShellPublisher(get_ipython()), named("cluster"))
for rank, who in enumerate(("first", "second")):
    kind = {"name": "stdout", "text": f"{who} has a name\\n"}
    shown.add([Output(node=named(who), rank=rank, kind="stream", content=kind)])
    html = {"data": {"text/html": "<b>rich</b>"}, "metadata": {}}
    shown.add([Output(node=named(who), rank=rank, kind="display_data", content=html)])
shown.note(named("note"))
shown.finish()
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


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
