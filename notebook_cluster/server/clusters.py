"""This user's clusters as JSON. Asking a coordinator blocks, so it happens on a few threads of this module's own."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from notebook_cluster.client import Cluster, ClusterError, list_clusters
from notebook_cluster.protocol.views import ConnectionFile
from notebook_cluster.widgets.model import panel_model

Value = TypeVar("Value")
ANSWER_SECONDS = 5.0
# Not the server's own pool: a coordinator that never answers must not use up the threads that serve notebooks.
_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="notebook-cluster")


async def describe_clusters() -> list[dict[str, Any]]:
    """One dict per running cluster: ``name``, ``pid``, ``version``, ``error`` and, unless it names an error, ``state``
    as :func:`notebook_cluster.widgets.model.panel_model` returns it. A coordinator gets 5 seconds to answer."""
    files = await _in_thread(list_clusters)
    return list(await asyncio.gather(*(_describe(file) for file in files)))


async def _describe(file: ConnectionFile) -> dict[str, Any]:
    row = {"name": file.cluster, "pid": file.pid, "version": file.version, "error": "", "state": None}
    try:
        row["state"] = await asyncio.wait_for(_in_thread(lambda: _state(file.cluster)), ANSWER_SECONDS)
    except ClusterError as error:
        row["error"] = str(error)
    except TimeoutError:
        row["error"] = f"the coordinator of cluster {file.cluster!r} (process {file.pid}) did not answer"
    return row


def _state(name: str) -> dict[str, Any]:
    with contextlib.closing(Cluster.attach(name, "server", live=False)) as cluster:
        return panel_model(cluster.latest or cluster.state())


async def _in_thread(call: Callable[[], Value]) -> Value:
    return await asyncio.get_running_loop().run_in_executor(_threads, call)
