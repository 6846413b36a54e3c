"""Which cells run on the nodes: ``%cluster cells all`` sends every cell without a magic of ours to all of them.

IPython hands each cell, as lines, to a list of functions before it reads it as Python. Ours is the last of those that
clean up, so it sees the cell as typed without prompts and common indentation; history and tracebacks keep the cell as
typed. What is not typed by a person (cells that code runs, silent requests of a frontend's own) stays as it is.
"""

import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.session import NotebookSession

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

LOCAL = "%%local"
_OURS = re.compile(r"%%(on_all|on)\b")
_LOCAL_LINE = re.compile(r"\s*(?:\w+\s*=\s*)?%(cluster|push|pull|(?:re|un)?load_ext\s+notebook_cluster)\b")
"""A line that is for the notebook, also in sticky mode."""
_NOTHING = re.compile(r"\s*(#.*)?$")


class StickyCells:
    """The function in IPython's list, and how a magic learns that it was not typed."""

    has_side_effects = True
    """Tells IPython to leave it out when it only asks whether a cell is complete."""

    def __init__(self, session: NotebookSession) -> None:
        self._session = session
        self._shell = session.shell
        self._latest: str | None = None
        """The request whose cell runs, or ran last."""
        self._depth = 0
        """In a terminal: cells that run, one inside the other."""
        self._added = False

    def load(self) -> None:
        """Put the function into the shell's list."""
        self._shell.input_transformers_cleanup.append(self)
        self._shell.events.register("pre_execute", self._before)
        self._shell.events.register("post_execute", self._after)

    def unload(self) -> None:
        """Take it out again; cells run here."""
        self._session.sticky = False
        if self in self._shell.input_transformers_cleanup:
            self._shell.input_transformers_cleanup.remove(self)
        for event, hook in (("pre_execute", self._before), ("post_execute", self._after)):
            _unregister(self._shell.events, event, hook)

    def take_added(self) -> bool:
        """True once when ``%%on_all`` was put in front of the cell that runs now."""
        added, self._added = self._added, False
        return added

    def __call__(self, lines: list[str]) -> list[str]:
        """The lines of a cell as IPython shall read them.

        Raises:
            UsageError: in sticky mode, a line that is for the notebook among others that are for the nodes.
        """
        if not self._is_typed():
            return lines
        self._added = False
        first = next((number for number, line in enumerate(lines) if line.strip()), None)
        if first is None:
            return lines
        if lines[first].split()[0] == LOCAL:
            if lines[first].strip() != LOCAL:
                raise UsageError(f"{LOCAL} takes nothing, got {lines[first].split(maxsplit=1)[1].strip()!r}")
            return [*lines[:first], "\n", *lines[first + 1 :]]
        if not self._session.sticky or not goes_to_nodes("".join(lines[first:])):
            return lines
        self._added = True
        return ["%%on_all\n", *lines]

    def _is_typed(self) -> bool:
        """False for what a cell runs while it runs, and for what a frontend runs for itself."""
        if getattr(self._shell, "kernel", None) is None:
            return self._depth == 0
        request, content = self._request()
        if request is None or request == self._latest:
            return False
        return not content.get("silent", False) and bool(content.get("store_history", True))

    def _request(self) -> tuple[str | None, dict[str, Any]]:
        """Id and content of the execute_request that the kernel works on; None when it is something else."""
        kernel = getattr(self._shell, "kernel", None)
        parent = (kernel.get_parent() if kernel is not None else None) or {}
        header = parent.get("header", {})
        is_cell = header.get("msg_type") == "execute_request"
        return (str(header.get("msg_id")), parent.get("content", {})) if is_cell else (None, {})

    def _before(self) -> None:
        self._depth += 1
        # In a kernel depth would mislead: a widget's callback that raises has a pre_execute without its post_execute.
        request, _ = self._request()
        if request is not None:
            self._latest = request

    def _after(self) -> None:
        self._depth = max(0, self._depth - 1)


def goes_to_nodes(cell: str) -> bool:
    """True when sticky mode sends ``cell`` to the nodes: not our cell magics, and not lines like ``%cluster status``.

    Other cell magics (``%%time``, ``%%bash``) go to the nodes as they are.

    Raises:
        UsageError: a line for the notebook among lines for the nodes.
    """
    lines = [line for line in cell.splitlines() if not _NOTHING.match(line)]
    if not lines or lines[0].split()[0] == LOCAL or _OURS.match(lines[0]):
        return False
    here = [line for line in lines if _LOCAL_LINE.match(line)]
    if not here:
        return True
    if len(here) < len(lines):
        raise UsageError(
            f"{here[0].strip()!r} is for the notebook, the other lines of this cell are for the nodes (%cluster cells "
            f"all): put it into a cell of its own, or {LOCAL} in front of all"
        )
    return False


def show_mark(session: NotebookSession, cluster: "Cluster") -> None:
    """The line above the output of a cell that runs on all nodes though nothing in it says so."""
    state = cluster.latest
    count = sum(node.rank is not None for node in state.nodes) if state is not None else 0
    where = f"all {count} nodes" if count > 1 else "the only node" if count else "all nodes"
    text = f"on {where} \u00b7 %cluster cells local ends this"
    html = f'<div style="font-size:85%;color:var(--jp-ui-font-color2,#666)">{escape(text)}</div>'
    session.shell.display_pub.publish(data={"text/plain": text, "text/html": html}, metadata={})


def _unregister(events: Any, event: str, hook: Callable[[], None]) -> None:
    try:
        events.unregister(event, hook)
    except ValueError:
        pass  # the shell was reset
