"""The strip under a cell that trains, as people see it: real JupyterLab, real kernels, the system's Chromium."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests import axe
from tests.browser import (
    PATIENCE,
    Lab,
    browser_page,
    needs_chromium,
    open_next_notebook,
    open_notebook,
    run_all,
    save,
    shared_lab,
    shut_down_kernels,
    write_notebook,
)
from tests.conftest import wait_until
from tests.sidebar_page import use_theme

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = needs_chromium

START = "%load_ext notebook_cluster\n%cluster start --local 3 --no-panel"
TRAIN = """%%on_all
import math, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sync = nc.DiLoCo(model, every=10, name="a-model-with-a-name-of-sixty-letters-" + "x" * 22)
data = torch.randn(3000, 64)
epoch = 0
while True:
    for (x,) in nc.shard((data,), batch_size=20):
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(0.01)
        if sync.step(loss, samples=len(x)):
            with sync.global_model():
                nc.report(loss=64 * math.exp(-sync.round / 20))
    epoch = epoch + 1
"""
STRIP = ".nbc-strip"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with shared_lab() as running:
        yield running


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator["Page"]:
    with browser_page(lab) as opened:
        yield opened
        shut_down_kernels(opened)


def fact(page: "Page", label: str) -> str:
    found: str = page.evaluate(
        """([strip, label]) => [...document.querySelectorAll(`${strip} .nbc-fact`)]
            .filter(one => one.children[0].textContent === label).map(one => one.children[1].textContent)[0] ?? ''""",
        [STRIP, label],
    )
    return found


def overflowing(page: "Page") -> list[str]:
    """Texts of the strip that leave it."""
    found: list[str] = page.evaluate(
        """strip => [...document.querySelectorAll(strip)].flatMap(one => {
            const { left, right } = one.getBoundingClientRect();
            return [...one.querySelectorAll('div, span, svg')].filter(part => {
                const box = part.getBoundingClientRect();
                return box.width > 0 && (box.left < left - 1 || box.right > right + 1);
            }).map(part => part.textContent.slice(0, 60));
        })""",
        STRIP,
    )
    return found


def is_accessible(page: "Page", zoom: int) -> bool:
    """While the page draws the strip anew none of its text is to be seen for a moment: ask again."""
    return not axe.SCRIPT.exists() or not axe.violations(page, STRIP, zoom)


def test_the_strip_moves_under_its_cell_fits_and_stays_in_the_file(
    page: "Page", lab: Lab, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pictures = tmp_path_factory.mktemp("strip")
    path = write_notebook(lab.folder / "strip.ipynb", [START, TRAIN, "print('after')"])
    open_next_notebook(page, "strip.ipynb")
    run_all(page)
    page.wait_for_selector(STRIP, timeout=PATIENCE)
    assert page.locator(".jp-CodeCell").nth(1).locator(STRIP).count() == 1
    wait_until(lambda: int(fact(page, "Round") or 0) >= 3, PATIENCE / 1000, lambda: fact(page, "Round"))
    before = fact(page, "Step")
    wait_until(lambda: fact(page, "Step") != before, 60, "another step")
    page.locator(f"{STRIP} svg path").first.wait_for(state="attached", timeout=PATIENCE)
    assert page.locator(f"{STRIP} .nbc-strip-node").count() == 3
    for width in (640, 900, 1280, 1600):  # 640: 1,280 at 200 %
        page.set_viewport_size({"width": width, "height": 1000})
        assert overflowing(page) == []
        page.evaluate("strip => document.querySelector(strip).scrollIntoView({ block: 'end' })", STRIP)
        page.screenshot(path=pictures / f"{width}.png")
    page.set_viewport_size({"width": 1280, "height": 1000})
    page.locator("[data-command='notebook:interrupt-kernel']").first.click()
    page.locator(f"{STRIP} .nbc-pill").get_by_text("stopped after").wait_for(timeout=PATIENCE)
    for theme in axe.THEMES:
        use_theme(page, theme)
        for zoom in (1, 2):
            wait_until(partial(is_accessible, page, zoom), 60, lambda: str(axe.violations(page, STRIP)))
        page.screenshot(path=pictures / f"{theme}.png")
    assert page.locator(STRIP).count() == 1
    save(page)
    wait_until(lambda: "stopped after" in path.read_text(), 60, "the saved notebook")
    outputs = nbformat.read(path, as_version=4).cells[1].outputs
    kept = [out for out in outputs if "nbc-strip" in str(out.get("data", {}).get("text/html", ""))]
    assert len(kept) == 1
    assert "stopped after" in kept[0]["data"]["text/plain"]

    shut_down_kernels(page)
    page.reload()
    open_notebook(page, "strip.ipynb")
    page.locator(f"{STRIP} .nbc-pill").get_by_text("stopped after").wait_for(timeout=PATIENCE)
    assert page.locator(f"{STRIP} svg path").count() >= 1
