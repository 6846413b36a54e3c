"""The side of a shared agent that faces other people: its announcement over mDNS, its codes, going to clusters.

A network without mDNS must not end the sharing.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.events import EventKind, SharingEvent, Tell
from notebook_cluster.agent.settings import AgentSettings
from notebook_cluster.agent.sharing.coordinators import Coordinators, Dialling
from notebook_cluster.link import Listener
from notebook_cluster.pairing import PairingHost, Partner
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.security import Gate, Identity, OpenCode, Trusted, TrustStore, new_code, owner

if TYPE_CHECKING:
    from notebook_cluster.discovery import Advertiser, Browser

_NAMESAKES_S = 5.0
"""How long another peer of this name may take to answer."""


class Announcer:
    """From :meth:`start` to :meth:`close`.

    Args:
        name, public_key, port, device: what is said, see :class:`notebook_cluster.discovery.Advertiser`.
        tell: hears why the peer cannot be seen, and that another one has its name.
    """

    def __init__(self, name: str, public_key: str, port: int, device: Callable[[], str], tell: Tell) -> None:
        self._name = name
        self._public_key = public_key
        self._port = port
        self._device = device
        self._tell = tell
        self._pairing_port = 0
        self._problem = ""
        self._advertiser: Advertiser | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; returns at once."""
        self._tasks = [asyncio.create_task(self._advertise()), asyncio.create_task(self._look_for_namesakes())]

    def set_pairing_port(self, port: int) -> None:
        """A code is open at ``port``; 0: none is."""
        self._pairing_port = port
        if self._advertiser is not None:
            self._advertiser.set_pairing_port(port)

    def check(self) -> None:
        """Tell why the peer cannot be seen now, when that changed."""
        problem = self._advertiser.problem if self._advertiser is not None else ""
        if problem and problem != self._problem:
            self._warn(f"this machine cannot be seen over mDNS: {problem}")
        self._problem = problem

    async def close(self) -> None:
        """Tell the network that the peer is gone."""
        if self._tasks:
            advertising, looking = self._tasks
            looking.cancel()
            # The advertiser belongs to a thread until it is there.
            await asyncio.gather(advertising, looking, return_exceptions=True)
        if self._advertiser is not None:
            await asyncio.to_thread(self._advertiser.close)

    async def _advertise(self) -> None:
        def start() -> "Advertiser":
            from notebook_cluster.discovery import Advertiser

            # With the code that is open already: a second record is heard up to a second after the first.
            advertiser = Advertiser(
                self._name, self._public_key, self._port, self._device(), pairing_port=self._pairing_port
            )
            advertiser.start()
            return advertiser

        try:
            self._advertiser = await asyncio.to_thread(start)
            self._advertiser.set_pairing_port(self._pairing_port)
        except Exception as error:
            self._warn(f"this machine is not announced over mDNS: {error}")

    async def _look_for_namesakes(self) -> None:
        def start() -> "Browser":
            from notebook_cluster.discovery import Browser

            browser = Browser()
            browser.start()
            return browser

        starting = asyncio.ensure_future(asyncio.to_thread(start))
        try:
            browser = await asyncio.shield(starting)
            await asyncio.sleep(_NAMESAKES_S)
            others = [peer for peer in browser.same_name(self._name) if peer.public_key != self._public_key]
            if others:
                self._warn(
                    f"another peer on this network is called {self._name!r} too (at {others[0].hosts[0]}): share one "
                    "of the two with another --name"
                )
        finally:
            # It belongs to a thread until it is there.
            browser = await starting
            await asyncio.to_thread(browser.close)

    def _warn(self, text: str) -> None:
        self._tell(SharingEvent("warning", text))


