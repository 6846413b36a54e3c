"""What this notebook holds: the shell, and the cluster that its magics mean."""

import atexit
import os
from collections.abc import Mapping
from pathlib import PurePath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from notebook_cluster.magics.display import node_widgets
from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.execution.interrupts import asked_to_end
from notebook_cluster.magics.headless import is_headless
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
