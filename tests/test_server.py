"""The REST address of the jupyter-server extension, in a real jupyter_server."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError

pytest_plugins = ["pytest_jupyter.jupyter_server"]

Fetch = Callable[..., Awaitable[Any]]
ADDRESS = ("notebook-cluster", "api", "clusters")


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    return {"ServerApp": {"jpserver_extensions": {"notebook_cluster.server": True}}}


async def test_a_user_without_clusters_gets_an_empty_list(jp_fetch: Fetch, jupyter_dirs: Path) -> None:
    response = await jp_fetch(*ADDRESS)
    assert response.code == 200
    assert json.loads(response.body) == []


async def test_a_request_without_token_is_refused(jp_fetch: Fetch) -> None:
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch(*ADDRESS, headers={"Authorization": "token wrong"})
    assert refused.value.code == 403


async def test_the_overview_of_a_user_without_clusters_has_none(jp_fetch: Fetch, jupyter_dirs: Path) -> None:
    overview = json.loads((await jp_fetch("notebook-cluster", "overview")).body)
    assert (overview["clusters"], overview["sharing"]["on"]) == ([], False)


async def test_a_running_cluster_is_listed_with_its_nodes(
    jp_fetch: Fetch, jupyter_dirs: Path, no_processes_left: str
) -> None:
    import asyncio

    from notebook_cluster.client import Cluster

    cluster = await asyncio.to_thread(Cluster.start, "listed", local=1)
    try:
        (row,) = json.loads((await jp_fetch(*ADDRESS)).body)
        assert (row["name"], row["error"]) == ("listed", "")
        assert [node["rank"] for node in row["state"]["nodes"]] == ["0"]
    finally:
        await asyncio.to_thread(cluster.stop)
        await asyncio.to_thread(cluster.close)
