"""What one Jupyter server knows of this user's clusters, and the browsers that it tells."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeVar

from notebook_cluster.client import ClusterError, PeerWatch, find_clusters, find_peers
from notebook_cluster.launchers import known_engines
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION
from notebook_cluster.protocol.launches import LAUNCH_OPTIONS
from notebook_cluster.protocol.sidebar import ClusterRow, CurvePoints, EngineChoice, Overview, ServerInfo, Sharing
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.views import ConnectionFile
from notebook_cluster.server.browser import BrowserOutbox, to_json
from notebook_cluster.server.sharing import sharing
from notebook_cluster.server.watching import WatchedCluster

log = logging.getLogger(__name__)

LOOK_PERIOD = 1.0
TELL_PERIOD = 0.5
"""Between two overviews; curves every second time."""
ANSWER_SECONDS = 5.0
ENDED_SECONDS = 600.0
"""How long a cluster that has ended is shown, with its last state."""
ENDED_SHOWN = 4
_SERVER = ServerInfo(version=VERSION, protocol=PROTOCOL_VERSION)
_OPTIONS = [name for name in LAUNCH_OPTIONS if name not in ("on", "hosts")]
_OURS: dict[str, tuple[str, Literal["number", "names", "either"], list[str]]] = {
    "slurm": ("Slurm", "number", _OPTIONS),
    "ssh": ("SSH", "names", ["nodes_per_host", "setup", "address"]),
    "ipp": ("ipyparallel", "either", ["nodes_per_host", "setup", "address", "folder"]),
}

Value = TypeVar("Value")
_looks = ThreadPoolExecutor(max_workers=4, thread_name_prefix="notebook-cluster")
_actions = ThreadPoolExecutor(max_workers=8, thread_name_prefix="notebook-cluster-action")
"""What blocks runs here, and not on the server's own pool: a coordinator that never answers must not use up the threads
that serve notebooks."""


async def run_quick(call: Callable[[], Value]) -> Value:
    """``call()`` in a thread for what takes milliseconds."""
    return await asyncio.get_running_loop().run_in_executor(_looks, call)


async def run_slow(call: Callable[[], Value]) -> Value:
    """``call()`` in a thread for what may take a minute."""
    return await asyncio.get_running_loop().run_in_executor(_actions, call)


class Hub:
    """From :meth:`start` to :meth:`close`, on the server's loop.

    Args:
        root: where local nodes of clusters that are started here work.
        unreachable_after: seconds without a word from a coordinator until its cluster is shown as unreachable.
    """

    def __init__(self, root: str, unreachable_after: float = 15.0) -> None:
        self.root = root
        self._unreachable_after = unreachable_after
        self.clusters: dict[str, WatchedCluster] = {}
        self._dismissed: dict[str, int] = {}
        """Cluster -> process of its coordinator, which may take a while to end."""
        self._unusable: dict[str, str] = {}
        self._peers: list[PeerView] = []
        self._sharing = Sharing(on=False, name="", code="", command="", qr_svg_data_url="")
        self._engines: list[EngineChoice] = []
        self._browsers: set[BrowserOutbox] = set()
        self._peer_watch: PeerWatch | None = None
        self._asking: asyncio.Task[None] | None = None
        self._looking = asyncio.Lock()
        self._look_soon = asyncio.Event()
        self._work: list[asyncio.Task[None]] = []
        self._told = ""
        self._closing = False

    def start(self) -> None:
        """Look for clusters from now on."""
        if not self._work and not self._closing:
            self._work = [asyncio.ensure_future(self._look_again_and_again()), asyncio.ensure_future(self._tell())]

    async def close(self) -> None:
        """Leave every cluster; they go on."""
        work, self._work = self._work, []
        # The first is not cancelled: a look that is broken off leaves half of what it has opened.
        self._closing = True
        self._look_soon.set()
        for task in work[1:]:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await self._listen(False)
        watched, self.clusters = list(self.clusters.values()), {}
        await asyncio.gather(*(run_quick(cluster.close) for cluster in watched))

    # ---- looking

    def look_soon(self) -> None:
        """Something was just changed from here: show it without waiting."""
        self._look_soon.set()

    async def _look_again_and_again(self) -> None:
        failed = ""
        while not self._closing:
            try:
                await self.look()
                failed = ""
            except Exception as error:
                # Once, not every second.
                if failed != (failed := f"{type(error).__name__}: {error}"):
                    log.exception("notebook-cluster: looking for clusters failed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_soon.wait(), LOOK_PERIOD)
            self._look_soon.clear()

    async def look(self) -> None:
        """Which clusters run, is this machine shared and, while a browser is there, which peers are there."""
        async with self._looking:
            found, self._sharing = await run_quick(lambda: (find_clusters(), sharing()))
            self._unusable = {name: str(error) for name, error in found.items() if isinstance(error, ClusterError)}
            await self._meet({name: file for name, file in found.items() if isinstance(file, ConnectionFile)})
            if not self._engines or (self._browsers and self._peer_watch is None):
                # Anew for whoever comes to look: a package that brings one may have been installed meanwhile.
                self._engines = await run_quick(engine_choices)
            await self._listen(bool(self._browsers))
            if self._peer_watch is not None:
                self._peers = await run_quick(self._peer_watch.views)

    async def _meet(self, running: dict[str, ConnectionFile]) -> None:
        self._dismissed = {name: pid for name, pid in self._dismissed.items() if name in running}
        for name, file in running.items():
            if self._dismissed.get(name) == file.pid:
                continue
            known = self.clusters.get(name)
            if known is not None and known.file.pid == file.pid:
                continue
            if known is not None:
                await run_quick(known.close)
            self.clusters[name] = WatchedCluster(file, bool(self._browsers), self._unreachable_after)
        ended = sorted(
            (cluster for cluster in self.clusters.values() if cluster.ended_at is not None),
            key=lambda cluster: -(cluster.ended_at or 0.0),
        )
        for place, cluster in enumerate(ended):
            if place >= ENDED_SHOWN or time.monotonic() - (cluster.ended_at or 0.0) > ENDED_SECONDS:
                del self.clusters[cluster.file.cluster]
                await run_quick(cluster.close)
        for cluster in self.clusters.values():
            cluster.check()

    async def _listen(self, wanted: bool) -> None:
        """Listen for peers while somebody looks: mDNS costs every machine of the network something."""
        if wanted and self._peer_watch is None:
            watch = self._peer_watch = await run_quick(PeerWatch)
            await watch.start()
            self._asking = asyncio.ensure_future(watch.ask_typed())
        elif not wanted and self._peer_watch is not None:
            watch, self._peer_watch, self._peers = self._peer_watch, None, []
            if self._asking is not None:
                self._asking.cancel()
                await asyncio.gather(self._asking, return_exceptions=True)
            await watch.close()

    # ---- what is so

    def overview(self) -> Overview:
        """The newest state."""
        rows = [cluster.row() for cluster in self.clusters.values() if not cluster.just_met]
        rows += [
            ClusterRow(name=name, condition="unreachable", reason=reason, state=None)
            for name, reason in self._unusable.items()
        ]
        rows.sort(key=lambda row: (row.condition == "ended", row.name))
        return Overview(peers=self._peers, clusters=rows, sharing=self._sharing, server=_SERVER, engines=self._engines)

    async def overview_now(self) -> Overview:
        """The same for who asks once: looks anew, waits for coordinators and, with no browser there, for peers."""
        await self.look()
        known = [asyncio.ensure_future(cluster.known.wait()) for cluster in self.clusters.values()]
        if known:
            _, late = await asyncio.wait(known, timeout=ANSWER_SECONDS)
            for task in late:
                task.cancel()
        if self._peer_watch is None:
            self._peers = await run_slow(find_peers)
        return self.overview()

    def series(self, name: str) -> CurvePoints | None:
        """All curves of cluster ``name``, thinned; None when it is not known."""
        cluster = self.clusters.get(name)
        return None if cluster is None else CurvePoints(cluster=name, reset=True, series=cluster.history.all())

    async def running(self, name: str) -> WatchedCluster:
        """The running cluster ``name``.

        Raises:
            ClusterError: it does not run (names those that do), or does not answer.
        """
        if name not in self.clusters or self.clusters[name].condition == "ended":
            # It may have been started a moment ago.
            await self.look()
        cluster = self.clusters.get(name)
        if cluster is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(cluster.known.wait(), ANSWER_SECONDS)
            if cluster.condition == "running":
                return cluster
        if name in self._unusable:
            raise ClusterError(self._unusable[name])
        if cluster is not None:
            raise ClusterError(cluster.reason)
        names = sorted({*self._unusable, *(name for name, one in self.clusters.items() if one.condition != "ended")})
        known = f"running: {', '.join(names)}" if names else "none runs"
        raise ClusterError(f"no cluster {name!r} runs on this machine ({known})")

    def ended(self, name: str) -> WatchedCluster:
        """The cluster ``name`` that has ended and is still shown.

        Raises:
            ClusterError: it runs, or is not shown.
        """
        cluster = self.clusters.get(name)
        if cluster is None or cluster.ended_at is None:
            what = "it runs" if cluster is not None or name in self._unusable else "it is not shown any more"
            raise ClusterError(f"no cluster {name!r:.100} that has ended is shown: {what}")
        return cluster

    async def dismiss(self, name: str) -> None:
        """Show the cluster ``name``, which has ended, no more. ClusterError: as :meth:`ended`."""
        async with self._looking:
            cluster = self.ended(name)
            del self.clusters[name]
            self._dismissed[name] = cluster.file.pid
        await run_quick(cluster.close)

    # ---- browsers

    def join(self, browser: BrowserOutbox) -> None:
        """Tell ``browser`` everything, and from now on what changes."""
        first = not self._browsers
        self._browsers.add(browser)
        browser.put_overview(to_json(self.overview()))
        for name in self.clusters:
            browser.put_series(name, None)
        if first:
            self._looked_at(True)
            self.look_soon()

    def leave(self, browser: BrowserOutbox) -> None:
        self._browsers.discard(browser)
        if not self._browsers:
            self._looked_at(False)
            self.look_soon()

    def _looked_at(self, looked_at: bool) -> None:
        for cluster in self.clusters.values():
            cluster.look_at(looked_at)

    def history(self, name: str) -> str | None:
        """:meth:`series` as JSON."""
        series = self.series(name)
        return None if series is None else to_json(series)

    async def _tell(self) -> None:
        turn = 0
        while True:
            await asyncio.sleep(TELL_PERIOD)
            turn += 1
            try:
                self._tell_overview()
                if turn % 2 == 0:
                    self._tell_series()
            except Exception:
                log.exception("notebook-cluster: telling the browsers failed")

    def _tell_overview(self) -> None:
        if not self._browsers:
            return
        text = to_json(self.overview())
        if text != self._told:
            self._told = text
            for browser in self._browsers:
                browser.put_overview(text)

    def _tell_series(self) -> None:
        for name, cluster in self.clusters.items():
            fresh, whole = cluster.history.take_fresh(), cluster.history.take_whole()
            if not self._browsers or not (fresh or whole):
                continue
            text = None if whole else to_json(CurvePoints(cluster=name, reset=False, series=fresh))
            for browser in self._browsers:
                browser.put_series(name, text)


def engine_choices() -> list[EngineChoice]:
    """The engines that a cluster can be started on, ours first, and what each is to be asked for in a form.

    Those of other packages are not loaded: what they ask for is not known, so they are offered everything and say
    themselves what they do not take.
    """
    known = known_engines()
    names = [*(name for name in _OURS if name in known), *sorted(set(known) - _OURS.keys())]
    return [EngineChoice(name, *_OURS.get(name, (name, "either", _OPTIONS))) for name in names]
