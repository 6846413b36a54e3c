"""Says on the local network that this peer is shared. A network without mDNS must not end the sharing."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from notebook_cluster.agent.events import SharingEvent, Tell

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
