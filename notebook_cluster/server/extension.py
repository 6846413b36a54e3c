"""The extension as jupyter_server knows it: adds the addresses, and ends with the server."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_core.paths import jupyter_path
from jupyter_server.extension.application import ExtensionApp
from traitlets import Float, validate
from traitlets.config import Configurable

from notebook_cluster.server.handlers import handlers
from notebook_cluster.server.hub import Hub
from notebook_cluster.server.metrics import show

if TYPE_CHECKING:
    import logging


class NotebookCluster(Configurable):  # type: ignore[misc]
    """Settings of the extension: ``c.NotebookCluster.unreachable_after = 30.0``."""

    unreachable_after = Float(
        15.0, help="Seconds of silence after which a cluster is shown as unreachable; asked after a third of them."
    ).tag(config=True)

    @validate("unreachable_after")  # type: ignore[untyped-decorator]
    def _in_range(self, proposal: dict[str, float]) -> float:
        value = proposal["value"]
        if not 0.1 <= value <= 3600.0:
            raise ValueError(f"NotebookCluster.unreachable_after = {value:g}: use 0.1 to 3600 seconds")
        return value


CLOSING_SECONDS = 5.0
"""How long a server that ends waits for its hub, which may be looking for clusters."""


class NotebookClusterServer(ExtensionApp):  # type: ignore[misc]
    """Looks for clusters from the moment on in which the server's loop runs, until the server ends."""

    name = "notebook_cluster"
    classes = [NotebookCluster]

    def initialize_handlers(self) -> None:
        """Add the addresses to the server, and a hub for them."""
        server = self.serverapp
        self.hub = Hub(server.root_dir, NotebookCluster(parent=server).unreachable_after)
        server.web_app.settings["notebook_cluster_hub"] = self.hub
        server.web_app.add_handlers(".*$", handlers(server.web_app.settings["base_url"], self.hub))
        server.io_loop.add_callback(self.hub.start)
        show(self.hub)
        say_what_there_is(server.log)

    async def stop_extension(self) -> None:
        """Leave every cluster; they go on. Raises nothing: the server would end no kernels."""
        hub: Hub | None = getattr(self, "hub", None)
        if hub is None:
            return
        try:
            await asyncio.wait_for(hub.close(), CLOSING_SECONDS)
        except Exception:
            self.serverapp.log.exception("notebook-cluster: the clusters could not be left")


def say_what_there_is(log: "logging.Logger") -> None:
    """Where the addresses are, and whether the JupyterLab part is missing."""
    log.info("notebook-cluster: clusters are listed at notebook-cluster/api/clusters")
    if not _has_labextension():
        log.info(
            "notebook-cluster: no sidebar, and nodes' output without tabs: the JupyterLab part was left out at "
            "installation. Install Node.js 20.19 or newer, then notebook-cluster again"
        )


def _has_labextension() -> bool:
    """True when JupyterLab finds what ``labextension/`` builds; pip hides the line that says it was left out."""
    return any(Path(folder, "notebook-cluster", "package.json").is_file() for folder in jupyter_path("labextensions"))
