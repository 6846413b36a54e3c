"""``%cluster send``: a file or a folder to the nodes' working folders, and what is said about it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from notebook_cluster.magics.display.progress import Progress, amount
from notebook_cluster.magics.errors import ClusterProblem
from notebook_cluster.magics.language.parsing import Invocation
from notebook_cluster.magics.language.targets import resolve
from notebook_cluster.magics.session import Session
from notebook_cluster.protocol.state import NodeView, by_rank

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster, Place

_MOST_SHOWN = 5


def send(session: Session, cluster: "Cluster", call: Invocation) -> None:
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
    with Progress(session.shell, f"sending {call.argument}") as progress:

        def on_progress(done: int, total: int) -> None:
            progress.note = _waiting(cluster, targets)
            progress(done, total)

        places = send_files(cluster, sources, targets, on_progress)
    what = _files(len(sources.files), call.argument)
    for line in _said(what, places):
        print(line)
    for line in _some(sources.skipped):
        print(f"left out: {line}")
    failed = [place for place in places if place.error]
    if failed:
        more = f" (and at {len(failed) - 1} more places)" if len(failed) > 1 else ""
        raise ClusterProblem(f"{call.argument} is not on {', '.join(failed[0].nodes)}: {failed[0].error}{more}")


def _said(what: str, places: "Sequence[Place]") -> list[str]:
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
    more = len(texts) - _MOST_SHOWN
    return [*texts[:_MOST_SHOWN], *([f"{more} more"] if more > 0 else [])]


def _waiting(cluster: "Cluster", targets: "Sequence[NodeView]") -> str:
    """Nodes whose peer is away: what is on its way to them waits."""
    state = cluster.latest
    names = {node.name for node in targets}
    away = [node.name for node in state.nodes if node.name in names and node.condition == "lost"] if state else []
    return f"waiting for {', '.join(away)} to come back (Stop gives up)" if away else ""
