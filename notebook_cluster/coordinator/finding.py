"""Which peers are there: heard over mDNS, typed, or this machine's own agent."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from notebook_cluster.coordinator.viewserver import RequestError
from notebook_cluster.discovery import Browser, FoundPeer
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.protocol.version import PROTOCOL_VERSION, mismatch
from notebook_cluster.security import same_user_keys

BROWSE_AT_LEAST = 1.5
"""Seconds of listening after which a peer that was not heard counts as not there."""


class PrivateAgent(msgspec.Struct):
    """What an agent that was started for this cluster says when it is ready."""

    name: str
    public_key: str
    port: int
    pid: int


async def start_private_agent(
    name: str, directory: Path, lease: float
) -> tuple[PrivateAgent, asyncio.subprocess.Process]:
    """Start an agent for this machine. It survives a crash of the coordinator and ends with the cluster.

    Raises:
        RequestError: it ended before it was ready; names its log.
    """
    command = [sys.executable, "-m", "notebook_cluster.agent", "--private", "--name", name]
    command += ["--cluster-dir", str(directory), "--lease", str(lease)]
    log_path = directory / "agent.log"
    with open(log_path, "ab") as errors:  # noqa: ASYNC230 - a local file, opened once
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    assert process.stdout is not None
    line = await process.stdout.readline()
    try:
        return msgspec.json.decode(line, type=PrivateAgent), process
    except msgspec.DecodeError:
        raise RequestError(f"the agent of this machine did not start: see {log_path}") from None


class Finding:
    """Listens on mDNS; ``on_change(new)`` is called on the loop with the peers that were not there before."""

    def __init__(self, on_change: Callable[[list[FoundPeer]], None]) -> None:
        self._on_change = on_change
        self._browser: Browser | None = None
        self._heard = asyncio.Event()
        self.found: dict[str, FoundPeer] = {}

    async def start(self) -> str | None:
        """Listen from now on (zeroconf has a thread of its own); returns why it does not work, if so."""
        loop = asyncio.get_running_loop()

        def changed(found: dict[str, FoundPeer]) -> None:
            loop.call_soon_threadsafe(self._changed, dict(found))

        def start() -> Browser:
            browser = Browser(changed)
            browser.start()
            return browser

        try:
            # Its import alone costs more than everything else at start-up.
            self._browser = await loop.run_in_executor(None, start)
        except OSError as error:
            return f"mDNS does not work on this machine ({error}): other machines cannot be found"
        finally:
            loop.call_later(BROWSE_AT_LEAST, self._heard.set)
        return None

    def _changed(self, found: dict[str, FoundPeer]) -> None:
        new = [peer for instance, peer in found.items() if self.found.get(instance) != peer]
        self.found = found
        self._on_change(new)

    async def trusted(self) -> list[FoundPeer]:
        """Every peer that may be added, after listening long enough to have heard those that are there."""
        await self._heard.wait()
        keys = same_user_keys("agent")
        return [peer for peer in self.found.values() if peer.public_key in keys]

    async def resolve(self, text: str) -> FoundPeer:
        """The trusted peer with this name or HOST:PORT.

        Raises:
            RequestError: it is not there, not trusted or of another version; one line with the way out.
        """
        wanted = _address_matcher(text) if ":" in text else lambda peer: peer.name == text
        if not any(wanted(peer) for peer in self.found.values()):
            await self._heard.wait()
        peers = [peer for peer in self.found.values() if wanted(peer)]
        if not peers and ":" in text:
            raise RequestError(
                f"no agent was heard at {text}: start `notebook-cluster share` there and see %cluster peers"
            )
        if not peers:
            unheard = f"peer {text!r} cannot be found: mDNS does not work on this machine"
            raise RequestError(self._browser.why_not(text) if self._browser is not None else unheard)
        keys = same_user_keys("agent")
        usable = [peer for peer in peers if peer.public_key in keys]
        if not usable:
            raise RequestError(f"peer {text!r} cannot be added: {UNTRUSTED}")
        if usable[0].protocol != PROTOCOL_VERSION:
            raise RequestError(mismatch(usable[0].name, usable[0].protocol) or "")
        return usable[0]

    async def close(self) -> None:
        if self._browser is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._browser.close)


UNTRUSTED = "it belongs to another user or machine, and only agents of your own user on this machine are trusted so far"


def _address_matcher(text: str) -> Callable[[FoundPeer], bool]:
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise RequestError(f"{text!r} is not HOST:PORT: the port is a number from 1 to 65535")
    hosts = {host, "127.0.0.1" if host == "localhost" else host}
    return lambda peer: peer.port == int(port) and bool(hosts & {*peer.hosts, "127.0.0.1"})


def address_of(peer: FoundPeer) -> str:
    """The endpoint of its link."""
    return f"tcp://{peer.hosts[0] if peer.hosts else '127.0.0.1'}:{peer.port}"


def found_view(peer: FoundPeer, trusted: bool) -> PeerView:
    """How a peer that is not in a cluster is shown."""
    reason = mismatch(peer.name, peer.protocol) or ("" if trusted else UNTRUSTED)
    return PeerView(
        name=peer.name,
        key=peer.public_key,
        address=address_of(peer).removeprefix("tcp://"),
        condition="found" if trusted else "untrusted",
        found_by="mdns",
        trusted=trusted,
        device=peer.device,
        reason=reason,
    )
