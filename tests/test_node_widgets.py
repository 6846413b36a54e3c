"""Widgets that nodes create: shown in the notebook, moved there, heard on the node, also while its cell runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.protocol.interaction import WIDGET_MIME
from tests.conftest import wait_until
from tests.notebook_browser import Browser, notebook_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with notebook_browser() as started:
        yield started


def test_moving_a_slider_changes_its_value_on_the_node(browser: Browser) -> None:
    cell, (model,) = browser.show("%%on 0\nfrom ipywidgets import *\nslider = IntSlider(3, max=50)\nslider")
    browser.until(cell)
    assert browser.models[model]["value"] == 3
    browser.move(model, value=41)
    wait = "import time\nwhile slider.value != 41: time.sleep(0.01)\nprint('it is', slider.value)"
    assert "it is 41" in browser.works(f"%%on 0\n{wait}")


def test_button_acts_while_the_cell_of_its_node_runs(browser: Browser) -> None:
    code = """%%on_all --no-replay
from ipywidgets import Button, Label
import time
clicks, label = [], Label("not yet")
def count(button):
    clicks.append(1)
    label.value = f"{nc.node()}: {len(clicks)}"
button = Button(description="go")
button.on_click(count)
display(label, button)
while len(clicks) < 2:
    time.sleep(0.01)
print("clicked")
"""
    cell, models = browser.show(code, 4)
    labels = [model for model in models if browser.models[model]["_model_name"] == "LabelModel"]
    buttons = [model for model in models if model not in labels]
    assert len(set(models)) == 4
    browser.click(buttons[0])
    browser.until_model(labels[0], value="local: 1")
    assert browser.models[labels[1]]["value"] == "not yet"
    assert not cell.done
    for button in buttons:
        browser.click(button)
        browser.click(button)
    assert "clicked" in browser.until(cell).shown


def test_an_output_widget_holds_what_is_printed_in_it_and_not_the_cell(browser: Browser) -> None:
    code = """%%on 0
from ipywidgets import Output
from IPython.display import HTML
out = Output()
display(out)
with out:
    print("caught")
    display(HTML("<b>bold</b><script>alert(1)</script>"))
out.append_stdout("appended")
print("below the cell")
"""
    cell, (model,) = browser.show(code)
    shown = browser.until(cell).shown
    assert "below the cell" in shown
    assert "caught" not in shown
    html = {"data": {"text/plain": "<IPython.core.display.HTML object>", "text/html": "<b>bold</b>"}, "metadata": {}}
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": "caught\n"},
        {"output_type": "display_data", **html},
        {"output_type": "stream", "name": "stdout", "text": "appended"},
    ]
    browser.until_model(model, outputs=outputs)
    browser.works("%%on 0\nout.clear_output()")
    browser.until_model(model, outputs=[])
    browser.works("%%on 0\nout.append_stdout('more')")
    browser.until_model(model, outputs=[{"output_type": "stream", "name": "stdout", "text": "more"}])


def test_interact_shows_the_result_of_its_function_when_its_slider_moves(browser: Browser) -> None:
    code = """%%on 0
from ipywidgets import interact
@interact(x=(0, 10))
def double(x):
    return f"twice {x} is {2 * x}"
"""
    cell, (model,) = browser.show(code)
    browser.until(cell)
    wait_until(lambda: browser.listen() or len(browser.models[model]["children"]) == 2, 60, "its parts")
    slider, output = (name.removeprefix("IPY_MODEL_") for name in browser.models[model]["children"])
    result = {"output_type": "display_data", "metadata": {}}
    browser.until_model(output, outputs=[{**result, "data": {"text/plain": "'twice 5 is 10'"}}])
    browser.move(slider, value=7)
    browser.until_model(output, outputs=[{**result, "data": {"text/plain": "'twice 7 is 14'"}}])


def test_callback_is_heard_after_its_cell_has_ended(browser: Browser) -> None:
    code = """%%on 1
from ipywidgets import Checkbox, HTML
box, told = Checkbox(), HTML()
def tell(change):
    told.value = f"<b>{change['new']}</b><script>alert(1)</script>"
box.observe(tell, "value")
display(box, told)
"""
    cell, (box, told) = browser.show(code, 2)
    browser.until(cell)
    browser.move(box, value=True)
    browser.until_model(told, value="<b>True</b>")


def test_slow_callback_gets_the_newest_value_and_not_every_one(browser: Browser) -> None:
    code = """%%on 0
from ipywidgets import IntSlider
import time
calls, slow = [], IntSlider(max=100)
def take_long(change):
    calls.append(change["new"])
    time.sleep(0.1)
slow.observe(take_long, "value")
slow
"""
    cell, (model,) = browser.show(code)
    browser.until(cell)
    for value in range(1, 41):
        browser.move(model, value=value)
    wait = "while not calls or calls[-1] != 40: time.sleep(0.01)\nprint('calls', 0 < len(calls) < 30)"
    assert "calls True" in browser.works(f"%%on 0\n{wait}")


def test_exception_in_a_callback_is_told_when_no_cell_shows_it(browser: Browser) -> None:
    code = """%%on 0
from ipywidgets import Button
def fail(button):
    raise ValueError("no such thing")
button = Button()
button.on_click(fail)
button
"""
    cell, (model,) = browser.show(code)
    browser.until(cell)
    browser.click(model)
    said = "local: the callback of a widget raised ValueError: no such thing"
    wait_until(lambda: said in browser.works("%cluster status"), 60, said)


def test_widget_that_the_node_closes_goes_and_its_text_stays(browser: Browser) -> None:
    cell, (model,) = browser.show("%%on 0\nfrom ipywidgets import IntSlider\nbrief = IntSlider(7)\nbrief")
    shown = browser.until(cell).shown
    assert "IntSlider(value=7)" in shown
    browser.works("%%on 0\nbrief.close()")
    wait_until(lambda: browser.listen() or model not in browser.models, 60, "the end of the widget")


def test_widget_that_is_not_relayed_is_named_in_the_text(browser: Browser) -> None:
    code = """%%on 0
