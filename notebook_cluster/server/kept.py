"""What stays to be read of a node or of a cluster that has ended: the last lines of a log, and the report of a run."""

from collections.abc import Sequence

from notebook_cluster.client import ClusterError, find_run, named_run, read_run
from notebook_cluster.protocol.state import ClusterView, NodeView
from notebook_cluster.widgets.formatting import printable
from notebook_cluster.widgets.report import render_report

LOG_LINES, MOST_LOG_LINES = 200, 1000
LINE_LIMIT = 2000
LOG_CHARACTERS = 64_000
"""Of all lines together: what a node writes is not this server's to carry without end."""


def log_node(state: ClusterView | None, name: str) -> NodeView:
    """The node of this cluster that is called ``name``.

    Raises:
        ClusterError: there is none; names those that there are.
    """
    nodes = state.nodes if state is not None else []
    found = next((node for node in nodes if node.name == name), None)
    if found is None:
        known = ", ".join(node.name for node in nodes) or "it has none"
        raise ClusterError(f"log of {name!r:.100}: the cluster has no such node ({known})")
    return found


def readable_log(lines: Sequence[str]) -> list[str]:
    """``lines`` as text that steers nothing, without colours. The oldest are left out where there is too much."""
    kept: list[str] = []
    room = LOG_CHARACTERS
    for line in reversed(lines[-MOST_LOG_LINES:]):
        shown = printable(line.expandtabs(4), LINE_LIMIT).rstrip()
        room -= len(shown) + 1
        if room < 0:
            break
        kept.append(shown)
    return kept[::-1]


def report_of(cluster: str, started: float | None) -> str:
    """The report, one HTML page, of the run of ``cluster`` that began at ``started`` (None: of its last run).

    Raises:
        ClusterError: no such run was kept, or it is damaged.
    """
    kept = find_run(cluster if started is None else named_run(cluster, started))
    run = read_run(kept.folder)
    return render_report(run.state(), run.series(), run.history(), ended=run.ended)
