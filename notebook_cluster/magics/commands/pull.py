"""``%pull``: variables of the nodes as variables of the notebook. Nothing from a node is unpickled."""

import keyword
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.display.progress import Progress
from notebook_cluster.magics.errors import ClusterProblem, UsageError
from notebook_cluster.magics.execution.cells import run_cell
from notebook_cluster.magics.language.parsing import Invocation
from notebook_cluster.magics.language.targets import resolve
from notebook_cluster.magics.results import shortened
from notebook_cluster.magics.session import Session

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster, Pulled
    from notebook_cluster.protocol.state import NodeView

_MOST_NAMES = 6


def pull(session: Session, cluster: "Cluster", call: Invocation) -> None:
    """Set each name to ``{node: value}``, or with ``--from`` one node to the value itself, and say what came.

    Raises:
        UsageError: no name of a variable, an unknown node, or a variable that no node has.
        ClusterProblem: a value cannot be sent.
        RemoteError, CellInterrupted, ClusterError: as for any cell.
    """
    names, variable = _names(call)
    nodes = cluster.state().nodes
    words = call.options.get("from", ())
    targets = resolve(words or ("all",), nodes)
    alone = _is_one_node(words, nodes)
    results = _ask(session, cluster, names, targets)
    problems: list[Exception] = []
    for name in names:
        values = {node: answer.value for node, answer in results[name].items() if not _is_refused(answer)}
        if not values:
            problems.append(_nothing(name, results[name]))
            continue
        into = variable or name
        before = session.shell.user_ns.get(into, _NOTHING)
        session.shell.user_ns[into] = values[targets[0]] if alone else values
        print(_said(name, into, values, alone, before))
        for line in _left_out(name, results[name]):
            print(line)
    if problems:
        raise problems[0]


_NOTHING = object()


def _names(call: Invocation) -> tuple[list[str], str]:
    """The names to pull, each once, and the variable of ``--as``."""
    names = call.names
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(
                f"{name!r} is not the name of a variable: give what you want a name in a %%on_all cell, then %pull that"
            )
    variable = call.options.get("as", "")
    if variable and len(names) != 1:
        raise UsageError(f"--as {variable} is for one variable, not for {len(names)}: %pull {names[0]} --as {variable}")
    return names, variable


def _is_one_node(words: Sequence[str], nodes: "Sequence[NodeView]") -> bool:
    """True for ``--from`` one name or rank: the shape of the result must not depend on how many nodes there are."""
    named = {node.name for node in nodes} | {str(node.rank) for node in nodes}
    return len(words) == 1 and words[0] in named


def _ask(
    session: Session, cluster: "Cluster", names: Sequence[str], targets: Sequence[str]
) -> "dict[str, dict[str, Pulled]]":
    from notebook_cluster.client import give_source, new_ticket, read_values

    ticket = new_ticket()
    # The first line is what panel and journal show of a cell.
    source = f"# %pull {' '.join(names)}\n{give_source(ticket, names)}"
    run_cell(cluster, session.shell, source, targets, replay=False)
    with Progress(session.shell, f"pulling {', '.join(names)}") as progress:
        return read_values(cluster, ticket, names, targets, progress)


def _is_refused(answer: "Pulled") -> bool:
    return answer.missing or bool(answer.problem)


def _nothing(name: str, answers: "Mapping[str, Pulled]") -> Exception:
    """The error when no node gave a value."""
    refused = [node for node, answer in answers.items() if answer.problem]
    if refused:
        first = answers[refused[0]].problem
        return ClusterProblem(f"cannot pull {name!r} from {_list(refused)}: {first}")
    near = next((answer.near for answer in answers.values() if answer.near), "")
    hint = f" (did you mean {near!r}?)" if near else ""
    who = f"{next(iter(answers))} has no" if len(answers) == 1 else "no node has a"
    error: Exception = UsageError(f"{who} variable {name!r}{hint}")
    return error


def _said(name: str, into: str, values: Mapping[str, Any], alone: bool, before: object) -> str:
    from notebook_cluster.values.encoding import describe

    kinds: dict[str, list[str]] = {}
    for node, value in values.items():
        kinds.setdefault(describe(value), []).append(node)
    if len(kinds) == 1:
        what = next(iter(kinds))
    else:
        what = ", ".join(f"{_list(nodes)} {kind}" for kind, nodes in list(kinds.items())[:_MOST_NAMES])
        what += ", ..." if len(kinds) > _MOST_NAMES else ""
    shape = "" if alone else " as {node: value}"
    named = "" if into == name else f" into {into}"
    text = f"pulled {name} from {_list(list(values))}{named}{shape}: {what}"
    return text if before is _NOTHING else f"{text} (in place of the notebook's own {into}: {describe(before)})"


def _left_out(name: str, answers: "Mapping[str, Pulled]") -> list[str]:
    """A line for each reason for which nodes gave no value."""
    missing = [node for node, answer in answers.items() if answer.missing]
    lines = [f"{name!r} is not on {_list(missing)}"] if missing else []
    reasons: dict[str, list[str]] = {}
    for node, answer in answers.items():
        if answer.problem:
            reasons.setdefault(answer.problem, []).append(node)
    return lines + [f"{name!r} did not come from {_list(nodes)}: {reason}" for reason, nodes in reasons.items()]


def _list(nodes: Sequence[str]) -> str:
    return shortened(nodes, _MOST_NAMES)
