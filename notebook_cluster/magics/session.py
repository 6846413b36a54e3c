"""What this notebook holds: the shell, the cluster that its magics mean, and which cells run on the nodes.

``%cluster cells all`` sends every cell without a magic of ours to all nodes. IPython hands each cell, as lines, to a
list of functions before it reads it as Python. Ours is the last of those that clean up, so it sees the cell as typed
without prompts and common indentation; history and tracebacks keep the cell as typed. What is not typed by a person
(cells that code runs, silent requests of a frontend's own) stays as it is.
"""

import atexit
import os
import re
from collections.abc import Callable, Mapping
from html import escape
from pathlib import PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.display import node_widgets
from notebook_cluster.magics.display.publishing import is_headless
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.execution.waiting import asked_to_end
from notebook_cluster.protocol.names import as_name

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster
    from notebook_cluster.magics.execution.handle import CellHandle


class NotebookSession:
    """One for each notebook kernel. The cluster itself lives in its coordinator: losing this loses nothing."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.cluster: Cluster | None = None
        self._last_name = ""
        self.sticky = False
        """Cells without a magic run on all nodes: ``%cluster cells all``."""
        self.handles: list[CellHandle] = []
        """Of cells that run with ``--async``."""
        self._after_cells: Callable[[], None] | None = None
        atexit.register(self.close)

    @property
    def default_name(self) -> str:
        """The notebook's name as a cluster's name."""
        return default_cluster_name(self.shell.user_ns)

    @property
    def headless(self) -> bool:
        """True when nobody can click."""
        return is_headless(self.shell)

    def require(self) -> "Cluster":
        """The notebook's cluster.

        Raises:
            UsageError: there is none.
        """
        if self.cluster is None:
            from notebook_cluster.client import running_clusters

            name = self.default_name
            if name in running_clusters():
                raise UsageError(f"cluster {name!r} is running, this notebook is not attached to it: %cluster attach")
            raise UsageError("no cluster is running in this notebook: %cluster start")
        return self.cluster

    def name_of_ended(self) -> str:
        """Name of the notebook's cluster, or of the one it had last (default: the one of its own name), when that does
        not run any more; empty while it runs."""
        from notebook_cluster.client import running_clusters

        if self.cluster is not None and self.cluster.connected:
            return ""
        name = self.cluster.name if self.cluster is not None else self._last_name or self.default_name
        return "" if name in running_clusters() else name

    def hold(self, cluster: "Cluster") -> None:
        """Make ``cluster`` the notebook's; the one before is left alone and goes on, which is said."""
        before = self.cluster
        if cluster is not before:
            left = before.name if before is not None and before.connected and before.name != cluster.name else ""
            self.let_go()
            self.cluster, self._last_name = cluster, cluster.name
            if left:
                print(f"cluster {left!r} goes on without this notebook: %cluster attach {left} comes back to it")

    def handle_of(self, cell: int) -> "CellHandle | None":
        """The handle of a cell that this notebook started with ``--async`` and that still runs."""
        self.handles = [handle for handle in self.handles if not handle.done]
        return next((handle for handle in self.handles if handle.cell == cell), None)

    def after_cells(self, look: Callable[[], None] | None) -> None:
        """Call ``look`` after each cell of the notebook, in place of what was given before; None: nothing any more."""
        if self._after_cells is not None:
            unregister(self.shell.events, "post_run_cell", self._after_cells)
        self._after_cells = None if look is None else lambda *result: look()
        if self._after_cells is not None:
            self.shell.events.register("post_run_cell", self._after_cells)

    def let_go(self) -> None:
        """Leave the notebook's cluster; it goes on, a panel of it becomes a still picture."""
        cluster, self.cluster, self.sticky = self.cluster, None, False
        if cluster is None:
            return
        from notebook_cluster.widgets import close_panel

        close_panel(cluster)
        node_widgets.close(cluster)
        cluster.close()

    def close(self) -> None:
        """The kernel ends: say so to the coordinator, which waits for this view only when the kernel starts again."""
        cluster, self.cluster = self.cluster, None
        if cluster is not None:
            cluster.close(clean=asked_to_end(self.shell) != "restart")

    def end(self) -> None:
        """The extension is unloaded."""
        self.after_cells(None)
        atexit.unregister(self.close)
        self.let_go()


def default_cluster_name(namespace: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> str:
    """The stem of the notebook's file as a usable name, or ``cluster`` where nothing says what it is.

    Jupyter servers name the file in ``JPY_SESSION_NAME``; VS Code puts it into the namespace.
    """
    for path in (namespace.get("__vsc_ipynb_file__"), environment.get("JPY_SESSION_NAME")):
        if not isinstance(path, str) or not path.lower().endswith(".ipynb"):
            continue
        pure = PureWindowsPath(path) if "\\" in path else PurePath(path)
        return as_name(pure.stem)
    return "cluster"


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
            unregister(self._shell.events, event, hook)

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


def unregister(events: Any, event: str, hook: Callable[..., None]) -> None:
    try:
        events.unregister(event, hook)
    except ValueError:
        pass  # the shell was reset
