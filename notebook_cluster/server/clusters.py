"""This user's clusters as JSON, for scripts: the panel's rows, from the connections that the hub holds."""

import asyncio
from typing import Any

from notebook_cluster.client import ClusterError
from notebook_cluster.server.hub import ANSWER_SECONDS, Hub
from notebook_cluster.server.watching import WatchedCluster
from notebook_cluster.widgets.model import panel_model


async def describe_clusters(hub: Hub) -> list[dict[str, Any]]:
    """One dict per running cluster: ``name``, ``pid``, ``version``, ``error`` and, unless it names an error, ``state``
    as :func:`notebook_cluster.widgets.model.panel_model` returns it. A coordinator gets 5 seconds to answer."""
    await hub.look()
    running = [hub.clusters[name] for name in sorted(hub.clusters) if hub.clusters[name].condition != "ended"]
    return list(await asyncio.gather(*(_describe(cluster) for cluster in running)))


async def _describe(cluster: WatchedCluster) -> dict[str, Any]:
    file = cluster.file
    row = {"name": file.cluster, "pid": file.pid, "version": file.version, "error": "", "state": None}
    try:
        row["state"] = panel_model(await cluster.ask_state(ANSWER_SECONDS))
    except ClusterError as error:
        row["error"] = str(error)
    except TimeoutError:
        row["error"] = f"the coordinator of cluster {file.cluster!r} (process {file.pid}) did not answer"
    return row
