"""The server extension when a coordinator stands still, and when a request comes from another site's page."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPClientError
from traitlets import TraitError

from notebook_cluster.server.extension import NotebookCluster
from tests.cluster import running_cluster, stopped
from tests.sidebar_client import Stream

pytest_plugins = ["pytest_jupyter.jupyter_server"]

Fetch = Callable[..., Awaitable[Any]]
UNREACHABLE_AFTER = 1.5


@pytest.fixture
def jp_server_config() -> dict[str, Any]:
    return {
        "ServerApp": {"jpserver_extensions": {"notebook_cluster.server": True}},
        "NotebookCluster": {"unreachable_after": UNREACHABLE_AFTER},
    }


@pytest.fixture
def server(jp_serverapp: Any, jupyter_dirs: Path, jp_asyncio_loop: Any) -> Iterator[Any]:
    yield jp_serverapp
    jp_asyncio_loop.run_until_complete(jp_serverapp.web_app.settings["notebook_cluster_hub"].close())


async def log_in(server: Any, jp_fetch: Fetch) -> dict[str, str]:
    """The cookies of a browser that was logged in with the token."""
    nobody: dict[str, Any] = {"headers": {"Authorization": ""}, "follow_redirects": False}
    form = await jp_fetch("login", **nobody)
    with pytest.raises(HTTPClientError) as redirected:
        await jp_fetch("login", params={"token": server.identity_provider.token}, **nobody)
    answers = (form, redirected.value.response)
    given = [cookie for answer in answers for cookie in answer.headers.get_list("Set-Cookie")]
    pairs = [cookie.split(";")[0].partition("=") for cookie in given]
    return {name: value for name, _, value in pairs}


def as_browser(cookies: dict[str, str], **headers: str) -> dict[str, str]:
    """The headers of a request of a page: cookies in place of the token."""
    return {"Authorization": "", "Cookie": "; ".join(f"{name}={value}" for name, value in cookies.items())} | headers


async def test_a_coordinator_that_stands_still_is_unreachable_until_it_goes_on(
    server: Any, jp_fetch: Fetch, jp_ws_fetch: Fetch, no_processes_left: str
) -> None:
    cluster = await asyncio.to_thread(lambda: running_cluster("still", local=0))
    with cluster as view:
        stream = Stream(await jp_ws_fetch("notebook-cluster", "stream"))
        await stream.until(lambda: (stream.row("still") or {}).get("condition") == "running")
        pid = view.connection.file.pid
        with stopped(pid):
            listed = asyncio.ensure_future(jp_fetch("notebook-cluster", "api", "clusters"))
            await stream.until(lambda: stream.row("still")["condition"] == "unreachable")
            row = stream.row("still")
            assert f"the coordinator of cluster 'still' (process {pid}) has not answered for " in row["reason"]
            assert "end that process" in row["reason"]
            assert row["state"]["name"] == "still"
            assert "has not answered for" in await stream.refused("detach", cluster="still")
            (told,) = json.loads((await listed).body)
            assert (told["pid"], told["state"]) == (pid, None)
            assert told["error"] == f"the coordinator of cluster 'still' (process {pid}) did not answer"
        await stream.until(lambda: stream.row("still")["condition"] == "running")
        assert stream.row("still")["reason"] == ""
        stream.socket.close()


async def test_clusters_are_listed_over_the_connections_that_there_are(
    server: Any, jp_fetch: Fetch, no_processes_left: str
) -> None:
    def connections() -> int:
        return sum(thread.name == "notebook-cluster-client" for thread in threading.enumerate())

    with await asyncio.to_thread(lambda: running_cluster("listed", local=0)) as view:
        (before,) = json.loads((await jp_fetch("notebook-cluster", "api", "clusters")).body)
        assert (before["error"], before["state"]["nodes"]) == ("", [])
        there = connections()
        # What the coordinator has done by now is in the answer, not what it told a moment ago.
        await asyncio.to_thread(view.add, "local", 1)
        (after,) = json.loads((await jp_fetch("notebook-cluster", "api", "clusters")).body)
        assert [node["name"] for node in after["state"]["nodes"]] == ["local"]
        assert connections() == there


async def test_a_page_of_another_site_cannot_act_with_the_cookies_of_the_browser(server: Any, jp_fetch: Fetch) -> None:
    cookies = await log_in(server, jp_fetch)
    body = json.dumps({"id": 1, "action": "detach", "cluster": "nowhere"})

    async def status(headers: dict[str, str]) -> int:
        with pytest.raises(HTTPClientError) as refused:
            await jp_fetch("notebook-cluster", "actions", method="POST", body=body, headers=headers)
        return int(refused.value.code)

    assert await status(as_browser(cookies)) == 403
    assert await status(as_browser(cookies, **{"X-XSRFToken": "made-up"})) == 403
    # With the header, which only the server's own page knows, it is understood: there is no such cluster.
    assert await status(as_browser(cookies, **{"X-XSRFToken": cookies["_xsrf"]})) == 409


async def test_a_page_of_another_site_gets_no_stream(server: Any, jp_fetch: Fetch, jp_ws_fetch: Fetch) -> None:
    cookies = await log_in(server, jp_fetch)
    with pytest.raises(HTTPClientError) as refused:
        await jp_ws_fetch("notebook-cluster", "stream", headers=as_browser(cookies, Origin="https://elsewhere.example"))
    assert refused.value.code == 403


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), 1e9, "soon"])
def test_a_time_that_cannot_be_is_refused_by_name(seconds: object) -> None:
    with pytest.raises((TraitError, ValueError), match="unreachable_after"):
        NotebookCluster(unreachable_after=seconds)
