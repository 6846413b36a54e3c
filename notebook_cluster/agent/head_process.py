"""One head: the process of a coordinator that runs here for another machine's window, over its restarts."""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from notebook_cluster.agent.resources import Resources
from notebook_cluster.journal.reading import has_crashed
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol import heads as h
from notebook_cluster.protocol.views import ConnectionFile
from notebook_cluster.security import write_private

log = logging.getLogger(__name__)

START_TIMEOUT = 30.0
AGAIN_S = (0.5, 2.0, 10.0, 60.0)
"""Seconds before a head that was killed is started again, if nobody opens a window: the first, the second time..., the
last of them from then on; the count begins anew when one has run for so long."""
STEADY_S = 300.0
LOOK_S = 0.02
_END_S = 12.0
"""For a head to end its cluster after SIGTERM."""
ORDER_FILE = "head.json"


class HeadTrouble(Exception):
    """Why a head is not started, or not there; one line."""


class Head:
    """One coordinator process, over its restarts. ``folder``: its journal, log, identity and trusted peers."""

    def __init__(self, order: h.StartHead, owner_key: str, owner: str, folder: Path, resources: Resources) -> None:
        self.cluster = order.cluster
        self.owner_key = owner_key
        self.owner = owner
        self.folder = folder
        self.file: ConnectionFile | None = None
        self.on_gone: Callable[[], None] = lambda: None
        """Called when its process has ended."""
        self._order = order
        self._resources = resources
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._ending = False
        self._hurry = asyncio.Event()

    @property
    def running(self) -> bool:
        """Its process is there and can be dialled."""
        return self.file is not None

    @property
    def wanted(self) -> bool:
        """It runs, or is being started again after it was killed."""
        return self._keeping is not None and not self._keeping.done()

    async def start(self, *, resume: bool) -> None:
        """Start it and return when it can be dialled. HeadTrouble: it did not start."""
        await self._start(resume)
        self._keeping = asyncio.create_task(self._keep())

    async def _start(self, resume: bool) -> None:
        (self.folder / "connection.json").unlink(missing_ok=True)
        order, path = self._order, self.folder / "coordinator.log"
        options = ["--cluster", order.cluster, "--runtime", str(self.folder), f"--lease={order.lease}"]
        options += [
            f"--agent-lease={order.agent_lease}",
            f"--directory={order.directory}",
            f"--head={self._resources.peer}",
        ]
        with open(path, "ab") as output:  # noqa: ASYNC230 - a local file, opened once
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "notebook_cluster.coordinator", *options, *(["--resume"] if resume else []),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, cwd="/",
            )  # fmt: skip
        self._resources.programs.own(self._process.pid)
        self._resources.watchdog.add(self._process.pid)
        process = self._process
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline and process.returncode is None:
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                file = msgspec.json.decode((self.folder / "connection.json").read_bytes(), type=ConnectionFile)
                if file.pid == process.pid:
                    self.file = file
                    return
            await asyncio.sleep(LOOK_S)
        self._process_ended(process.pid)
        if time.monotonic() >= deadline:
            process.kill()
            raise HeadTrouble(f"the head said nothing for {START_TIMEOUT:g} s and was ended: see {path} there")
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        raise HeadTrouble(f"the head did not start: {(lines or ['no word from it'])[-1][-300:]}")

    async def _keep(self) -> None:
        """Until it has ended its cluster: one that was killed is started again from its journal."""
        tries = 0
        while True:
            began = time.monotonic()
            process = self._process
            assert process is not None
            if process.returncode is None:
                await process.wait()
                self._process_ended(process.pid)
                self.on_gone()
            if self._ending or not await asyncio.to_thread(self._is_to_go_on):
                self.forget_order()
                return
            tries = 0 if time.monotonic() - began > STEADY_S else tries + 1
            log.warning("the head of cluster %s was killed: starting it again from its journal", self.cluster)
            self._hurry.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), AGAIN_S[min(max(tries - 1, 0), len(AGAIN_S) - 1)])
            try:
                await self._start(True)
            except (HeadTrouble, OSError) as error:
                log.error("cluster %s: %s", self.cluster, error)

    def hurry(self) -> None:
        """Somebody waits for it: one that was killed is started again now."""
        self._hurry.set()

    def _is_to_go_on(self) -> bool:
        try:
            return has_crashed(journal_path(self.folder))
        except ValueError as error:
            log.error("cluster %s cannot go on: %s", self.cluster, error)
            return False

    def _process_ended(self, pid: int) -> None:
        self.file = None
        self._resources.watchdog.drop(pid)

    def note_order(self) -> None:
        """An agent that is started again starts it again too."""
        kept = {"owner_key": self.owner_key, "owner": self.owner, "order": msgspec.to_builtins(self._order)}
        write_private(self.folder / ORDER_FILE, msgspec.json.encode(kept))

    def forget_order(self) -> None:
        """Nobody starts it again."""
        (self.folder / ORDER_FILE).unlink(missing_ok=True)

    async def end(self) -> None:
        """Have it end its cluster, and wait for that; one that does not is killed."""
        self._ending = True
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _END_S)
            except TimeoutError:
                process.kill()
        if self._keeping is not None:
            self._keeping.cancel()
        self.forget_order()
