"""What each subcommand of ``%cluster`` does: asks the client, says what happened."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.class_commands import class_command
from notebook_cluster.magics.curve_commands import compare, export, replay, track
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.execution.cells import watch_cell
from notebook_cluster.magics.execution.handle import CellHandle, follow_cell
from notebook_cluster.magics.node_commands import grow, launch_options, nodes_of, remove, restart, shrink, skip
from notebook_cluster.magics.parsing import Invocation, find_node
from notebook_cluster.magics.session import NotebookSession
from notebook_cluster.magics.take_over_command import hand_over, take_over
from notebook_cluster.magics.transfer_commands import bench, send
from notebook_cluster.protocol.names import did_you_mean

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster
    from notebook_cluster.protocol.state import ClusterView

_KEPT_LINES = 3


def run_command(session: NotebookSession, call: Invocation) -> Any:
    """Run one parsed subcommand; what it returns is the line's value.

    Raises:
        UsageError: it does not fit what is there (no cluster, no such node).
        ClusterError: the cluster refused it.
        RemoteError: the cell that was watched (start, attach) failed.
    """
    return _COMMANDS[call.command.name](session, call)


def _start(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.client import Cluster

    name = call.argument or session.default_name
    began = time.monotonic()
    if call.options.get("fresh") and session.cluster is not None and session.cluster.name == name:
        session.let_go()
    cluster = Cluster.start(
        name, local=call.options.get("local"), peers=call.options.get("peers", ()), nodes=call.options.get("nodes", 0),
        code=call.options.get("code", ""), invite=call.options.get("invite", False), head=call.options.get("head", ""),
        **launch_options(call), fresh=call.options.get("fresh", False), kind="magics", on_progress=_say,
    )  # fmt: skip
    session.hold(cluster)
    state = cluster.state()
    if cluster.attached:
        holds = "; they hold what cells made (%cluster restart all --no-replay empties them)" if state.cell else ""
        _say(f"attached to cluster {name!r}, which runs already: {nodes_of(state)}{holds}")
    else:
        _say(f"cluster {name!r} is ready in {time.monotonic() - began:.1f} s: {nodes_of(state)}")
        for line in [peer.kept[0] for peer in state.peers if peer.kept][:_KEPT_LINES]:
            _say(line)
    if not call.options.get("no_panel"):
        _show_panel(session, cluster)
    _watch_running(session, cluster, state)


def _attach(session: NotebookSession, call: Invocation) -> CellHandle | None:
    cluster = _reach(session, call.argument, only_one_is_enough=True)
    session.hold(cluster)
    state = cluster.state()
    _say(f"attached to cluster {cluster.name!r}: {nodes_of(state)}")
    shown = _watch_running(session, cluster, state, background=call.options.get("async", False))
    if not shown:
        _say("no cell is running on it")
    return shown if isinstance(shown, CellHandle) else None


def _cells(session: NotebookSession, call: Invocation) -> None:
    wanted = call.argument or ("all" if session.sticky else "local")
    if wanted not in ("all", "local"):
        raise UsageError(f"%cluster cells {wanted}: say all or local{did_you_mean(wanted, ('all', 'local'))}")
    if wanted == "all":
        count = sum(node.rank is not None for node in session.require().state().nodes)
        session.sticky = True
        _say(
            f"cells run on all nodes ({count} now); %%local in front of a cell runs it here, %cluster cells local "
            "ends this"
        )
    else:
        session.sticky = False
        _say("cells run in the notebook; %%on_all in front of a cell runs it on every node")


def _add(session: NotebookSession, call: Invocation) -> None:
    cluster = session.require()
    before = {node.name for node in cluster.state().nodes}
    added = cluster.add(call.argument, call.options.get("count", 0), code=call.options.get("code", ""))
    new, there = [name for name in added if name not in before], [name for name in added if name in before]
    what = ", ".join(new) if new else "no node: everything there is in the cluster already"
    if there and not new:
        what = f"no node: {', '.join(there)} is there already, %cluster add {call.argument} --count 1 adds one more"
    _say(f"added {what}; {nodes_of(cluster.state())}")


def _invite(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.client import how_to_join

    cluster = session.require()
    if call.options.get("close"):
        cluster.close_invitation()
        _say("nobody else may join with a code; machines that came stay")
        return
    _say(how_to_join(cluster.invite(call.options.get("code", ""), call.options.get("minutes", 120.0))))


def _doctor(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.widgets import render_findings

    cluster = session.require()
    _say("examining machines and network ...")
    findings = cluster.examine(call.options.get("packages", ()))
    _display(session, render_findings(findings), render_findings(findings, html=True))


def _peers(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.widgets import render_peers

    if session.cluster is not None:
        found = session.cluster.state().peers
    else:
        from notebook_cluster.client import find_peers

        _say("looking for peers ...")
        found = find_peers()
    _display(session, render_peers(found), render_peers(found, html=True))


def _status(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.widgets import render_html, render_text

    cluster = session.require()
    state, series = cluster.state(), cluster.series()
    _display(session, render_text(state, series), render_html(state, series))
    if session.sticky:
        _say("cells run on all nodes: %cluster cells local ends this")


def _report(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.widgets import write_report

    overwrite = call.options.get("overwrite", False)
    over = session.name_of_ended()
    try:
        if over:
            from notebook_cluster.client import read_last_run

            run = read_last_run(over)
            file = write_report(run, call.argument, overwrite=overwrite, ended=run.ended)
            what = f"the last run of cluster {over!r} ({run.ended})"
        else:
            cluster = session.require()
            file = write_report(cluster, call.argument, overwrite=overwrite)
            what = f"cluster {cluster.name!r}"
    except (OSError, ValueError) as error:
        raise UsageError(f"%cluster report: {error}") from None
    _say(f"the report of {what} is in {file}")


def _runs(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.client import Cluster, runs_table
    from notebook_cluster.widgets import render_table

    heads, rows = runs_table(Cluster.runs())
    if not rows:
        _say("no run was kept yet: %cluster start")
        return
    table = [heads, *rows]
    after = "%cluster export FILE.csv --run CLUSTER@STARTED writes the curves of one, as --run lesson@2026-11-19T14:03"
    _display(session, render_table(table, "", after), render_table(table, "", after, html=True))


def _estimate(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.memory import amount
    from notebook_cluster.processors import machine_memory
    from notebook_cluster.training.loop.costs import estimate
    from notebook_cluster.widgets import render_table

    cluster, parameters = session.cluster, int(call.argument)
    there = cluster.state().nodes if cluster is not None and cluster.connected else []
    nodes = call.options.get("nodes") or sum(node.rank is not None for node in there) or 2
    try:
        codec, fragments = call.options.get("codec", ""), call.options.get("fragments", 1)
        momentum, state = call.options.get("momentum", "float32"), call.options.get("state", "memory")
        rows = estimate(parameters, nodes, codec, fragments, momentum, state)
    except ValueError as error:
        raise UsageError(f"%cluster estimate: {error}") from None
    free, total = machine_memory()
    before = (
        f"{parameters:,} parameters ({amount(4 * parameters)} in float32, which the model holds) on {nodes} "
        f"node{'s' if nodes > 1 else ''}; each takes, beside the model with its gradients and optimizer:"
    )
    after = (
        "Memory: in a cell that trains, and after it. Sent, and the times: a round, on a network of that speed for "
        f"each node, computed as fast as here now.\nThis machine has {amount(total)}, of which {amount(free)} are free."
    )
    _display(session, render_table(rows, before, after), render_table(rows, before, after, html=True))


def _vars(session: NotebookSession, call: Invocation) -> None:
    from notebook_cluster.widgets import render_variables

    columns = session.require().variables(call.argument, everything=call.options.get("all", False))
    _display(session, render_variables(columns), render_variables(columns, html=True))


def _panel(session: NotebookSession, call: Invocation) -> None:
    _show_panel(session, session.require())


def _logs(session: NotebookSession, call: Invocation) -> None:
    cluster = session.require()
    node = find_node(call.argument, cluster.state().nodes)
    lines = cluster.logs(node, call.options.get("lines", 100))
    _say("\n".join(lines) if lines else f"{node} has written nothing to its log")


def _detach(session: NotebookSession, call: Invocation) -> None:
    cluster = _reach(session, "")
    try:
        cluster.detach()
    finally:
        if cluster is not session.cluster:
            cluster.close()
    _say(f"cluster {cluster.name!r}: no notebook waits for a cell any more; the nodes go on")


def _stop(session: NotebookSession, call: Invocation) -> None:
    cluster = _reach(session, call.argument)
    try:
        state = cluster.state()
        cluster.stop()
    finally:
        if cluster is session.cluster:
            session.let_go()
        else:
            cluster.close()
    running = state.cell is not None and state.cell.ended is None
    _say(f"cluster {cluster.name!r} has ended, with its {'running cell and ' if running else ''}{nodes_of(state)}")


def _reach(session: NotebookSession, name: str, *, only_one_is_enough: bool = False) -> "Cluster":
    """The notebook's cluster, or the running one called ``name``, or (no name) the one of this notebook's name."""
    from notebook_cluster.client import Cluster, running_clusters

    if session.cluster is not None and name in ("", session.cluster.name) and session.cluster.connected:
        return session.cluster
    running = running_clusters()
    if not name and session.default_name in running:
        name = session.default_name
    if not name and not only_one_is_enough:
        elsewhere = f"; running elsewhere: {', '.join(running)}" if running else ""
        raise UsageError(f"no cluster is running in this notebook: %cluster start{elsewhere}")
    return Cluster.attach(name or None, kind="magics")


def _watch_running(
    session: NotebookSession, cluster: "Cluster", state: "ClusterView", *, background: bool = False
) -> "bool | CellHandle":
    """Show the cell that runs now until it ends, or (``background``) a handle to it; False when none runs."""
    if state.cell is None or state.cell.ended is not None:
        return False
    handle = session.handle_of(state.cell.id)
    if handle is None and background:
        handle = follow_cell(cluster, session.shell, state.cell.id)
        session.handles.append(handle)
    elif handle is not None and not background:
        _say(f"cell {state.cell.id} is running, with --async from this notebook")
        return True
    if handle is not None:
        return handle
    _say(f"cell {state.cell.id} is running; Stop ends the watching only:")
    watch_cell(cluster, session.shell, state.cell.id)
    return True


def _show_panel(session: NotebookSession, cluster: "Cluster") -> None:
    from notebook_cluster.widgets import show_panel

    show_panel(cluster, headless=session.headless)


def _say(text: str) -> None:
    print(text, flush=True)


def _display(session: NotebookSession, text: str, html: str) -> None:
    session.shell.display_pub.publish(data={"text/plain": text, "text/html": html}, metadata={})


_COMMANDS: dict[str, Callable[[NotebookSession, Invocation], Any]] = {
    "start": _start,
    "take-over": take_over,
    "hand-over": hand_over,
    "add": _add,
    "invite": _invite,
    "class": class_command,
    "doctor": _doctor,
    "bench": bench,
    "grow": grow,
    "shrink": shrink,
    "remove": remove,
    "restart": restart,
    "skip": skip,
    "peers": _peers,
    "status": _status,
    "panel": _panel,
    "report": _report,
    "estimate": _estimate,
    "export": export,
    "replay": replay,
    "track": track,
    "runs": _runs,
    "compare": compare,
    "vars": _vars,
    "logs": _logs,
    "attach": _attach,
    "cells": _cells,
    "send": lambda session, call: send(session, session.require(), call),
    "detach": _detach,
    "stop": _stop,
}
