"""The curves of a panel where plotly is not installed: the pictures that a saved panel has, drawn anew as points come.

plotly takes more of the disk than notebook-cluster and half of what it needs, and only a panel uses it: it is in the
extra ``charts``.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Union

from ipywidgets import HTML

from notebook_cluster.security.chart_grammar import NO_TEX
from notebook_cluster.widgets.curves import CurveChoice, Curves
from notebook_cluster.widgets.static_html import block, charts, text_block

if TYPE_CHECKING:
    from notebook_cluster.widgets.figure import CurvesFigure

OLDEST_PLOTLY = 6
"""The first whose figures a browser draws without an extension of their own."""
HINT = 'For curves to zoom into, with a value at each point: pip install "plotly>=6", then restart this kernel'


def new_figure() -> Union["CurvesFigure", "DrawnCurves"]:
    """The plotly figure, or pictures where there is no plotly that can be used."""
    try:
        major = int(version("plotly").partition(".")[0])
    except (PackageNotFoundError, ValueError):
        major = 0
    if major < OLDEST_PLOTLY:
        return DrawnCurves()
    from notebook_cluster.widgets.figure import CurvesFigure

    return CurvesFigure()


class DrawnCurves:
    """Used as :class:`.figure.CurvesFigure`: ``widget`` shows what was drawn last. One thread at a time."""

    def __init__(self) -> None:
        self.widget = HTML()
        self._is_shown = False

    def draw(self, curves: Curves, colours: Mapping[str, str], started: float, choice: CurveChoice) -> bool:
        """Show ``curves``; ``colours``: of each node, ``started`` (epoch seconds) is the zero of the time axis.

        Returns True the first time that there is something to see: the caller then shows the widget.
        """
        pictures = charts(curves, colours, started, choice)
        if not pictures:
            return False
        hint = text_block("nbc-small nbc-muted", HINT)
        self.widget.value = block(NO_TEX, [block("nbc-panel nbc-drawn", [pictures, hint])])
        is_first, self._is_shown = not self._is_shown, True
        return is_first
