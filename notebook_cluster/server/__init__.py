"""The jupyter-server extension: what runs in the Jupyter server's process, so that it works while a kernel is busy.

May import: ``client``, ``agent`` (is this machine shared), ``protocol``, and ``widgets`` for the texts. Called by:
jupyter_server, which loads this module by name (``jupyter server extension enable notebook_cluster.server``); browsers
and scripts call its addresses, which all need the server's token or login:

- WebSocket ``notebook-cluster/stream``: what :mod:`notebook_cluster.protocol.sidebar` says, as it happens
- ``GET notebook-cluster/overview``, ``GET notebook-cluster/clusters/NAME/series``, ``POST notebook-cluster/actions``:
  the same once
- ``GET notebook-cluster/api/clusters``: this user's running clusters, see :func:`.clusters.describe_clusters`

:mod:`.hub` holds one live connection to each cluster (:mod:`.watching`, :mod:`.history`) and tells the browsers
(:mod:`.browser`); :mod:`.actions` does what is clicked, :mod:`.sharing` shares this machine; :mod:`.handlers` and
:mod:`.as_json` translate; :mod:`.metrics` adds gauges to the server's ``/metrics``; :mod:`.settings` is what may be
configured; :mod:`.typescript` writes the types for ``labextension/``.
"""

from typing import TYPE_CHECKING

from notebook_cluster.protocol import VERSION

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

__all__ = ["_jupyter_server_extension_points", "_load_jupyter_server_extension"]

__version__ = VERSION
"""What ``jupyter server extension list`` shows."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Tells jupyter_server which module holds the extension."""
    return [{"module": "notebook_cluster.server"}]


def _load_jupyter_server_extension(server: "ServerApp") -> None:
    """Add the addresses to ``server``, and look for clusters as soon as its loop runs."""
    from notebook_cluster.server.handlers import handlers
    from notebook_cluster.server.hub import Hub
    from notebook_cluster.server.metrics import show
    from notebook_cluster.server.settings import NotebookCluster

    hub = Hub(server.root_dir, NotebookCluster(parent=server).unreachable_after)
    server.web_app.settings["notebook_cluster_hub"] = hub
    server.web_app.add_handlers(".*$", handlers(server.web_app.settings["base_url"], hub))
    server.io_loop.add_callback(hub.start)
    show(hub)
    server.log.info("notebook-cluster: clusters are listed at notebook-cluster/api/clusters")
    if not _has_labextension():
        server.log.info(
            "notebook-cluster: no sidebar, and nodes' output without tabs: the JupyterLab part was left out at "
            "installation. Install Node.js 20.19 or newer, then notebook-cluster again"
        )


def _has_labextension() -> bool:
    """True when JupyterLab finds what ``labextension/`` builds; pip hides the line that says it was left out."""
    from pathlib import Path

    from jupyter_core.paths import jupyter_path

    return any(Path(folder, "notebook-cluster", "package.json").is_file() for folder in jupyter_path("labextensions"))
