"""``%push``, ``%pull`` and ``%cluster send``: variables and files to nodes, variables from them. ``%cluster bench``:
how fast nodes send to each other.

No pickle, in either direction.
"""

import keyword
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.display.publishing import ProgressLine
from notebook_cluster.magics.errors import ClusterProblem, UsageError, shortened
from notebook_cluster.magics.execution.cells import run_cell, visible_names
from notebook_cluster.magics.parsing import Invocation, resolve
from notebook_cluster.magics.session import NotebookSession
from notebook_cluster.memory import amount
from notebook_cluster.protocol.names import did_you_mean
from notebook_cluster.protocol.state import NodeView, by_rank

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster, Destination, Packed, Pulled

_MOST_NAMES = 6
_MOST_FILES = 5
_NOTHING = object()


def push(session: NotebookSession, cluster: "Cluster", call: Invocation) -> None:
    """Set each named variable on the nodes. Small values are kept in the cluster's cell log, for nodes that come later.

    Raises:
        UsageError: the notebook has no such variable, or an unknown node.
        ClusterError: a value does not travel, or a node has no room for it.
        RemoteError, CellInterrupted: as for any cell.
    """
    from notebook_cluster.client import new_ticket, pack, small_source, take_source, write_value

    shell = session.shell
    names = call.names
    for name in names:
        if not name.isidentifier() or name not in shell.user_ns:
            raise UsageError(f"the notebook has no variable {name!r}{did_you_mean(name, visible_names(shell))}")
    nodes = cluster.state().nodes
    words = call.options.get("to", ())
    targets = resolve(words or ("all",), nodes)
    large: list[str] = []
    # Each value is made only when it is its turn: two copies of one are enough.
    small: list[Packed] = []
    for name in names:
        packed = pack(name, shell.user_ns[name])
        if packed.is_small:
            small.append(packed)
            continue
        large.append(name)
        ticket = new_ticket()
        with ProgressLine(shell, f"pushing {name}") as progress:
            write_value(cluster, ticket, packed, targets, progress)
        source = f"# %push {name} ({amount(packed.size)})\n{take_source(packed, ticket)}"
        run_cell(cluster, shell, source, targets if words else (), replay=False)
    for batch in _batches(small):
        # The first line is what panel and journal show of a cell.
        first = f"# %push {' '.join(packed.name for packed in batch)}"
        source = "\n".join([first, *map(small_source, batch)])
        run_cell(cluster, shell, source, targets if words else ())
    count = f"{len(targets)} node{'' if len(targets) == 1 else 's'}"
    later = f"; nodes that restart or join later do not get {', '.join(large)}: push again then" if large else ""
    print(f"pushed {', '.join(names)} to {', '.join(targets) if words else count}{later}")


def _batches(small: "Sequence[Packed]") -> "Iterator[list[Packed]]":
    """Small values together, so that pushing ten numbers is one cell."""
    from notebook_cluster.client import MOST_REPLAYED

    batch: list[Packed] = []
    for packed in small:
        if batch and sum(other.size for other in batch) + packed.size > MOST_REPLAYED:
            yield batch
            batch = []
        batch.append(packed)
    if batch:
        yield batch


def pull(session: NotebookSession, cluster: "Cluster", call: Invocation) -> None:
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
    results = _lay_out_and_read(session, cluster, names, targets)
    problems: list[Exception] = []
    for name in names:
        values = {node: answer.value for node, answer in results[name].items() if not _is_refused(answer)}
        if not values:
            problems.append(_nothing(name, results[name]))
            continue
        into = variable or name
        before = session.shell.user_ns.get(into, _NOTHING)
        session.shell.user_ns[into] = values[targets[0]] if alone else values
        print(_said_of_variable(name, into, values, alone, before))
        for line in _left_out(name, results[name]):
            print(line)
    if problems:
        raise problems[0]


def _names(call: Invocation) -> tuple[list[str], str]:
    """The names to pull, each once, and the variable of ``--as``."""
    names = call.names
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            file = "" if keyword.iskeyword(name) else f"; a file comes with %cluster class collect {shlex.quote(name)}"
            raise UsageError(
                f"{name!r} is not the name of a variable: give what you want a name in a %%on_all cell, then %pull that"
                + file
            )
    variable = call.options.get("as", "")
    if variable and len(names) != 1:
        raise UsageError(f"--as {variable} is for one variable, not for {len(names)}: %pull {names[0]} --as {variable}")
    return names, variable


def _is_one_node(words: Sequence[str], nodes: "Sequence[NodeView]") -> bool:
    """True for ``--from`` one name or rank: the shape of the result must not depend on how many nodes there are."""
    named = {node.name for node in nodes} | {str(node.rank) for node in nodes}
    return len(words) == 1 and words[0] in named


