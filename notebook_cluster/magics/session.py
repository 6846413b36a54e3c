"""What this notebook holds: the shell, and the cluster that its magics mean."""

import atexit
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.display import node_widgets
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.execution.interrupts import asked_to_end
from notebook_cluster.magics.naming import default_cluster_name

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster
    from notebook_cluster.magics.execution.handle import CellHandle


class Session:
    """One for each notebook kernel. The cluster itself lives in its coordinator: losing this loses nothing."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.cluster: Cluster | None = None
        self._last_name = ""
        self.sticky = False
        """Cells without a magic run on all nodes: ``%cluster cells all``."""
        self.handles: list[CellHandle] = []
        """Of cells that run with ``--async``."""
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
        """Make ``cluster`` the notebook's; the one before is left alone and goes on."""
        if cluster is not self.cluster:
            self.let_go()
            self.cluster, self._last_name = cluster, cluster.name

    def handle_of(self, cell: int) -> "CellHandle | None":
        """The handle of a cell that this notebook started with ``--async`` and that still runs."""
        self.handles = [handle for handle in self.handles if not handle.done]
        return next((handle for handle in self.handles if handle.cell == cell), None)

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
        atexit.unregister(self.close)
        self.let_go()


def is_headless(shell: Any) -> bool:
    """True when nobody can click: nbclient and papermill say so by refusing input, a terminal has no widgets."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return True
    parent = kernel.get_parent() or {}
    return not parent.get("content", {}).get("allow_stdin", True)
