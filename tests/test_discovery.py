"""Real mDNS on this machine: peers that come and go, records that are not to be believed."""

import asyncio
import ipaddress
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from notebook_cluster.discovery import SERVICE_TYPE, Advertiser, Browser, FoundPeer, advertiser, multicast, records
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.security import new_identity


def until(condition: Callable[[], object], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {seconds} s"
        time.sleep(0.02)


@pytest.fixture
def network() -> Iterator[ExitStack]:
    """Closes what a test starts."""
    with ExitStack() as stack:
        yield stack


def advertise(network: ExitStack, name: str, **options: tuple[str, ...]) -> Advertiser:
    made = Advertiser(name, new_identity().public_key, 4711, "cpu", **options)
    network.callback(made.close)
    made.start()
    return made


def browse(network: ExitStack) -> Browser:
    made = Browser()
    network.callback(made.close)
    made.start()
    return made


def unique(name: str) -> str:
    """Other programs on the network may advertise the same name."""
    return f"{name}{new_identity().public_key.encode().hex()[:8]}"


def test_a_browser_finds_two_peers_and_sees_one_leave(network: ExitStack) -> None:
    mini, desk = advertise(network, unique("mini")), advertise(network, unique("desk"))
    browser = browse(network)
    until(lambda: {mini.instance, desk.instance} <= set(browser.peers()), "two peers")
    found = browser.peers()[mini.instance]
    assert (found.port, found.protocol, found.device) == (4711, PROTOCOL_VERSION, "cpu")
    assert found.instance.startswith(found.name)
    assert found.address.startswith("tcp://")
    mini.close()
    until(lambda: mini.instance not in browser.peers(), "goodbye")
    assert desk.instance in browser.peers()
    reason = browser.why_not(found.name)
    assert reason.startswith(f"peer {found.name!r} left ")
    assert f"notebook-cluster share --name {found.name}" in reason


def test_on_change_gets_each_new_list(network: ExitStack) -> None:
    changes: list[dict[str, FoundPeer]] = []
    browser = Browser(changes.append)
    network.callback(browser.close)
    browser.start()
    peer = advertise(network, unique("mini"))
    until(lambda: changes and peer.instance in changes[-1], "call")


def test_it_works_inside_a_running_asyncio_loop(network: ExitStack) -> None:
    async def main() -> None:
        peer = advertise(network, unique("mini"))
        browser = browse(network)
        await asyncio.to_thread(until, lambda: peer.instance in browser.peers(), "peer")

    asyncio.run(main())


def test_a_peer_with_only_loopback_is_found(network: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (multicast, advertiser):
        monkeypatch.setattr(module, "local_addresses", lambda: ("127.0.0.1",))
    peer = advertise(network, unique("mini"))
    browser = browse(network)
    until(lambda: peer.instance in browser.peers(), "peer")
    assert browser.peers()[peer.instance].hosts == ("127.0.0.1",)


def test_new_addresses_are_advertised_when_the_network_changes(
    network: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: tuple[str, ...] = ("127.0.0.1",)
    for module in (multicast, advertiser):
        monkeypatch.setattr(module, "local_addresses", lambda: addresses)
    monkeypatch.setattr(multicast, "_INTERFACE_SECONDS", 0.1)
    peer = advertise(network, unique("mini"))
    browser = browse(network)
    until(lambda: peer.instance in browser.peers(), "peer")
    # RFC 6762, 10.2: a record that is younger than a second is not replaced by a newer one.
    found = time.monotonic()
    until(lambda: time.monotonic() > found + 1.2, "age")
    addresses = ("127.0.0.2", "127.0.0.1")
    until(lambda: browser.peers()[peer.instance].hosts == ("127.0.0.2",), "new address alone")


def test_a_record_with_a_bad_key_is_dropped_with_the_reason(
    network: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    from zeroconf import IPVersion, ServiceInfo, Zeroconf

    name = unique("evil")
    text = {"name": name, "key": "<script>", "protocol": "1", "device": "cpu"}
    info = ServiceInfo(
        SERVICE_TYPE,
        f"{name}-0000.{SERVICE_TYPE}",
        port=1,
        properties=text,
        addresses=[ipaddress.IPv4Address("127.0.0.1").packed],
        server=f"{name}.local.",
    )
    zeroconf = Zeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
    network.callback(zeroconf.close)
    zeroconf.register_service(info)
    browser = browse(network)
    until(lambda: "not a CURVE public key" in browser.why_not(name), "reason")
    assert browser.why_not(name).startswith(f"peer {name!r} was heard but ignored: its key '<script>'")
    assert f"{name}-0000" not in browser.peers()
    until(lambda: "ignored mDNS record" in caplog.text, "log line")


def test_a_second_peer_with_the_same_name_and_key_says_so(network: ExitStack) -> None:
    name, key = unique("mini"), new_identity().public_key
    peers = [Advertiser(name, key, port, "cpu") for port in (4711, 4712)]
    browser = browse(network)
    for peer in peers:
        network.callback(peer.close)
    peers[0].start()
    until(lambda: peers[0].instance in browser.peers(), "first peer")
    peers[1].start()
    until(lambda: "is on this network already" in peers[1].problem, "complaint")
    assert browser.peers()[peers[0].instance].port == 4711


def test_why_not_suggests_a_similar_name_and_else_the_way_out(network: ExitStack) -> None:
    peer = advertise(network, unique("minimal"))
    browser = browse(network)
    until(lambda: peer.instance in browser.peers(), "peer")
    name = browser.peers()[peer.instance].name
    assert browser.why_not(name[:-1]) == f"no peer is called {name[:-1]!r}: did you mean {name!r}?"
    assert "notebook-cluster share --name zzz" in browser.why_not("zzz")
    assert "HOST:PORT" in browser.why_not("zzz")


def test_closing_without_start_and_twice_is_harmless() -> None:
    browser = Browser()
    browser.close()
    browser.start()
    browser.close()
    browser.close()


# ---- records -------------------------------------------------------------------------------------------------

KEY = new_identity().public_key
INSTANCE = records.instance_name("mini", KEY)


def values(**changes: str) -> dict[bytes, bytes | None]:
    return {name.encode(): text.encode() for name, text in (records.properties("mini", KEY, "cpu") | changes).items()}


def test_a_good_record_is_a_peer() -> None:
    peer = records.parse(INSTANCE, values(), ["192.0.2.2", "not an address", "224.0.0.1", "0.0.0.0"], 4711, 100)
    assert peer == FoundPeer("mini", KEY, ("192.0.2.2",), 4711, PROTOCOL_VERSION, "cpu", INSTANCE)


def test_a_record_of_another_protocol_version_is_kept() -> None:
    assert records.parse(INSTANCE, values(protocol="7"), ["192.0.2.2"], 4711, 100).protocol == 7


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "../x"}, r"its name '\.\./x' is not usable"),
        ({"name": ""}, "its name '' is not usable"),
        ({"key": "x" * 41}, "is not a CURVE public key"),
        ({"name": "desk"}, "does not belong to name 'desk' and its key"),
        ({"protocol": "one"}, "protocol version 'one' is not a number"),
        ({"protocol": "9" * 7}, "is not a number"),
    ],
)
def test_absurd_text_is_refused(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        records.parse(INSTANCE, values(**changes), ["192.0.2.2"], 4711, 100)


@pytest.mark.parametrize(
    ("hosts", "port", "size", "reason"),
    [
        (["192.0.2.2"], 0, 100, "its port 0"),
        (["192.0.2.2"], None, 100, "its port None"),
        (["192.0.2.2"], 70000, 100, "its port 70000"),
        ([], 4711, 100, "it has none"),
        (["255.255.255.255"], 4711, 100, "none of its addresses can be dialled: 255"),
        (["192.0.2.2"], 4711, 5000, "its text has 5000 bytes"),
    ],
)
def test_absurd_places_are_refused(hosts: list[str], port: int | None, size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        records.parse(INSTANCE, values(), hosts, port, size)


def test_the_longest_name_and_device_fit_into_mdns() -> None:
    name = "a" * 60 + "." + "b" * 2
    assert len(records.instance_name(name, KEY).encode()) <= 63
    assert "." not in records.instance_name(name, KEY)
    assert len(records.properties(name, KEY, "ü\n" * 500)["device"].encode()) <= 120


def test_a_name_that_others_would_refuse_is_not_advertised() -> None:
    with pytest.raises(ValueError, match="peer name 'my mac' is not usable"):
        Advertiser("my mac", KEY, 4711, "cpu")
