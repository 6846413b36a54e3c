"""An agent as the work of this process, from its start to the signal that ends it, and where its log goes.

The log is a 0600 file for a private agent, the terminal for a shared one.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from notebook_cluster.agent.events import AgentReady, Tell
from notebook_cluster.agent.kernels.programs import become_reaper
from notebook_cluster.agent.service import Agent
from notebook_cluster.agent.settings import AgentSettings


def run_agent(
    settings: AgentSettings,
    on_ready: Callable[[AgentReady], None],
    on_event: Tell = lambda event: None,
    beside: Callable[[Agent], Coroutine[Any, Any, None]] | None = None,
) -> str:
    """Run an agent in this process until SIGTERM, SIGINT or SIGHUP, or its own end; returns the reason. One that an
    engine started keeps a checkpoint first, and may end with its standard input.

    ``beside(agent)`` runs on the agent's loop from when it is ready until it ends: it reads what the person types.

    Raises as :meth:`Agent.run`.
    """

    become_reaper()

    async def serve() -> str:
        agent = Agent(settings, on_event=on_event)
        companion: list[asyncio.Task[None]] = []

        def ready(said: AgentReady) -> None:
            on_ready(said)
            if beside is not None:
                companion.append(asyncio.ensure_future(beside(agent)))

        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # nohup ignores it, so that sharing goes on after the terminal was closed.
            numbers.append(signal.SIGHUP)
        end = agent.stop if settings.launch is None else agent.leave
        for number in numbers:
            loop.add_signal_handler(number, end, f"stopped by {number.name}")
        if settings.launch is not None and settings.launch.lifeline:
            _watch_standard_input(lambda: agent.leave("the connection that had it started has ended"))
        try:
            return await agent.run(ready)
        finally:
            for task in companion:
                task.cancel()
            await asyncio.gather(*companion, return_exceptions=True)

    return asyncio.run(serve())


def _watch_standard_input(ended: Callable[[], None]) -> None:
    """Call ``ended`` on the loop when nobody can write there any more."""
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            ended()

    with contextlib.suppress(OSError):  # a file has no other end
        loop.add_reader(0, readable)


_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_MAX_BYTES = 5 * 1024 * 1024


def log_to_file(path: Path) -> None:
    """Append the log to ``path`` (mode 0600); one that is over 5 MB already begins anew."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    if os.fstat(descriptor).st_size > _MAX_BYTES:
        # Not another file: whoever started this process may have stderr in the same one.
        os.ftruncate(descriptor, 0)
    handler = logging.StreamHandler(os.fdopen(descriptor, "w", encoding="utf-8"))
    handler.setFormatter(logging.Formatter(_FORMAT))
    _install(handler)


def log_to_terminal() -> None:
    """Write the log to stderr, with rich's colours where it is a terminal."""
    handler: logging.Handler
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s", datefmt="%X"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT))
    _install(handler)


def _install(handler: logging.Handler) -> None:
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("notebook_cluster").setLevel(logging.INFO)
