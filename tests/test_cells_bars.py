"""Bars of tqdm on nodes: widgets while they move, then text; text alone where nobody is shown widgets."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_cluster.protocol.interaction import WIDGET_MIME
from tests.conftest import wait_until
from tests.notebook_browser import Browser, notebook_browser
from tests.notebook_kernel import Cell

IMPORTS = "import time\nfrom pathlib import Path\nfrom tqdm.notebook import tqdm, trange\n"
HOLD = """
def hold(name):
    for _ in range(6000):
        if Path(name).exists(): return
        time.sleep(0.01)
    raise TimeoutError(name)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with notebook_browser() as started:
        started.works(f"%%on_all\n{IMPORTS}{HOLD}")
        yield started


def children(browser: Browser, box: dict[str, Any]) -> list[dict[str, Any]]:
    """The widgets in a box."""
    return [browser.models[name.removeprefix("IPY_MODEL_")] for name in box["children"]]


def bars_of(browser: Browser, cell: Cell) -> dict[str, list[str]]:
    """Node -> the bars on the page, as ``description value numbers``, of those that can be seen."""
    found: dict[str, list[str]] = {}
    for place, bundle in cell.bundles.items():
        stack = browser.models.get(bundle.get(WIDGET_MIME, {}).get("model_id", ""))
        if stack is None or "/progress-" not in place:
            continue
        for row in children(browser, stack):
            if browser.models[row["layout"].removeprefix("IPY_MODEL_")].get("display") == "none":
                continue
            left, bar, right = children(browser, row)
            assert (left["_model_name"], bar["_model_name"]) == ("LabelModel", "FloatProgressModel")
            layouts = [browser.models[one["layout"].removeprefix("IPY_MODEL_")] for one in (left, bar, right)]
            assert [layout.get("flex") for layout in layouts] == ["0 0 auto", "1 1 auto", "0 0 auto"]
            assert layouts[1].get("min_width") == "0"  # else the labels would give way where there is little room
            text = f"{left['value']} {bar['value']:g} {right['value']}".replace("\u2007", " ")
            found.setdefault(place.partition("/")[0], []).append(text)
    return found


def until_bars(browser: Browser, cell: Cell, *texts: str, nodes: int = 2) -> None:
    """Wait until each of so many nodes shows bars with these beginnings, from top to bottom."""

    def there() -> bool:
        browser.listen()
        found = bars_of(browser, cell)
        same = [
            len(bars) == len(texts) and all(bar.startswith(text) for bar, text in zip(bars, texts, strict=True))
            for bars in found.values()
        ]
        return len(same) == nodes and all(same)

    wait_until(there, 60, lambda: f"{texts} in {bars_of(browser, cell)}")


def untimed(text: str) -> list[str]:
    """Lines of text; bars without what is drawn, their times and rates."""
    bars = re.sub(r"\|[█▏▎▍▌▋▊▉ ]+\| (\d+/\d+) \[\d\d:\d\d<[^,\]]*, *[^,\]]*([^\]]*)\]", r" \1\2", text)
    return [line for line in bars.splitlines() if line]


NESTED = """%%on_all
for epoch in tqdm(range(2), desc="epochs", mininterval=0):
    for step in trange(4, desc=f"steps of {epoch}", leave=epoch == 1):
        if step == 2: hold(f"nested-{epoch}")
    print("epoch", epoch)
"""


def test_nested_bars_are_widgets_of_each_node_and_in_the_end_lines_between_what_was_printed(browser: Browser) -> None:
    cell = browser.start(NESTED)
    until_bars(browser, cell, "epochs:   0% 0  0/2 [", "steps of 0:")
    (browser.folder / "nested-0").touch()
    until_bars(browser, cell, "epochs:  50% 0.5  1/2 [", "steps of 1:")
    # The bars of a node stand together, and its second inner bar has the widgets of the first.
    assert len({place for place, bundle in cell.bundles.items() if WIDGET_MIME in bundle}) == 2
    boxes = [box for box in browser.models.values() if box["_model_name"] == "VBoxModel"]
    assert [len(box["children"]) for box in boxes] == [2, 2]
    (browser.folder / "nested-1").touch()
    browser.until(cell)
    assert cell.error is None
    lines = ["epoch 0", "steps of 1: 100% 4/4", "epoch 1", "epochs: 100% 2/2"]
    for node, rank in (("local", 0), ("local-2", 1)):
        assert "\n".join([f"[{node} · rank {rank}]", *lines]) in "\n".join(untimed(cell.shown)), cell.shown
    # Nothing of the widgets is left in what is saved, in the notebook's kernel or on the nodes.
    assert all(WIDGET_MIME not in bundle for bundle in cell.bundles.values())
    wait_until(lambda: browser.listen() or not browser.models, 60, lambda: str(browser.models))
    left = "from ipywidgets.widgets import widget\nlen(widget._instances)"
    assert "[all 2 nodes]\nOut: 0" in browser.works(f"%%on_all\n{left}")


def test_bars_of_auto_show_a_postfix_and_what_was_set_last(browser: Browser) -> None:
    cell = browser.start("""%%on_all
from tqdm.auto import tqdm as auto
with auto(total=400, desc="loss") as bar:
    for step in range(300):
        bar.update()
        bar.set_postfix(loss=step)
    hold("postfix")
""")
    until_bars(browser, cell, "loss:  75% 0.75  300/400 [")
    wait_until(
        lambda: browser.listen() or all("loss=299]" in bar for bars in bars_of(browser, cell).values() for bar in bars),
        60, lambda: str(bars_of(browser, cell)),
    )  # fmt: skip
    (browser.folder / "postfix").touch()
    browser.until(cell)
    assert untimed(cell.shown)[-1] == "loss:  75% 300/400, loss=299"


