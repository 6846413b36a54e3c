"""The jupyter-server extension: what runs in the Jupyter server's process, so that it works while a kernel is busy.

May import: ``client``, ``agent`` (is this machine shared), ``launchers`` (which engines are known), ``protocol``, and
``widgets`` for the texts. Called by: jupyter_server, which loads this module by name (``jupyter server extension enable
notebook_cluster.server``); browsers and scripts call its addresses, which all need the server's token or login:

- WebSocket ``notebook-cluster/stream``: what :mod:`notebook_cluster.protocol.sidebar` says, as it happens
- ``GET notebook-cluster/overview``, ``GET notebook-cluster/clusters/NAME/series``, ``POST notebook-cluster/actions``:
  the same once
- ``GET notebook-cluster/clusters/NAME/report``: the report of a cluster that has ended, one HTML page
- ``GET notebook-cluster/api/clusters``: this user's running clusters, see :func:`.handlers.describe_clusters`

:mod:`.extension` begins and ends with the server, and says what may be configured. :mod:`.hub` holds one live
connection to each cluster and its curves (:mod:`.watching`) and tells the browsers (:mod:`.browser`);
:mod:`.actions` does what is clicked, :mod:`.engines` says what the form asks of each engine, :mod:`.kept` has logs and
reports, :mod:`.sharing` shares this machine;
:mod:`.handlers` translates; :mod:`.metrics` adds gauges to the server's ``/metrics``; :mod:`.typescript` writes the
types for ``labextension/``.
"""

from notebook_cluster.protocol import VERSION

__all__ = ["_jupyter_server_extension_points"]

__version__ = VERSION
"""What ``jupyter server extension list`` shows."""


def _jupyter_server_extension_points() -> list[dict[str, object]]:
    """Tells jupyter_server which module holds the extension."""
    from notebook_cluster.server.extension import NotebookClusterServer

    return [{"module": "notebook_cluster.server", "app": NotebookClusterServer}]
