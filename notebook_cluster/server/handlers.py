"""HTTP to calls of :mod:`.clusters` and back; nothing else happens here."""

import json
from typing import Any

from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado.web import authenticated

from notebook_cluster.server.clusters import describe_clusters


class ClustersHandler(APIHandler):  # type: ignore[misc]
    """``GET notebook-cluster/api/clusters``: see :func:`.clusters.describe_clusters`."""

    @authenticated  # type: ignore[untyped-decorator]
    async def get(self) -> None:
        """Answer with the list as JSON."""
        await self.finish(json.dumps(await describe_clusters(), allow_nan=False))


def handlers(base_url: str) -> list[tuple[str, type[Any]]]:
    """(pattern, handler) pairs below ``base_url``."""
    return [(url_path_join(base_url, "notebook-cluster", "api", "clusters"), ClustersHandler)]
