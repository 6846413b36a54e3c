"""What axe-core finds wrong for people who use a screen reader, the keyboard, or need contrast."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

SCRIPT = Path(__file__).parents[1] / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
"""Comes with the packages that build the JupyterLab part."""
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
TALL = 4000
THEMES = ["JupyterLab Dark High Contrast", "JupyterLab Dark", "JupyterLab Light"]
"""Of JupyterLab, its default last."""
_RUN = """async ([selector, rules]) => {
    // JupyterLab's body has no height of its own: for axe all that is in it would be hidden, and its contrast unseen.
    document.body.style.minHeight = '100vh';
    const { violations, passes } = await axe.run(selector, { runOnly: rules });
    document.body.style.minHeight = '';
    const found = violations.flatMap(({ id, impact, nodes }) =>
        nodes.map(node => `${impact} ${id}: ${node.html}: ${node.failureSummary}`));
    const seen = passes.filter(({ id }) => id === 'color-contrast').flatMap(({ nodes }) => nodes)
        .filter(node => node.any.some(check => check.data?.contrastRatio));
    return seen.length ? found : [...found, `no text of ${selector} was seen`];
}"""


def violations(page: "Page", selector: str, zoom: int = 1) -> list[str]:
    """One text for each thing that is wrong inside the element that ``selector`` finds, also where it is scrolled.

    ``zoom`` 2: as a browser lays the page out at 200 %, with half as many pixels across.
    """
    if not page.evaluate("'axe' in window"):
        page.evaluate(SCRIPT.read_text())
    before = page.viewport_size
    assert before is not None
    page.set_viewport_size({"width": before["width"] // zoom, "height": TALL})
    try:
        page.wait_for_function(
            "selector => (one => one.scrollHeight <= one.clientHeight)(document.querySelector(selector))", arg=selector
        )
        found: list[str] = page.evaluate(_RUN, [selector, RULES])
    finally:
        page.set_viewport_size(before)
    return found