def _lay_out_and_read(
    session: NotebookSession, cluster: "Cluster", names: Sequence[str], targets: Sequence[str]
) -> "dict[str, dict[str, Pulled]]":
    from notebook_cluster.client import give_source, new_ticket, read_values

    ticket = new_ticket()
    # The first line is what panel and journal show of a cell.
    source = f"# %pull {' '.join(names)}\n{give_source(ticket, names)}"
    run_cell(cluster, session.shell, source, targets, replay=False)
    with ProgressLine(session.shell, f"pulling {', '.join(names)}") as progress:
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


def _said_of_variable(name: str, into: str, values: Mapping[str, Any], alone: bool, before: object) -> str:
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


def send(session: NotebookSession, cluster: "Cluster", call: Invocation) -> None:
    """Put the file or folder into the working folder of every node (``--to``: of some), and say what happened there.

    Raises:
        UsageError: an unknown node, or no node.
        ClusterError: the file does not exist, or cannot be read.
        ClusterProblem: it is not everywhere now; names where and why.
    """
    from notebook_cluster.client import find_sources, send_files

    sources = find_sources(call.argument)
    nodes = cluster.state().nodes
    chosen = set(resolve(call.options.get("to", ("all",)), nodes))
    targets = by_rank(node for node in nodes if node.name in chosen)
    with ProgressLine(session.shell, f"sending {call.argument}") as progress:

        def on_progress(done: int, total: int) -> None:
            progress.note = _waiting(cluster, targets)
            progress(done, total)

        places = send_files(cluster, sources, targets, on_progress)
    what = _files(len(sources.files), call.argument)
    for line in _said_of_files(what, places):
        print(line)
    for line in _some(sources.skipped):
        print(f"left out: {line}")
    failed = [place for place in places if place.error]
    if failed:
        more = f" (and at {len(failed) - 1} more places)" if len(failed) > 1 else ""
        raise ClusterProblem(f"{call.argument} is not on {', '.join(failed[0].nodes)}: {failed[0].error}{more}")


def bench(session: NotebookSession, call: Invocation) -> None:
    """Measure the ways between all nodes and show them as a table.

    Raises:
        ClusterError: a cell runs.
    """
    from notebook_cluster.client import BENCH_HEADS, who_is_left_out
    from notebook_cluster.widgets import render_table

    cluster = session.require()
    ways = cluster.bench(call.options.get("mb", 16))
    rest = [f"{node} is left out: {reason}" for node, reason in who_is_left_out(cluster.state()).items()]
    if not ways:
        rest.insert(0, f"cluster {cluster.name}: there is no pair of nodes to measure (%cluster add PEER)")
        print("\n".join(rest), flush=True)
        return
    rows, after = [BENCH_HEADS, *(way.cells() for way in ways)], "\n".join(rest)
    session.shell.display_pub.publish(
        data={"text/plain": render_table(rows, "", after), "text/html": render_table(rows, "", after, html=True)},
        metadata={},
    )


def _said_of_files(what: str, places: "Sequence[Destination]") -> list[str]:
    """One line for all places where the same was done."""
    lines: dict[str, list[str]] = {}
    for place in places:
        if place.error:
            continue
        if not place.sent:
            where = " (it is the notebook's own folder)" if place.own else ""
            lines.setdefault(f"{what}: already there on {{nodes}}{where}", []).extend(place.nodes)
            continue
        text = f"sent {what} ({amount(place.sent_bytes)}) to {{nodes}}"
        if place.present:
            text = f"sent {place.sent} of {what} ({amount(place.sent_bytes)}) to {{nodes}}; the rest was there already"
        if place.replaced:
            text += f"; replaced there: {', '.join(_some(place.replaced))}"
        lines.setdefault(text, []).extend(place.nodes)
    return [text.format(nodes=", ".join(names)) for text, names in lines.items()]


def _files(count: int, argument: str) -> str:
    return argument if count == 1 else f"the {count} files of {argument}"


def _some(texts: Sequence[str]) -> list[str]:
    """The first few, and how many more there are."""
    more = len(texts) - _MOST_FILES
    return [*texts[:_MOST_FILES], *([f"{more} more"] if more > 0 else [])]


def _waiting(cluster: "Cluster", targets: "Sequence[NodeView]") -> str:
    """Nodes whose peer is away: what is on its way to them waits."""
    state = cluster.latest
    names = {node.name for node in targets}
    away = [node.name for node in state.nodes if node.name in names and node.condition == "lost"] if state else []
    return f"waiting for {', '.join(away)} to come back (Stop gives up)" if away else ""