class PairingCodes:
    """One code at a time: the one that the person gave, for many coordinators, or made-up ones, each for one.

    Args:
        port: where the agent listens; a fixed one is followed by the pairing port.
        here: what the agent is.
        on_port: called with the port on which a code is open, 0 when none is any more.
    """

    def __init__(
        self,
        settings: AgentSettings,
        store: TrustStore,
        context: zmq.Context[zmq.Socket[bytes]],
        gate: Gate,
        *,
        here: Callable[[], Here],
        tell: Tell,
        on_port: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._tell = tell
        self._on_port = on_port
        self._open: OpenCode | None = None
        self._port = 0
        port = settings.port + 1 if 0 < settings.port < 65535 else 0
        self._host = PairingHost(
            context,
            f"tcp://{settings.bind}:{port}",
            gate=gate,
            here=here,
            on_paired=self._paired,
            on_attempt=lambda line: self._say("attempt", f"pairing: {line}"),
        )
        self._host.on_closed = self._closed

    @property
    def code(self) -> str:
        """The code that is open, or empty."""
        return self._host.code.code if self._host.code is not None else ""

    @property
    def port(self) -> int:
        """Where it is open; 0 when none is."""
        return self._port if self._host.is_open else 0

    def start(self) -> None:
        """Open the first code.

        Raises:
            OSError: the port is taken.
            ValueError: the code that was given is unusable.
        """
        given = self._settings.code
        if given:
            self._use(OpenCode(given, single_use=False, valid_s=self._settings.code_minutes * 60))
        else:
            self.new()

    def new(self) -> str:
        """Open a made-up code for one coordinator in the place of the present one, and return it.

        Raises:
            OSError: the port is taken.
        """
        code = new_code()
        self._use(OpenCode(code, single_use=True))
        return code

    def close(self) -> None:
        """Nobody can pair from now on."""
        self._host.close()

    def _use(self, code: OpenCode) -> None:
        port = self._port = self._host.open(code)
        self._open = code
        self._on_port(port)
        how = "one coordinator" if code.single_use else f"coordinators, for {self._settings.code_minutes:g} minutes"
        # Not the code itself: this text goes into the log.
        self._say("code-opened", f"a code for {how} is open on port {port}", code=code.code, port=port)

    def _paired(self, partner: Partner) -> str | None:
        """Keep the key of a coordinator; why not, or None."""
        entry = Trusted(name=partner.name, key=partner.key, owner=partner.owner, since=time.time())
        try:
            self._store.add(entry)
        except (OSError, ValueError) as error:
            # A changed key of a known owner among them: that must not go by unseen.
            self._say("warning", f"not paired with {partner.owner} at {partner.host}: {error}", owner=partner.owner)
            return str(error)
        self._say(
            "paired",
            f"paired with {partner.owner} at {partner.host}, who may run code here from now on",
            owner=partner.owner,
            cluster=partner.name,
        )
        return None

    def _closed(self, reason: str) -> None:
        """The open code came to its end."""
        code, self._open = self._open, None
        if code is not None and code.single_use and code.right_count:
            try:
                self.new()
                return
            except OSError as error:
                reason = f"no new code could be opened: {error}"
        self._on_port(0)
        if code is not None and code.tries_left <= 0:
            self._say("code-dead", f"the code is dead, {reason}: nobody can pair until a new code is asked for")
        else:
            self._say("code-closed", f"the code is closed, {reason}: nobody can pair until a new code is asked for")

    def _say(
        self, kind: EventKind, text: str, *, owner: str = "", cluster: str = "", code: str = "", port: int = 0
    ) -> None:
        self._tell(SharingEvent(kind, text, owner=owner, cluster=cluster, code=code, port=port))


class SharingService:
    """From :meth:`start` to :meth:`close`.

    Args:
        coordinators: whom the agent trusts; ``listener`` asks the same.
        port: where ``listener`` listens.
        gate: the ZAP handler of ``context``.
    """

    def __init__(
        self,
        settings: AgentSettings,
        identity: Identity,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        coordinators: Coordinators,
        listener: Listener,
        port: int,
        gate: Gate,
        devices: Devices,
        tell: Tell,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._devices = devices
        self._port = port
        store = coordinators.store
        self.announcer = Announcer(settings.name, identity.public_key, port, devices.summary, tell)
        self.codes = PairingCodes(
            settings, store, context, gate, here=self._here, tell=tell, on_port=self.announcer.set_pairing_port
        )
        self._coordinators = coordinators
        self._dialling = Dialling(context, settings.name, identity.public_key, store, listener, tell)

    async def start(self) -> None:
        """Open the first code, or go to the cluster that was asked for, or that had this agent started.

        Raises:
            OSError: the pairing port is taken.
            ValueError: the code is unusable.
            PairingError: the cluster cannot be joined.
        """
        if self._settings.launch is not None:
            self._coordinators.trust_launch(self._settings.launch)
            addresses = self._settings.dial.split(",")
            await self._dialling.enlist(addresses, self._settings.launch, self._settings.lease)
        elif self._settings.dial:
            await self.join(self._settings.dial, self._settings.code)
        elif self._settings.pairing:
            self.codes.start()

    async def join(self, address: str, code: str = "") -> Trusted:
        """See :meth:`.coordinators.Dialling.join`."""
        return await self._dialling.join(address, code)

    def forget(self, key: str) -> None:
        """``key`` is trusted no more."""
        self._dialling.forget(key)

    async def close(self) -> None:
        """Take the code and the announcement back."""
        self.codes.close()
        await self.announcer.close()

    def _here(self) -> Here:
        return Here(
            protocol=PROTOCOL_VERSION,
            role="peer",
            name=self._settings.name,
            owner=owner(),
            key=self._identity.public_key,
            port=self._port,
            device=self._devices.summary(),
        )
