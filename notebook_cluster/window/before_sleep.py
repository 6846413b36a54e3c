"""Has something done before this machine sleeps, while :mod:`.sleep_notices` holds it back."""

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable

from notebook_cluster.protocol.views import RequestError

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "notebook_cluster.window.sleep_notices")
READY_S = 10.0


class BeforeSleep:
    """``work`` is awaited each time that the machine is about to sleep; from :meth:`start` to :meth:`close`."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._process: asyncio.subprocess.Process | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when notices come.

        Raises:
            RequestError: none do on this machine; says why.
        """
        process = self._process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        try:
            line = (await asyncio.wait_for(process.stdout.readline(), READY_S)).decode(errors="replace").strip()
        except TimeoutError:
            line = "error: it says nothing"
        if line != "ready":
            self.close()
            raise RequestError(f"--survive: {line.removeprefix('error: ') or 'its process has ended'}")
        self._following = asyncio.create_task(self._follow(process))

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        assert process.stdin is not None
        async for raw in process.stdout:
            word = raw.decode(errors="replace").strip()
            log.info("this machine: %s", word)
            if word == "sleeps":
                try:
                    await self._work()
                except Exception:
                    log.exception("what was to be done before this machine sleeps failed")
                with contextlib.suppress(OSError):
                    process.stdin.write(b"done\n")

    def close(self) -> None:
        """Nobody is told any more."""
        if self._following is not None:
            self._following.cancel()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # it ends with that, and what it has started too
