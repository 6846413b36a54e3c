"""What a shared peer says of itself over mDNS, from its first record on."""

import asyncio
import secrets

import pytest

from notebook_cluster.agent.sharing.service import Announcer
from notebook_cluster.discovery import Advertiser, Browser, FoundPeer
from notebook_cluster.security import new_identity
from tests.conftest import wait_until
from tests.in_loop import in_loop, until


@in_loop
async def test_a_code_that_is_open_is_in_the_first_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears a record without one says for about a second that the peer has no code open."""
    name = f"mini-{secrets.token_hex(3)}"
    ports: list[int] = []

    def changed(peers: dict[str, FoundPeer]) -> None:
        ports.extend(peer.pairing_port for peer in peers.values() if peer.name == name)

    def start(advertiser: Advertiser) -> None:
        begin(advertiser)
        wait_until(lambda: ports != [])

    begin = Advertiser.start
    monkeypatch.setattr(Advertiser, "start", start)
    browser = Browser(changed)
    announcer = Announcer(name, new_identity().public_key, 4711, lambda: "cpu", lambda said: None)
    browser.start()
    try:
        announcer.set_pairing_port(4712)
        announcer.start()
        await until(lambda: 4712 in ports, "record with the code's port")
    finally:
        await announcer.close()
        await asyncio.to_thread(browser.close)
    assert set(ports) == {4712}
