"""What the person at a shared machine sees and types while it is shared."""

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import zmq

from notebook_cluster.agent import Agent, AgentReady, AgentSettings, SharingEvent
from notebook_cluster.cli.console import Keyboard
from notebook_cluster.cli.introduction import add_line, introduce

if TYPE_CHECKING:
    from notebook_cluster.discovery import ClusterBrowser, FoundCluster

_YES, _NO = ("y", "yes"), ("n", "no")


class Terminal:
    """Introduces the sharing. With a person there (``interactive``) it also prints what happens, asks what
    ``--confirm`` needs asked, lists the clusters that invite machines, and joins one; without one the log says what
    happens, and only new codes are printed.

    ``join``: a cluster that was chosen already, with its code.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        interactive: bool,
        picture: bool,
        join: "tuple[FoundCluster, str] | None" = None,
    ) -> None:
        self._settings = settings
        self._interactive = interactive
        self._picture = picture
        self._chosen = join
        self._agent: Agent | None = None
        self._ready: AgentReady | None = None
        self._questions: dict[int, SharingEvent] = {}
        self._clusters: list[FoundCluster] = []
        """In the order in which they were shown: the first has number 1."""
        self._joining: FoundCluster | None = None
        """Whose code is typed next."""
        self._work: set[asyncio.Task[None]] = set()

    def ready(self, ready: AgentReady) -> None:
        """The agent can be reached."""
        self._ready = ready
        introduce(ready, self._settings, picture=self._picture)

    def happened(self, event: SharingEvent) -> None:
        """What the agent says."""
        if event.kind == "code-opened":
            self._opened(event)
            return
        if not self._interactive:
            return
        _say(event.text)
        if event.kind in ("code-closed", "code-dead"):
            _say("type 'new' for a new code")
        elif event.kind == "confirm":
            self._questions[event.ticket] = event
            self._ask()
        elif event.kind == "confirm-over":
            self._questions.pop(event.ticket, None)
            self._ask()

    async def beside(self, agent: Agent) -> None:
        """Read what is typed, until cancelled."""
        if not self._interactive:
            return
        self._agent = agent
        keyboard = Keyboard(self.typed)
        keyboard.start()
        browser: ClusterBrowser | None = None
        try:
            if self._chosen is not None:
                self._do(self._join(agent, *self._chosen))
            elif not self._settings.dial:
                browser = await self._look()
            await asyncio.Event().wait()
        finally:
            keyboard.close()
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)
            if browser is not None:
                await asyncio.to_thread(browser.close)

    def _opened(self, event: SharingEvent) -> None:
        """The first code is part of the introduction; later ones are said with what to type."""
        if self._ready is None:
            return
        typed = add_line(self._ready.host, event.port, event.code)
        _say(f"new code: {event.code}, good for one person: {typed}")

    # ---- clusters that invite machines -----------------------------------------------------------------------------

    async def _look(self) -> "ClusterBrowser":
        """Show them, from now on."""
        loop = asyncio.get_running_loop()

        def changed(found: "dict[str, FoundCluster]") -> None:
            loop.call_soon_threadsafe(self._found, found)

        def start() -> "ClusterBrowser":
            # Loading zeroconf takes longer than everything else here.
            from notebook_cluster.discovery import ClusterBrowser

            browser = ClusterBrowser(changed)
            browser.start()
            return browser

        return await asyncio.to_thread(start)

    def _found(self, found: "dict[str, FoundCluster]") -> None:
        from notebook_cluster.cli.picker import title

        known = {cluster.instance: index for index, cluster in enumerate(self._clusters)}
        for instance, cluster in sorted(found.items()):
            if instance in known:
                self._clusters[known[instance]] = cluster
            elif cluster.pairing_port:
                self._clusters.append(cluster)
                number = len(self._clusters)
                _say(f"cluster on this network: {title(cluster)}: type {number} to join it")

    async def _join(self, agent: Agent, cluster: "FoundCluster", code: str) -> None:
        from notebook_cluster.pairing import PairingError, first_that_answers

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            host = await first_that_answers(context, cluster.hosts, cluster.pairing_port, cluster.public_key)
            await agent.join(f"{host}:{cluster.pairing_port}", code)
        except PairingError as error:
            _say(f"{cluster.name} was not joined: {error}")
            if error.tries_left:
                self._joining = cluster
                self._ask()
        except (OSError, ValueError, RuntimeError) as error:
            _say(f"{cluster.name} was not joined: {error}")
        finally:
            context.destroy(linger=0)

    # ---- what is typed -------------------------------------------------------------------------------------------

    def typed(self, line: str) -> None:
        """A line from the keyboard: the answer to what was asked last, or the number of a cluster."""
        agent = self._agent
        if agent is None:
            return
        if self._questions:
            self._answer(agent, line.lower())
        elif self._joining is not None:
            self._typed_code(agent, self._joining, line)
        elif line.isascii() and line.isdigit() and 0 < int(line[:9]) <= len(self._clusters):
            self._joining = self._clusters[int(line) - 1]
            self._ask()
        elif line.lower() == "new":
            self._new_code(agent)
        elif line:
            numbers = f"the number of a cluster (1 to {len(self._clusters)}), " if self._clusters else ""
            _say(f"{line[:60]!r} means nothing here: type {numbers}'new' for a new code, or press Ctrl-C to stop")

    def _answer(self, agent: Agent, word: str) -> None:
        ticket = next(iter(self._questions))
        if word in _YES + _NO:
            del self._questions[ticket]
            if not agent.answer(ticket, word in _YES):
                _say("too late: nobody waits for that answer any more")
        self._ask()

    def _ask(self) -> None:
        """Ask for the oldest answer that is missing, else for the code that was begun."""
        if self._questions:
            event = next(iter(self._questions.values()))
            _prompt(f"start node {event.node} for {event.owner}? y or n: ")
        elif self._joining is not None:
            _prompt(f"code of {self._joining.name} (its owner sees it in the notebook; empty: do not join): ")

    def _typed_code(self, agent: Agent, cluster: "FoundCluster", line: str) -> None:
        from notebook_cluster.security import read_code

        if not line:
            self._joining = None
            _say(f"{cluster.name} is not joined")
            return
        try:
            code = read_code(line)
        except ValueError as error:
            _say(str(error))
            self._ask()
            return
        self._joining = None
        self._do(self._join(agent, cluster, code))

    def _new_code(self, agent: Agent) -> None:
        try:
            agent.new_code()
        except (OSError, RuntimeError) as error:
            _say(f"there is no new code: {error}")

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def _prompt(text: str) -> None:
    print(_shown(text), end="", flush=True)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {_shown(text)}", flush=True)


def _shown(text: str) -> str:
    """``text`` on one line; what others said in it cannot steer the terminal."""
    return "".join(character for character in text if character.isprintable())