from ipywidgets import Controller, HBox, Label
display(HBox([Label("beside it"), Controller()]), Controller())"""
    cell, (model,) = browser.show(code)
    said = "a widget of kind ControllerModel (@jupyter-widgets/controls 2.0.0) is not relayed from nodes"
    assert said in browser.until(cell).shown
    wait_until(lambda: browser.listen() or len(browser.models[model]["children"]) == 2, 60, "what is in the box")
    parts = [browser.models[name.removeprefix("IPY_MODEL_")]["value"] for name in browser.models[model]["children"]]
    assert parts == ["beside it", f"[notebook-cluster: {said}]"]


def test_node_reaches_neither_widgets_of_the_notebook_nor_those_of_another_node(browser: Browser) -> None:
    cell, (own,) = browser.show("import ipywidgets\nown = ipywidgets.IntSlider(11)\ndisplay(own)")
    browser.until(cell)
    code = """%%on 1
from ipywidgets import IntSlider
victim = IntSlider(12, model_id="0123456789abcdef")
victim"""
    cell, (victim,) = browser.show(code)
    browser.until(cell)
    attack = f"""%%on 0
from comm import create_comm
state = {{"_model_module": "@jupyter-widgets/controls", "_model_name": "IntSliderModel", "value": 666,
         "_model_module_version": "2.0.0"}}
for name in ("{own}", "{victim}", "0123456789abcdef"):
    comm = create_comm(comm_id=name, target_name="jupyter.widget", data={{"state": state}})
    comm.send({{"method": "update", "state": {{"value": 667}}}})
    comm.close()
display({{"application/vnd.jupyter.widget-view+json": {{"model_id": "{own}"}}, "text/plain": "mine"}}, raw=True)
last = IntSlider(13)
last"""
    cell, (last,) = browser.show(attack)
    assert "this widget is not open on local" in browser.until(cell).shown
    values = {name: browser.models[name]["value"] for name in (own, victim, last)}
    assert values == {own: 11, victim: 12, last: 13}


def test_bar_that_changes_a_thousand_times_a_second_ends_right_without_flooding(browser: Browser) -> None:
    code = """%%on_all
from ipywidgets import IntProgress
bar = IntProgress(max=10_000)
display(bar)
for step in range(10_001):
    bar.value = step
"""
    before = browser.messages
    cell, models = browser.show(code, 2)
    for model in models:
        browser.until_model(model, value=10_000)
    browser.until(cell)
    assert browser.messages - before < 300


def test_malformed_messages_of_widgets_are_dropped(browser: Browser) -> None:
    code = """%%on 0
from comm import create_comm
from ipywidgets import IntText
import ipykernel.comm.comm as module
kernel = get_ipython().kernel
def say(kind, content, buffers=None):
    kernel.session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent(), buffers=buffers)
good = IntText(1)
for content in ({}, {"comm_id": 7, "data": {}}, {"comm_id": "x" * 5000, "data": {}}, {"comm_id": "a", "data": []},
                {"comm_id": "a", "target_name": "jupyter.widget", "data": {"state": [1]}},
                {"comm_id": "b", "target_name": "jupyter.widget", "data": {"state": {"_model_name": {}}}},
                {"comm_id": "c", "target_name": ["x"], "data": {"state": {}, "buffer_paths": [[1], "x", ["y", 1], 5]}},
                {"comm_id": good.model_id, "data": {"method": "update", "state": {"value": 5}, "buffer_paths": 3}},
                {"comm_id": good.model_id, "data": {"method": ["update"], "state": {"value": 6}}},
                {"comm_id": good.model_id, "data": {"method": "custom", "content": {"do": "focus"}}}):
    for kind in ("comm_open", "comm_msg"):
        if kind == "comm_msg" or content.get("comm_id") != good.model_id:
            say(kind, content, [b"bytes"])
good
"""
    cell, (model,) = browser.show(code)
    browser.until(cell)
    browser.until_model(model, value=5)


def test_view_that_comes_later_shows_the_widgets_of_the_running_cell(browser: Browser, tmp_path: Path) -> None:
    code = """%%on 0 --no-replay
from ipywidgets import Button
import time
late = []
button = Button(description="late")
button.on_click(lambda button: late.append(1))
display(button)
while not late:
    time.sleep(0.01)
"""
    cell, (model,) = browser.show(code)
    second = Browser(tmp_path)
    try:
        second.works("%load_ext notebook_cluster")
        watching, (same,) = second.show("%cluster attach lesson")
        assert same == model
        assert second.models[model]["description"] == "late"
        second.click(model)
        second.until(watching)
        browser.until(cell)
    finally:
        second.close()


def test_headless_notebook_gets_the_text_only(browser: Browser) -> None:
    cell = browser.run("%%on 0\nfrom ipywidgets import IntSlider\nIntSlider(8)", allow_stdin=False)
    assert "IntSlider(value=8)" in cell.shown
    assert WIDGET_MIME not in cell.kinds


def test_widgets_of_a_kernel_that_has_ended_are_greyed_out(browser: Browser) -> None:
    cell, (model,) = browser.show("%%on 1 --no-replay\nfrom ipywidgets import IntSlider\nIntSlider()")
    browser.until(cell)
    restart = browser.start("%cluster restart local-2")
    browser.until_model(model, disabled=True)
    browser.until(restart)
