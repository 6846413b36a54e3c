"""Tab completion after ``%cluster``, ``%%on_all``, ``%%on``, ``%push`` and ``%pull``."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from notebook_cluster.magics.language.grammar import COMMANDS, ON, ON_ALL, PULL, PUSH, Command
from notebook_cluster.magics.language.targets import DEVICE_WORDS, MEMORY_WORDS, memory_words
from notebook_cluster.magics.remote.sticky import LOCAL
from notebook_cluster.magics.session import Session

Names = Callable[[str], Sequence[str]]
"""Known names of one kind: ``NODE``, ``RANK``, ``MEMORY`` (``vram>=8GB``), ``PEER`` or ``CLUSTER``."""
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


def make_matcher(session: Session) -> Any:
    """A matcher for ``shell.Completer.custom_matchers``."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    def names(kind: str) -> list[str]:
        if kind == "CLUSTER":
            from notebook_cluster.client import running_clusters

            return running_clusters()
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
