"""An agent as the work of this process, from its start to the signal that ends it."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from notebook_cluster.agent.events import Tell
from notebook_cluster.agent.kernels.programs import become_reaper
from notebook_cluster.agent.service import Agent
from notebook_cluster.agent.settings import AgentSettings, Ready


def run_agent(
    settings: AgentSettings,
    on_ready: Callable[[Ready], None],
    on_event: Tell = lambda event: None,
    beside: Callable[[Agent], Coroutine[Any, Any, None]] | None = None,
) -> str:
    """Run an agent in this process until SIGTERM, SIGINT or SIGHUP, or its own end; returns the reason.

    ``beside(agent)`` runs on the agent's loop from when it is ready until it ends: it reads what the person types.

    Raises as :meth:`Agent.run`.
    """

    become_reaper()

    async def serve() -> str:
        agent = Agent(settings, on_event=on_event)
        companion: list[asyncio.Task[None]] = []

        def ready(said: Ready) -> None:
            on_ready(said)
            if beside is not None:
                companion.append(asyncio.ensure_future(beside(agent)))

        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # nohup ignores it, so that sharing goes on after the terminal was closed.
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, agent.stop, f"stopped by {number.name}")
        try:
            return await agent.run(ready)
        finally:
            for task in companion:
                task.cancel()
            await asyncio.gather(*companion, return_exceptions=True)

    return asyncio.run(serve())
