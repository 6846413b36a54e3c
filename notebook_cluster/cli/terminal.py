"""What the person at a shared machine sees and types while it is shared.

First how to add this machine, who may run code on it, and how that ends; then what happens, and what is asked.
"""

import asyncio
import getpass
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import zmq

from notebook_cluster.agent import FOLLOWS_ALL, Agent, AgentReady, AgentSettings, SharingEvent
from notebook_cluster.agent.machine import host_addresses
from notebook_cluster.cli.console import Keyboard, one_line
from notebook_cluster.protocol.clock import clock
from notebook_cluster.security import fingerprint, trusted_coordinators

if TYPE_CHECKING:
    from notebook_cluster.discovery import ClusterBrowser, FoundCluster

_QR_BORDER = 2
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


def introduce(ready: AgentReady, settings: AgentSettings, *, picture: bool) -> None:
    """Print everything. On a terminal the code is bold and, with ``picture``, drawn as QR where there is room."""
    terminal = sys.stdout.isatty()
    print("\n".join(how_to_add(ready, settings, bold=terminal)), flush=True)
    if terminal and picture and ready.code:
        print()
        draw_qr(add_line(ready.host, ready.pairing_port, ready.code))
    print("\n".join(["", *_who(settings), "", *_how_to_stop(settings)]), flush=True)


def add_line(host: str, port: int, code: str) -> str:
    """What is typed in a notebook to add this machine."""
    return f"%cluster add {host}:{port} --code {code}"


def _alone(host: str) -> str:
    return " (this machine is on no network yet)" if host.startswith("127.") else ""


def draw_qr(content: str) -> None:
    """``content`` as a QR picture on the terminal, if it has room for it."""
    import shutil

    import segno

    size = shutil.get_terminal_size()
    picture = segno.make(content, error="l", micro=False)
    width, _ = picture.symbol_size(border=_QR_BORDER)
    if width <= size.columns and width / 2 < size.lines:
        picture.terminal(out=sys.stdout, border=_QR_BORDER, compact=True)
        sys.stdout.flush()


def how_to_add(ready: AgentReady, settings: AgentSettings, *, bold: bool) -> Iterator[str]:
    """Lines: name, address and code of this machine, and what to type where."""
    from notebook_cluster.discovery import IN_GROUP

    where = f"{ready.host}:{ready.pairing_port if ready.code else ready.port}"
    where_heard = f"announced on the local network (mDNS){IN_GROUP}"
    yield f"This machine is shared as {ready.name!r}, port {ready.port}, and {where_heard}."
    if settings.dial:
        yield f"It goes to the cluster at {settings.dial} by itself, and opens no code of its own."
        return
    if not ready.code:
        yield f"No code is open: only who is trusted already can add it, as {ready.name} or {where}."
        return
    yield ""
    yield f"    code     {_BOLD + ready.code + _PLAIN if bold else ready.code}"
    yield f"    address  {where}{_alone(ready.host)}"
    yield ""
    yield _validity(settings)
    yield "In a notebook on this network:"
    yield f"    %cluster add {ready.name} --code {ready.code}"
    yield f"or, where {ready.name} is not found by its name:"
    yield f"    {add_line(ready.host, ready.pairing_port, ready.code)}"


def _validity(settings: AgentSettings) -> str:
    if not settings.code:
        return "The code is good for one person, once; then another one is shown here."
    end = time.strftime("%H:%M", time.localtime(time.time() + 60 * settings.code_minutes))
    return f"The code is good for any number of people, until {end} ({settings.code_minutes:g} minutes)."


def _who(settings: AgentSettings) -> Iterator[str]:
    user = getpass.getuser()
    yield "Who may run code here:"
    if settings.dial:
        yield f"  - the owner of the cluster at {settings.dial}"
    elif settings.pairing:
        yield "  - whoever was told the code and pairs with it: from then on, without a code"
    for entry in trusted_coordinators(settings.directory).entries():
        since = time.strftime("%Y-%m-%d", time.localtime(entry.since))
        yield f"  - {entry.owner}, paired on {since} (key {fingerprint(entry.key)})"
    yield f"  - user {user!r} on this machine"
    yield (
        f"Their code runs as user {user!r}: it can read, change and delete every file that {user!r} can, use the "
        "network and start programs. Give the code only to people whom you would let type here."
    )
    if settings.limits.owners == 1:
        yield "One owner at a time: while somebody has nodes here, nobody else gets any (see --owners)."
    else:
        yield (
            f"Up to {settings.limits.owners} owners at a time: all their nodes run as user {user!r}, so they can read "
            "each other's files and run code in each other's kernels. Allow it only for people who trust each other."
        )
    limits = settings.limits.lines()
    yield f"Limits: {'; '.join(limits)}." if limits else "Limits: none (see notebook-cluster share --help)."
    yield f"Their code starts in a folder of its own under {settings.directory / 'work'}."


def _how_to_stop(settings: AgentSettings) -> Iterator[str]:
    yield "Stop with Ctrl-C: that ends every kernel that was started here, and what it has started."
    if not FOLLOWS_ALL:
        yield "(This system cannot follow a program that leaves its environment behind as well: that one would go on.)"
    typical = settings.directory.parent.name == "agents"
    option = "" if typical else f" --data-dir {settings.directory}"
    yield f"Take trust back: notebook-cluster trust list{option}, then notebook-cluster trust remove OWNER{option}"
    yield f"Logs: {settings.directory}"


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
        host = host_addresses()[0]  # not as it was in the beginning: a notebook computer changes its network
        _say(f"new code: {event.code}, good for one person: {add_line(host, event.port, event.code)}{_alone(host)}")

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
    print(one_line(text), end="", flush=True)


def _say(text: str) -> None:
    print(f"{clock(time.time())}  {one_line(text)}", flush=True)
