"""HTTP and WebSocket to calls of :mod:`.hub` and :mod:`.actions`, and back; nothing else happens here."""

import asyncio
import contextlib
import json
from typing import Any

from jupyter_core.utils import ensure_async
from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado.web import HTTPError, authenticated
from tornado.websocket import WebSocketClosedError, WebSocketHandler

from notebook_cluster.client import ClusterError
from notebook_cluster.protocol.sidebar import Done
from notebook_cluster.server.actions import perform
from notebook_cluster.server.browser import (
    MAX_ACTION_BYTES,
    MAX_OPEN_ACTIONS,
    BadAction,
    BrowserOutbox,
    to_action,
    to_json,
)
from notebook_cluster.server.hub import ANSWER_SECONDS, Hub, run_slow
from notebook_cluster.server.kept import report_of
from notebook_cluster.server.watching import WatchedCluster
from notebook_cluster.widgets.model import panel_model

RESOURCE = "notebook_cluster"
"""What an authorizer of jupyter_server is asked for: ``read``, ``write`` (actions) or ``execute`` (the stream)."""


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


class _Handler(APIHandler):  # type: ignore[misc]
    auth_resource = RESOURCE

    def initialize(self, hub: Hub) -> None:
        self.hub = hub


class ClustersHandler(_Handler):
    """``GET notebook-cluster/api/clusters``: see :func:`describe_clusters`."""

    @authenticated  # type: ignore[untyped-decorator]
    @authorized  # type: ignore[untyped-decorator]
    async def get(self) -> None:
        """Answer with the list as JSON."""
        await self.finish(json.dumps(await describe_clusters(self.hub), allow_nan=False))


class OverviewHandler(_Handler):
    """``GET notebook-cluster/overview``: an Overview."""

    @authenticated  # type: ignore[untyped-decorator]
    @authorized  # type: ignore[untyped-decorator]
    async def get(self) -> None:
        """Look anew and answer."""
        await self.finish(to_json(await self.hub.overview_now()))


class SeriesHandler(_Handler):
    """``GET notebook-cluster/clusters/NAME/series``: a CurvePoints with all curves, thinned."""

    @authenticated  # type: ignore[untyped-decorator]
    @authorized  # type: ignore[untyped-decorator]
    async def get(self, name: str) -> None:
        """Answer with the curves; 404 for a cluster that is not known."""
        series = self.hub.series(name)
        if series is None:
            raise HTTPError(404, "no cluster of this name runs: GET notebook-cluster/overview names them")
        await self.finish(to_json(series))


class ReportHandler(_Handler):
    """``GET notebook-cluster/clusters/NAME/report``: the report of a cluster that has ended and is shown, as HTML."""

    @authenticated  # type: ignore[untyped-decorator]
    @authorized  # type: ignore[untyped-decorator]
    async def get(self, name: str) -> None:
        """Answer with the page; 404 with one line where there is none. It may run no script and load nothing."""
        try:
            state = self.hub.ended(name).state
            page = await run_slow(lambda: report_of(name, None if state is None else state.started))
        except ClusterError as error:
            raise HTTPError(404, str(error)) from None
        await self.finish(page, set_content_type="text/html; charset=UTF-8")

    @property
    def content_security_policy(self) -> str:
        """Of a page with names from other machines."""
        return "sandbox; default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'self'"


class ActionsHandler(_Handler):
    """``POST notebook-cluster/actions`` with an Action: a Done. Status 400: not an action; 409: it did not work."""

    @authenticated  # type: ignore[untyped-decorator]
    @authorized  # type: ignore[untyped-decorator]
    async def post(self) -> None:
        """Do it and answer when it is done."""
        try:
            done = await perform(self.hub, to_action(self.request.body))
            self.set_status(409 if done.error else 200)
        except BadAction as error:
            done = Done(id=error.id, error=str(error))
            self.set_status(400)
        await self.finish(to_json(done))


class StreamHandler(WebSocketMixin, WebSocketHandler, JupyterHandler):  # type: ignore[misc]
    """``notebook-cluster/stream``: one WebSocket for each browser; what is said is in ``protocol/sidebar.py``."""

    auth_resource = RESOURCE

    def initialize(self, hub: Hub) -> None:
        self.hub = hub
        self.browser: BrowserOutbox | None = None
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def max_message_size(self) -> int:
        """The connection is closed on a longer one."""
        return 4 * MAX_ACTION_BYTES

    async def get(self, *arguments: Any, **options: Any) -> None:
        """Refuse who is not logged in, or may not."""
        user = self.current_user
        if user is None or not await ensure_async(self.authorizer.is_authorized(self, user, "execute", RESOURCE)):
            raise HTTPError(403)
        await ensure_async(super().get(*arguments, **options))

    def open(self, *arguments: Any, **options: Any) -> None:
        """A browser is there."""
        super().open(*arguments, **options)
        self.browser = BrowserOutbox(self._write, self.hub.history)
        self._spawn(self._send(self.browser))
        self.hub.join(self.browser)

    async def _send(self, browser: BrowserOutbox) -> None:
        with contextlib.suppress(WebSocketClosedError):
            try:
                await browser.run()
            except WebSocketClosedError:
                raise
            except Exception:
                self.log.exception("notebook-cluster: sending to a browser failed; it connects anew")
                self.close()

    async def _write(self, text: str) -> None:
        await self.write_message(text)

    def on_message(self, message: str | bytes) -> None:
        """An action; its answer comes when it is done, and others may be asked for meanwhile."""
        browser = self.browser
        if browser is None:
            return
        try:
            action = to_action(message)
        except BadAction as error:
            browser.put_answer(to_json(Done(id=error.id, error=str(error))))
            return
        if browser.open_actions >= MAX_OPEN_ACTIONS:
            full = f"{MAX_OPEN_ACTIONS} actions of this page are not done yet: wait for them"
            browser.put_answer(to_json(Done(id=action.id, error=full)))
            return

        async def do() -> None:
            try:
                browser.put_answer(to_json(await perform(self.hub, action)))
            finally:
                browser.open_actions -= 1

        browser.open_actions += 1
        # Not among the tasks that end with the page: what was begun is finished.
        asking = asyncio.ensure_future(do())
        _asking.add(asking)
        asking.add_done_callback(_asking.discard)

    def on_close(self) -> None:
        """The browser is gone."""
        if self.browser is not None:
            self.hub.leave(self.browser)
        for task in self.tasks:
            task.cancel()
        super().on_close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


_asking: set["asyncio.Task[None]"] = set()


def handlers(base_url: str, hub: Hub) -> list[tuple[str, type[Any], dict[str, Any]]]:
    """(pattern, handler, its options) below ``base_url``."""

    def address(*parts: str) -> str:
        return str(url_path_join(base_url, "notebook-cluster", *parts))

    options = {"hub": hub}
    return [
        (address("api", "clusters"), ClustersHandler, options),
        (address("overview"), OverviewHandler, options),
        (address("clusters", r"([A-Za-z0-9_.-]{1,63})", "series"), SeriesHandler, options),
        (address("clusters", r"([A-Za-z0-9_.-]{1,63})", "report"), ReportHandler, options),
        (address("actions"), ActionsHandler, options),
        (address("stream"), StreamHandler, options),
    ]
