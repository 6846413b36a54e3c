"""How a cluster is shown: the notebook panel, and the same state as static HTML and as plain text.

May import: ``client``, ``protocol``. Called by: ``magics`` (``%cluster panel``, ``status``, ``peers``), ``cli`` (the
text) and ``server`` (:mod:`.model`). Views hold no state of their own: all comes from a ClusterView and from Series.

- :mod:`.model` turns a ClusterView into plain JSON with ready texts, :mod:`.class_board` into those of a class's page;
  every renderer draws that.
- :mod:`.text`, :mod:`.static_html`, :mod:`.tables`, :mod:`.comparison`, :mod:`.pictures`: need no browser. Pure
  functions. :mod:`.report`: a whole run as one page in a file, :mod:`.replay`: one that plays it
  in the panel; :mod:`.line_chart`: curves of the user's own.
- :mod:`.panel`: the live panel and the one thread that changes it; ``panel.js`` is what the browser sees,
  :mod:`.figure` the plotly curves, :mod:`.drawn_curves` those where plotly is not installed, :mod:`.subshell` what lets
  a button act while a cell runs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from notebook_cluster.protocol.interaction import NodeVariables
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.views import Finding
from notebook_cluster.widgets.comparison import compare_runs
from notebook_cluster.widgets.line_chart import LineChart
from notebook_cluster.widgets.replay import write_replay
from notebook_cluster.widgets.report import write_report
from notebook_cluster.widgets.static_html import render_html, render_peers_html
from notebook_cluster.widgets.tables import (
    findings_html,
    findings_text,
    table_html,
    table_text,
    variables_html,
    variables_text,
)
from notebook_cluster.widgets.text import render_peers_text, render_text

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

__all__ = [
    "LineChart",
    "close_panel",
    "compare_runs",
    "render_findings",
    "render_html",
    "render_peers",
    "render_table",
    "render_text",
    "render_variables",
    "show_panel",
    "write_replay",
    "write_report",
]


def render_peers(peers: Sequence[PeerView], html: bool = False) -> str:
    """``peers`` as a table, plain text or HTML, that says of each why it can or cannot be added."""
    return render_peers_html(peers) if html else render_peers_text(peers)


def render_findings(findings: Sequence[Finding], html: bool = False) -> str:
    """The doctor's report, plain text or HTML: what is wrong first, each line with its table and its fix."""
    return findings_html(findings) if html else findings_text(findings)


def render_variables(columns: Sequence[NodeVariables], html: bool = False) -> str:
    """The variables of all nodes, plain text or HTML: name by node, marked where nodes differ."""
    return variables_html(columns) if html else variables_text(columns)


def render_table(rows: Sequence[Sequence[str]], before: str = "", after: str = "", html: bool = False) -> str:
    """``rows``, heads first, as a table between two texts, plain text or HTML."""
    return (table_html if html else table_text)(rows, before, after)


def show_panel(cluster: "Cluster", *, headless: bool = False, as_class: bool = False) -> None:
    """Display the panel of ``cluster`` in the current cell; one that is shown already appears a second time. With
    ``as_class`` it has the class's code and a row for each machine in place of the node cards.

    With ``headless``, or where no kernel can talk to widgets, HTML and text of the present state are displayed once,
    without any widget, so that a notebook run by nbclient or papermill stays small.
    """
    from notebook_cluster.widgets import panel  # ipywidgets and anywidget are loaded when a panel is wanted

    panel.show(cluster, headless=headless, as_class=as_class)


def close_panel(cluster: "Cluster") -> None:
    """End the panel of ``cluster``, if it is shown: what it showed last stays as a static picture."""
    from notebook_cluster.widgets import panel

    panel.close(cluster)