def test_a_bar_in_which_an_error_happens_stands_as_text_before_the_traceback(browser: Browser) -> None:
    cell = browser.start("""%%on_all
for step in tqdm(range(10), desc="broken"):
    if step == 5:
        hold("broken")
        raise ValueError(f"rank {rank}")
""")
    until_bars(browser, cell, "broken:")
    (browser.folder / "broken").touch()
    browser.until(cell)
    assert cell.error is not None
    for rank in (0, 1):
        block = next(text for text in cell.displays.values() if f"ValueError: rank {rank}" in text)
        own = block[block.index(f"rank {rank}]") :]
        assert 0 < own.index("broken:") < own.index("Traceback (most recent call last)")
    # Not once more when the traceback, which holds the loop, is gone.
    again = browser.works("%%on_all\nimport gc, sys\ntry: 1 / 0\nexcept ZeroDivisionError: pass\nsys.last_value = "
                          "sys.last_traceback = sys.last_exc = None\ngc.collect()\nprint('on')")  # fmt: skip
    assert again == "[all 2 nodes]\non"


def test_a_bar_that_goes_on_in_a_later_cell_is_shown_there(browser: Browser) -> None:
    first = browser.works("%%on_all\nbar = tqdm(total=4, desc='twice')\nbar.update(1)\nbar.refresh()")
    assert untimed(first)[-1].startswith("twice:  25%")
    cell = browser.start("%%on_all\nbar.update(2)\nbar.refresh()\nhold('twice')\nbar.close()")
    until_bars(browser, cell, "twice:  75% 0.75  3/4")
    (browser.folder / "twice").touch()
    browser.until(cell)
    assert untimed(cell.shown)[-1] == "twice:  75% 3/4"


def test_a_bar_is_shown_again_after_the_output_was_cleared(browser: Browser) -> None:
    cell = browser.start("""%%on_all
from IPython.display import clear_output
with tqdm(total=3, desc="plots") as bar:
    for step in range(3):
        clear_output(wait=True)
        print("plot", step)
        bar.update()
        bar.refresh()
    hold("plots")
""")
    until_bars(browser, cell, "plots: 100% 1  3/3")
    (browser.folder / "plots").touch()
    browser.until(cell)
    assert untimed(cell.shown)[-1] == "plots: 100% 3/3"
    assert "plot 2" in cell.shown
    assert "plot 1" not in cell.shown


def test_a_thousand_bars_are_lines_and_few_messages(browser: Browser) -> None:
    before = browser.messages
    cell = browser.run("%%on_all\nfor n in range(1000):\n    for step in trange(2, leave=n > 990): pass")
    assert cell.error is None
    assert len([line for line in untimed(cell.shown) if "2/2" in line]) in (9, 18)
    assert len({place for place in cell.bundles if "/progress-" in place and "/label" not in place}) == 2
    assert browser.messages - before < 200


def test_stop_leaves_the_bar_as_text(browser: Browser) -> None:
    cell = browser.start("%%on_all\nfor step in tqdm(range(10), desc='stopped'): hold('never')")
    until_bars(browser, cell, "stopped:   0% 0  0/10")
    browser.manager.interrupt_kernel()
    browser.until(cell)
    assert cell.error is not None
    assert "stopped:   0% 0/10" in "\n".join(untimed(cell.shown))
    assert all(WIDGET_MIME not in bundle for bundle in cell.bundles.values())


def test_of_a_node_that_dies_a_word_about_its_bar_is_saved(browser: Browser) -> None:
    cell = browser.run("%%on 1 --no-replay\nimport os\nfor step in tqdm(range(9), desc='deadly'):\n"
                       "    if step: time.sleep(1); os._exit(3)")  # fmt: skip
    assert cell.error is not None
    assert "[progress bar deadly]" in cell.displays.values()
    browser.works("%cluster restart local-2")
    browser.works(f"%%on_all\n{IMPORTS}{HOLD}")


def test_bars_of_a_cell_that_runs_beside_the_notebook(browser: Browser) -> None:
    cell = browser.start("%%on_all --async -o run\nfor step in trange(2, desc='beside'): hold('beside')")
    until_bars(browser, cell, "beside:   0% 0  0/2")
    (browser.folder / "beside").touch()
    browser.works("run.wait()")
    assert "beside: 100%" in browser.works("print(run.output(0))")


@pytest.mark.parametrize("imported", ["tqdm.auto", "tqdm.notebook"])
def test_bars_are_text_where_nobody_is_shown_widgets(browser: Browser, imported: str) -> None:
    code = f"%%on_all\nfrom {imported} import tqdm as bar\nfor step in bar(range(30), desc='headless'): pass"
    cell = browser.run(code, allow_stdin=False)
    assert cell.error is None
    assert untimed(cell.shown)[-1] == "headless: 100% 30/30"
    assert not any("progress-" in place for place in cell.bundles)


def test_bars_that_are_captured_are_text(browser: Browser) -> None:
    code = (
        "import contextlib, io\nwith contextlib.redirect_stderr(io.StringIO()) as kept:\n    for _ in trange(3): pass\n"
    )
    cell = browser.run(f"%%on_all\n{code}print('3/3' in kept.getvalue())")
    assert cell.shown == "[all 2 nodes]\nTrue"
