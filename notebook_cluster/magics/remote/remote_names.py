"""Completion and inspection of names that live on the nodes, while a cell for them is typed.

The answer comes from one node, through the coordinator, within half a second or not at all: typing never waits for a
machine that is away.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.language.grammar import ON
from notebook_cluster.magics.language.parsing import parse_line
from notebook_cluster.magics.language.targets import resolve
from notebook_cluster.magics.remote.sticky import goes_to_nodes
from notebook_cluster.magics.session import Session

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

_CELL_MAGICS = ("%%on_all", "%%on")


@dataclass(frozen=True)
class RemotePart:
    """What of a cell runs on nodes: ``code``, from character ``start`` of the cell on. ``words``: after ``%%on``."""

    start: int
    code: str
    words: str | None = None


def remote_part(cell: str, *, sticky: bool = False) -> RemotePart | None:
    """The part of ``cell`` that nodes run; ``sticky``: cells without a magic of ours go to all nodes too."""
    body = cell.lstrip()
    first, newline, code = body.partition("\n")
    magic, _, words = first.strip().partition(" ")
    if magic in _CELL_MAGICS:
        start = len(cell) - len(code) if newline else len(cell) + 1
        return RemotePart(start, code, words if magic == "%%on" else None)
    return RemotePart(0, cell) if sticky and _is_sticky(cell) else None


def _is_sticky(cell: str) -> bool:
    try:
        return goes_to_nodes(cell)
    except UsageError:
        return True  # not as it can be run; the names are those of the nodes all the same


class RemoteNames:
    """Asks the nodes of the notebook's cluster."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._wrapped: tuple[Any, Any] | None = None
        self.matcher = self._make_matcher()

    def load(self, kernel: Any) -> None:
        """Let ``kernel`` inspect names of nodes too."""
        if kernel is None or not hasattr(kernel, "do_inspect"):
            return
        original = kernel.do_inspect

        def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, *rest: Any, **options: Any) -> Any:
            found = self._inspect(code, cursor_pos, detail_level)
            return original(code, cursor_pos, detail_level, *rest, **options) if found is None else found

        kernel.do_inspect = do_inspect
        self._wrapped = (kernel, do_inspect)

    def unload(self) -> None:
        """Give the kernel its own inspection back, unless somebody has wrapped it once more."""
        if self._wrapped is not None:
            kernel, wrapper = self._wrapped
            if vars(kernel).get("do_inspect") is wrapper:
                del kernel.do_inspect
            self._wrapped = None

    def _make_matcher(self) -> Any:
        """A matcher for ``shell.Completer.custom_matchers``."""
        from IPython.core.completer import SimpleCompletion, context_matcher

        @context_matcher(identifier="notebook_cluster.remote_names")  # type: ignore[untyped-decorator]
        def remote_matcher(context: Any) -> dict[str, Any]:
            lines = context.full_text.split("\n")
            cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
            found = self._complete(context.full_text, cursor)
            if found is None:
                return {"completions": [], "matched_fragment": ""}
            typed, words = found
            # In the node's order, names before magics.
            words.sort(key=lambda word: word.text.startswith("%"))
            return {
                "completions": [SimpleCompletion(text=word.text, type=word.kind or None) for word in words],
                "matched_fragment": typed,
                "suppress": True,
                "ordered": True,
            }

        return remote_matcher

    def _complete(self, cell: str, cursor: int) -> tuple[str, list[Any]] | None:
        """(the part of the word that is typed already, suggestions); None when the notebook is to complete itself."""
        asked = self._asked(cell, cursor)
        if asked is None:
            return None
        cluster, part, targets = asked
        answer = cluster.complete(part.code, cursor - part.start, targets)
        if answer is None:
            return None
        return part.code[answer.start : cursor - part.start], answer.suggestions

    def _inspect(self, cell: str, cursor: int, detail: int) -> dict[str, Any] | None:
        """The content of an inspect_reply; None when the notebook is to inspect itself."""
        asked = self._asked(cell, cursor)
        if asked is None:
            return None
        cluster, part, targets = asked
        answer = cluster.inspect(part.code, cursor - part.start, targets, detail=detail)
        if answer is None:
            return None
        data = {"text/plain": f"on {answer.node}:\n{answer.text}"} if answer.found else {}
        return {"status": "ok", "found": answer.found, "data": data, "metadata": {}}

    def _asked(self, cell: str, cursor: int) -> "tuple[Cluster, RemotePart, list[str]] | None":
        """What to ask whom; None when the cursor is in nothing that a node runs."""
        cluster = self._session.cluster
        part = remote_part(cell, sticky=self._session.sticky)
        if cluster is None or cluster.connection.closed is not None or part is None or cursor < part.start:
            return None
        targets: list[str] = []
        if part.words is not None and cluster.latest is not None:
            try:
                targets = resolve(parse_line(ON, part.words).arguments, cluster.latest.nodes)
            except UsageError:
                targets = []  # half typed: any node will do
        return cluster, part, targets
