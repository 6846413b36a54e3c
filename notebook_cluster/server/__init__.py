"""The jupyter-server extension: what runs in the Jupyter server's process, so that it works while a kernel is busy.

May import: ``client``, ``protocol``, and ``widgets`` for the texts. Called by: jupyter_server, which loads this module
by name (``jupyter server extension enable notebook_cluster.server``); browsers and scripts call its REST address:

``GET <base>/notebook-cluster/api/clusters``
    This user's running clusters on this machine as a JSON list, see :func:`.clusters.describe_clusters`. Needs the
    server's token or login, like every Jupyter address.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

__all__ = ["_jupyter_server_extension_points", "_load_jupyter_server_extension"]


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Tells jupyter_server which module holds the extension."""
    return [{"module": "notebook_cluster.server"}]


def _load_jupyter_server_extension(server: "ServerApp") -> None:
    """Add the REST addresses to ``server``."""
    from notebook_cluster.server.handlers import handlers

    server.web_app.add_handlers(".*$", handlers(server.web_app.settings["base_url"]))
    server.log.info("notebook-cluster: clusters are listed at notebook-cluster/api/clusters")
    if not _has_labextension():
        server.log.info(
            "notebook-cluster: nodes' output is shown without tabs, the JupyterLab part was left out at installation: "
            "install Node.js 20.19 or newer, then notebook-cluster again"
        )


def _has_labextension() -> bool:
    """True when JupyterLab finds what ``labextension/`` builds; pip hides the line that says it was left out."""
    from pathlib import Path

    from jupyter_core.paths import jupyter_path

    return any(Path(folder, "notebook-cluster", "package.json").is_file() for folder in jupyter_path("labextensions"))
