"""The REST address of the jupyter-server extension, in a real jupyter_server."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_core.paths import jupyter_path
from tornado.httpclient import HTTPClientError
from tornado.websocket import WebSocketHandler

from notebook_cluster.server.extension import say_what_there_is
from notebook_cluster.server.handlers import handlers

pytest_plugins = ["pytest_jupyter.jupyter_server"]

Fetch = Callable[..., Awaitable[Any]]
ADDRESS = ("notebook-cluster", "api", "clusters")


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    return {"ServerApp": {"jpserver_extensions": {"notebook_cluster.server": True}}}


@pytest.fixture(autouse=True)
def hub_ends_before_the_folders_go(request: pytest.FixtureRequest) -> Iterator[None]:
    if "jp_serverapp" not in request.fixturenames:
        yield
        return
    server, loop = request.getfixturevalue("jp_serverapp"), request.getfixturevalue("jp_asyncio_loop")
    yield
    loop.run_until_complete(server.web_app.settings["notebook_cluster_hub"].close())


def hub_tasks() -> list[str]:
    """What a hub still does in this loop."""
    coroutines = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in coroutines if name.startswith("Hub.")]


async def test_a_server_that_ends_leaves_no_task_of_the_hub(
    jp_serverapp: Any, jupyter_dirs: Path, jp_fetch: Fetch
) -> None:
    await jp_fetch("notebook-cluster", "overview")  # it runs
    assert sorted(hub_tasks()) == ["Hub._look_again_and_again", "Hub._tell"]
    # What a server does between its signal and its end.
    await jp_serverapp.cleanup_extensions()
    assert hub_tasks() == []
    jp_serverapp.web_app.settings["notebook_cluster_hub"].start()  # as a callback that comes late would
    assert hub_tasks() == []


async def test_a_user_without_clusters_gets_an_empty_list(jp_fetch: Fetch, jupyter_dirs: Path) -> None:
    response = await jp_fetch(*ADDRESS)
    assert response.code == 200
    assert json.loads(response.body) == []


# From the table itself, so that a new address is tried as well.
TABLE = [(pattern.replace(r"([A-Za-z0-9_.-]{1,63})", "any"), handler) for pattern, handler, _ in handlers("/", None)]  # type: ignore[arg-type]
METHODS = ("get", "post", "put", "patch", "delete")
REQUESTS = [
    (address, method.upper())
    for address, handler in TABLE
    for method in METHODS
    if not issubclass(handler, WebSocketHandler) and method in vars(handler)
]


def test_the_table_of_addresses_is_read_whole() -> None:
    assert len(TABLE) == len(handlers("/", None)) >= 5  # type: ignore[arg-type]
    assert {address for address, _ in REQUESTS} | {"/notebook-cluster/stream"} == {address for address, _ in TABLE}
    assert not [address for address, _ in TABLE if "(" in address]


@pytest.mark.parametrize("authorization", ["", "token wrong"])
@pytest.mark.parametrize(("address", "method"), REQUESTS)
async def test_no_address_answers_without_the_token(
    jp_fetch: Fetch, address: str, method: str, authorization: str
) -> None:
    # Neither the token nor anything a page of another site could send; the body is one that would be understood.
    body = None if method in ("GET", "DELETE") else '{"id": 1, "action": "detach"}'
    with pytest.raises(HTTPClientError) as refused:
        await jp_fetch(*address.split("/"), method=method, body=body, headers={"Authorization": authorization})
    assert refused.value.code == 403


@pytest.mark.parametrize("authorization", ["", "token wrong"])
@pytest.mark.parametrize("address", [address for address, handler in TABLE if issubclass(handler, WebSocketHandler)])
async def test_no_stream_opens_without_the_token(jp_ws_fetch: Fetch, address: str, authorization: str) -> None:
    with pytest.raises(HTTPClientError) as refused:
        await jp_ws_fetch(*address.split("/"), headers={"Authorization": authorization})
    assert refused.value.code == 403


def test_a_missing_jupyterlab_part_is_said_with_the_way_to_get_it(
    jp_environ: None, jupyter_dirs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def said() -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            say_what_there_is(logging.getLogger("test"))
        messages = [record.getMessage() for record in caplog.records]
        assert "notebook-cluster: clusters are listed at notebook-cluster/api/clusters" in messages
        return [message for message in messages if "JupyterLab part" in message]

    (line,) = said()
    assert "no sidebar" in line
    assert "Install Node.js 20.19 or newer, then notebook-cluster again" in line
    built = Path(jupyter_path("labextensions")[0]) / "notebook-cluster" / "package.json"
    built.parent.mkdir(parents=True)
    built.write_text("{}")
    assert said() == []


async def test_the_overview_of_a_user_without_clusters_has_none(jp_fetch: Fetch, jupyter_dirs: Path) -> None:
    overview = json.loads((await jp_fetch("notebook-cluster", "overview")).body)
    assert (overview["clusters"], overview["sharing"]["on"]) == ([], False)


async def test_a_running_cluster_is_listed_with_its_nodes(
    jp_fetch: Fetch, jupyter_dirs: Path, no_processes_left: str
) -> None:
    from notebook_cluster.client import Cluster

    cluster = await asyncio.to_thread(Cluster.start, "listed", local=1)
    try:
        (row,) = json.loads((await jp_fetch(*ADDRESS)).body)
        assert (row["name"], row["error"]) == ("listed", "")
        assert [node["rank"] for node in row["state"]["nodes"]] == ["0"]
    finally:
        await asyncio.to_thread(cluster.stop)
        await asyncio.to_thread(cluster.close)
