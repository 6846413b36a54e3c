"""What the options of ``%%on_all`` and ``%%on`` ask for: waiting or a handle, values, a canary."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.errors import CellInterrupted, RemoteError
from notebook_cluster.magics.execution.cells import run_cell, visible_names
from notebook_cluster.magics.execution.handle import CellHandle, start_cell
from notebook_cluster.magics.execution.node_values import NodeValues
from notebook_cluster.magics.language.targets import choose_canary
from notebook_cluster.magics.session import Session
from notebook_cluster.protocol.state import NodeView

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster


def run_with_options(
    session: Session,
    cluster: "Cluster",
    source: str,
    targets: Sequence[str],
    nodes: Sequence[NodeView],
    options: dict[str, Any],
) -> CellHandle | None:
    """Run ``source`` on ``targets`` (empty: all) as ``options`` say; ``nodes`` are those of the cluster, for a canary.

    Raises:
        UsageError: a canary that is none.
        CellSyntaxError, RemoteError, CellInterrupted, ClusterError: as :func:`.cells.run_cell`.
    """
    how: dict[str, Any] = {"timeout": options.get("timeout"), "replay": not options.get("no_replay", False)}
    if "canary" in options:
        how["canary"] = choose_canary(options["canary"], targets, nodes)
    variable = options.get("output")
    if options.get("async"):
        if not source.strip():
            return None
        handle = start_cell(cluster, session.shell, source, targets, **how)
        session.handles.append(handle)
        if variable:
            session.shell.user_ns[variable] = handle
        return handle
    if not variable:
        run_cell(cluster, session.shell, source, targets, **how)
        return None
    values = NodeValues()
    try:
        run_cell(cluster, session.shell, source, targets, values=values, **how)
    except (RemoteError, CellInterrupted):
        session.shell.user_ns[variable] = values.in_rank_order()
        raise
    session.shell.user_ns[variable] = values.in_rank_order()
    return None


def follow_cell(session: Session, cluster: "Cluster", cell: int) -> CellHandle:
    """A handle to a cell that runs already; its output so far is shown too."""
    stream = cluster.watch(cell, background=True)
    handle = CellHandle(cluster, session.shell, stream, frozenset(visible_names(session.shell)))
    session.handles.append(handle)
    return handle
