"""A cell with a canary: one node runs it first, in a world of its own; the others run it when that went well."""

from typing import TYPE_CHECKING, Any

from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Cell
from notebook_cluster.protocol.views import Execute, RequestError

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator


def check(hub: "Coordinator", request: Execute) -> None:
    """Refuse a canary that cannot be the first.

    Raises:
        RequestError: no node of the cluster, not up, or not among the targets.
    """
    name = request.canary
    if not name:
        return
    node = hub.members.known(name)
    if not node.is_in:
        raise RequestError(f"the canary {name!r} is {node.condition}: name another one with --canary NODE")
    if request.targets and name not in request.targets:
        among = ", ".join(request.targets)
        raise RequestError(f"the canary {name!r} is not among the nodes that run the cell: {among}")


def go_on(hub: "Coordinator", cell: Cell) -> bool:
    """The canary has ended: start the others when it went well, else note that they do not run it.

    Returns:
        True when the cell goes on.
    """
    if not cell.canary or cell.widened:
        return False
    # Nodes that replay earlier cells join this one when they have caught up.
    replaying = hub.replay.names()
    others = [
        node.name
        for node in hub.state.roster_nodes()
        if cell.wants(node.name) and node.name != cell.canary and node.name not in replaying
    ]
    status = cell.nodes.get(cell.canary)
    if status == "interrupted" or hub.cells.was_interrupted(cell.id):
        return False
    hub.record(e.CellWidened(cell=cell.id, nodes=others if status == "ok" else [], generation=hub.state.generation))
    if status != "ok":
        reason = f"only {cell.canary}, the canary, ran it"
        for name in others:
            hub.record(e.CellNodeEnded(cell=cell.id, node=name, status="cancelled", reason=reason))
        return False
    if not others:
        return False
    hub.rounds.cell_started(cell.id, others)
    widened = hub.state.cells[cell.id]
    metadata: dict[str, Any] = {"cell": cell.id, "generation": hub.state.generation, "nodes": others}
    for name in others:
        hub.cells.runs.start(widened, name, metadata)
    count = "the other node" if len(others) == 1 else f"the other {len(others)} nodes"
    hub.cells.changed(cell.id, f"{cell.canary} ran it without an error: now {count}")
    return True
