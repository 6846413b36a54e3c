"""``%cluster grow``, ``shrink``, ``remove``, ``restart`` and ``skip``, and the options of ``%cluster start`` that mean
an engine and its hosts."""

from collections.abc import Sequence
from typing import Any

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.parsing import Invocation, find_node
from notebook_cluster.magics.session import NotebookSession
from notebook_cluster.protocol.launches import LAUNCH_OPTIONS
from notebook_cluster.protocol.state import CellView, ClusterView, NodeView


def launch_options(call: Invocation) -> dict[str, Any]:
    """What was typed of an engine and its hosts, as the client takes it. UsageError where the engine is missing."""
    typed = {name: call.options[name] for name in LAUNCH_OPTIONS if name in call.options}
    if any(name in call.options for name in ("fake", "slow", "kill")):
        if typed:
            raise UsageError(f"--fake plays machines on this one: leave --{next(iter(typed)).replace('_', '-')} out")
        return {"on": f"fake:{_played(call.options)}"}
    if typed and "on" not in typed:
        needs = (
            f"%cluster {call.command.name} --{next(iter(typed)).replace('_', '-')} is for hosts that an engine starts"
        )
        raise UsageError(f"{needs}: name it with --on slurm, or --on ssh:HOST,HOST")
    return typed


def grow(session: NotebookSession, call: Invocation) -> None:
    cluster, options = session.require(), launch_options(call)
    if not options:
        raise UsageError("%cluster grow: name the engine with --on slurm, or --on ssh:HOST,HOST")
    cluster.grow(**options, on_progress=lambda text: print(text, flush=True))


def shrink(session: NotebookSession, call: Invocation) -> None:
    given = session.require().shrink(int(call.argument))
    print(f"given back: {', '.join(given)}", flush=True)


def remove(session: NotebookSession, call: Invocation) -> None:
    cluster = session.require()
    node = find_node(call.argument, cluster.state().nodes)
    cluster.remove(node)
    print(f"removed {node}; {nodes_of(cluster.state())}", flush=True)


def restart(session: NotebookSession, call: Invocation) -> None:
    """Of several nodes those that are back are named, also where others are not, which is the error then."""
    cluster = session.require()
    nodes = cluster.state().nodes
    names = [node.name for node in nodes]
    if call.names != ["all"] or "all" in names:
        names = list(dict.fromkeys(find_node(word, nodes) for word in call.names))
    replay, all_cells = not call.options.get("no_replay", False), call.options.get("all_cells", False)
    if all_cells and not replay:
        raise UsageError("%cluster restart: --all-cells and --no-replay exclude each other")
    if not names:
        raise UsageError("%cluster restart: the cluster has no node; %cluster add PEER takes a machine in")
    print(f"restarting {_listed(names)} ...", flush=True)
    try:
        cluster.restart(names, replay=replay, all_cells=all_cells, on_progress=lambda text: print(text, flush=True))
    finally:
        said: dict[str, list[str]] = {}
        for row in cluster.state().nodes:
            if row.name in names and row.condition == "ok":
                how = _replayed(row, cluster.history().cells) if replay else "with an empty namespace"
                said.setdefault(how, []).append(row.name)
        for how, back in said.items():
            print(f"{_listed(back)} {'is' if len(back) == 1 else 'are'} back, {how}", flush=True)


def _replayed(row: NodeView, cells: Sequence[CellView]) -> str:
    stopped = [str(cell.id) for cell in cells if cell.status == "interrupted" and row.name in cell.nodes]
    but = f", but for what was stopped (cell {', '.join(stopped)})" if stopped else ""
    return f"with the cluster's earlier cells replayed{but}" + (f", {row.left_out}" if row.left_out else "")


def skip(session: NotebookSession, call: Invocation) -> None:
    cluster = session.require()
    node = find_node(call.argument, cluster.state().nodes)
    cell = cluster.skip(node)
    print(f"cell {cell} is skipped on {node}: %cluster restart {node} --all-cells runs it again", flush=True)


def nodes_of(state: ClusterView) -> str:
    """``3 nodes (mini, desk, air: dead)``."""
    names = [node.name if node.condition == "ok" else f"{node.name}: {node.condition}" for node in state.nodes]
    return f"{len(names)} node{'' if len(names) == 1 else 's'}" + (f" ({_listed(names)})" if names else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


PLAYED = (
    "mini", "desk", "air", "attic", "lab", "tower", "studio", "couch", "kitchen", "garage", "garden", "library",
    "bridge", "harbour", "cellar", "roof",
)  # fmt: skip
"""What machines of ``--fake`` are called, in order."""


def _played(options: dict[str, Any]) -> str:
    """The machines as ``--on fake:`` takes them: ``mini,desk*4,air@60``."""
    if "fake" not in options:
        raise UsageError("--slow and --kill are for machines of --fake N: say how many")
    names = PLAYED[: options["fake"]]
    slow = _of_each("slow", "=", options, names)
    dies = {name: seconds.removesuffix("s") for name, seconds in _of_each("kill", "@", options, names).items()}
    return ",".join(
        name + (f"*{slow[name]}" if name in slow else "") + (f"@{dies[name]}" if name in dies else "") for name in names
    )


def _of_each(option: str, sign: str, options: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    found = dict(word.partition(sign)[::2] for word in options.get(option, ()))
    for name, value in found.items():
        if name not in names:
            raise UsageError(f"--{option} {name}{sign}{value}: the machines are {', '.join(names)}")
        if not value.removesuffix("s").replace(".", "", 1).isdecimal():
            example = f"--{option} {name}{sign}{'4' if sign == '=' else '60s'}"
            raise UsageError(f"--{option} {name}{sign}{value}: write {example}")
    return found
