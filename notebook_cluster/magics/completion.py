"""Tab completion after our magics, and completion and inspection of names that live on the nodes.

What lives on nodes is asked of one of them, through the coordinator, and answered within half a second or not at all:
typing never waits for a machine that is away.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.grammar import COMMANDS, ON, ON_ALL, PULL, PUSH, Command
from notebook_cluster.magics.parsing import DEVICE_WORDS, MEMORY_WORDS, memory_words, parse_line, resolve
from notebook_cluster.magics.session import LOCAL, NotebookSession, goes_to_nodes, unregister

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

Names = Callable[[str], Sequence[str]]
"""Known names of one kind: ``NODE``, ``RANK``, ``MEMORY`` (``vram>=8GB``), ``PEER``, ``CLUSTER`` or ``RUN``."""
_TARGET_OPTIONS = {"%cluster": "--to", "%push": "--to", "%pull": "--from"}
_RANGE = re.compile(r"(\d{1,6})-\d*")


def complete(text: str, names: Names) -> tuple[list[str], str]:
    """What may stand at the end of ``text`` (the line up to the cursor), and the part of it that is typed already."""
    magic, space, rest = text.lstrip().partition(" ")
    if not space and magic.startswith("%%"):
        return _starting(magic, [LOCAL]), magic
    if not space or magic not in ("%cluster", "%%on", "%%on_all", "%push", "%pull"):
        return [], ""
    words = rest.split()
    typed = "" if not rest or rest.endswith(" ") else words.pop()
    if words and magic in _TARGET_OPTIONS and words[-1] == _TARGET_OPTIONS[magic]:
        typed = typed.rpartition(",")[2].removeprefix("!")
        return _targets(typed, names), typed
    if magic == "%cluster":
        if not words:
            return _starting(typed, COMMANDS), typed
        command = COMMANDS.get(words[0])
        return ([], "") if command is None else (_after(command, typed, names), typed)
    if magic in ("%push", "%pull"):
        # The names of variables are IPython's to complete.
        return (_after(PUSH if magic == "%push" else PULL, typed, names) if typed.startswith("-") else []), typed
    if typed.startswith("-"):
        return _after(ON if magic == "%%on" else ON_ALL, typed, names), typed
    if words and words[-1] == "--canary":
        return _starting(typed, names("NODE")), typed
    if magic == "%%on":
        typed = typed.rpartition(",")[2].removeprefix("!")
        return _targets(typed, names), typed
    return [], ""


def _targets(typed: str, names: Names) -> list[str]:
    """What may be one of the TARGETS of ``%%on``."""
    if found := _RANGE.fullmatch(typed):
        return _starting(typed, [f"{found[1]}-{rank}" for rank in names("RANK") if int(rank) > int(found[1])])
    memory = names("MEMORY") if typed.startswith(MEMORY_WORDS) else MEMORY_WORDS
    return _starting(typed, [*names("NODE"), *names("RANK"), *DEVICE_WORDS, *memory, "all"])


def make_matcher(session: NotebookSession) -> Any:
    """A matcher for ``shell.Completer.custom_matchers``."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    def names(kind: str) -> list[str]:
        if kind == "CLUSTER":
            from notebook_cluster.client import running_clusters

            return running_clusters()
        if kind == "RUN":
            from notebook_cluster.client import Cluster, run_name

            return list(dict.fromkeys(map(run_name, Cluster.runs())))
        state = session.cluster.latest if session.cluster is not None else None
        if state is None:
            return []
        if kind == "RANK":
            return [str(rank) for rank in sorted(node.rank for node in state.nodes if node.rank is not None)]
        if kind == "MEMORY":
            return memory_words(state.nodes)
        return [node.name for node in state.nodes] if kind == "NODE" else [peer.name for peer in state.peers]

    @context_matcher()  # type: ignore[untyped-decorator]
    def cluster_matcher(context: Any) -> dict[str, Any]:
        found, typed = complete(context.text_until_cursor, names)
        return {
            "completions": [SimpleCompletion(text=word, type="cluster") for word in found],
            "matched_fragment": typed,
            "suppress": bool(found),
        }

    return cluster_matcher


def _after(command: Command, typed: str, names: Names) -> list[str]:
    """Options and names that may follow ``command``."""
    if typed.startswith("-"):
        return _starting(typed, [f"--{option.name}" for option in command.options])
    if command.argument == "NODE":
        return _starting(typed, names("NODE"))
    if command.argument == "NODE...":
        return _starting(typed, [*names("NODE"), "all"])
    if command.argument.startswith("RUN"):
        return _starting(typed, names("RUN"))
    if command.argument.startswith("PEER"):
        return _starting(typed, [*names("PEER"), "all", "local"])
    if "|" in command.argument and command.argument.startswith("["):
        return _starting(typed, command.argument.strip("[]").split("|"))
    if command.argument.startswith("FILE"):
        return []  # IPython's to complete
    if command.argument == "[NAME]" and command.name != "start":
        return _starting(typed, names("CLUSTER"))
    return [] if typed else [f"--{option.name}" for option in command.options]


def _starting(typed: str, words: Sequence[str] | dict[str, Any]) -> list[str]:
    return [word for word in words if word.startswith(typed)]


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


_ON_EVERY_NODE = ("nc", "rank", "world_size", "device")


class RemoteNames:
    """Asks the nodes of the notebook's cluster."""

    def __init__(self, session: NotebookSession) -> None:
        self._session = session
        self._wrapped: tuple[Any, Any] | None = None
        self.matcher = self._make_matcher()

    def load(self, kernel: Any) -> None:
        """Let ``kernel`` inspect names of nodes too, and say of a name that a cell misses here that it is on the
        nodes."""
        self._session.shell.events.register("post_run_cell", self._say_where)
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
        unregister(self._session.shell.events, "post_run_cell", self._say_where)
        if self._wrapped is not None:
            kernel, wrapper = self._wrapped
            if vars(kernel).get("do_inspect") is wrapper:
                del kernel.do_inspect
            self._wrapped = None

    def _say_where(self, result: Any) -> None:
        """Below a cell of the notebook: ``%%on_all`` was forgotten."""
        name, cluster = getattr(result.error_in_exec, "name", None), self._session.cluster
        if not isinstance(result.error_in_exec, NameError) or not name:
            return
        if cluster is None or cluster.connection.closed is not None:
            if name in _ON_EVERY_NODE:
                print(f"{name!r} is there on nodes of a cluster: %cluster start, then begin this cell with %%on_all")
        elif name in _ON_EVERY_NODE:
            print(f"{name!r} is there on the nodes: begin this cell with %%on_all")
        else:
            answer = cluster.complete(name, len(name), [])
            if answer is not None and any(found.text == name for found in answer.suggestions):
                way = f"begin this cell with %%on_all, or bring it here with %pull {name}"
                print(f"{name!r} is on {answer.node}, not in the notebook: {way}")

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
