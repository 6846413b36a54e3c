"""Real mDNS on this machine: peers that come and go, records that are not to be believed."""

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from notebook_cluster.discovery import (
    SERVICE_TYPE,
    Advertiser,
    Browser,
    ClusterAdvertiser,
    ClusterBrowser,
    FoundPeer,
    multicast,
)
from notebook_cluster.discovery import addresses as own
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
    assert found.address == f"{found.hosts[0]}:4711"
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
    for module in (multicast, own):
        monkeypatch.setattr(module, "local_addresses", lambda: ("127.0.0.1",))
    peer = advertise(network, unique("mini"))
    browser = browse(network)
    until(lambda: peer.instance in browser.peers(), "peer")
    assert browser.peers()[peer.instance].hosts == ("127.0.0.1",)


def test_new_addresses_are_advertised_when_the_network_changes(
    network: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: tuple[str, ...] = ("127.0.0.1",)
    for module in (multicast, own):
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
    assert browser.why_not("192.0.2.7").startswith("192.0.2.7 needs the port that notebook-cluster share shows there")
    assert browser.why_not("tiger-lamp-42").startswith("'tiger-lamp-42' looks like a code: say the machine's name")


def test_closing_without_start_and_twice_is_harmless() -> None:
    browser = Browser()
    browser.close()
    browser.start()
    browser.close()
    browser.close()


def test_a_code_that_opens_and_closes_is_seen(network: ExitStack) -> None:
    peer = advertise(network, unique("mini"))
    browser = browse(network)
    for port in (4712, 0, 4713):
        until(lambda: peer.instance in browser.peers(), "peer")
        # Also right after the last change, when by RFC 6762, 10.2 the newer record stands beside the older one.
        peer.set_pairing_port(port)
        until(lambda port=port: browser.peers()[peer.instance].pairing_port == port, f"port {port}")


def test_a_pairing_port_set_before_the_start_is_advertised(network: ExitStack) -> None:
    made = Advertiser(unique("mini"), new_identity().public_key, 4711, "cpu", pairing_port=4712)
    network.callback(made.close)
    made.set_pairing_port(4713)
    made.start()
    browser = browse(network)
    until(lambda: made.instance in browser.peers(), "peer")
    assert browser.peers()[made.instance].pairing_port == 4713


def test_two_peers_of_one_name_are_both_kept(network: ExitStack) -> None:
    name = unique("mini")
    first, second = advertise(network, name), advertise(network, name)
    browser = browse(network)
    until(lambda: len(browser.same_name(name)) == 2, "two peers of one name")
    assert {peer.instance for peer in browser.same_name(name)} == {first.instance, second.instance}
    assert len({peer.public_key for peer in browser.same_name(name)}) == 2


def test_a_cluster_that_invites_is_found_and_is_no_peer(network: ExitStack) -> None:
    name = unique("lesson")
    cluster = ClusterAdvertiser(name, "anna@laptop", new_identity().public_key, 4711, 4712)
    network.callback(cluster.close)
    cluster.start()
    clusters, peers = ClusterBrowser(), browse(network)
    network.callback(clusters.close)
    clusters.start()
    until(lambda: cluster.instance in clusters.clusters(), "cluster")
    found = clusters.clusters()[cluster.instance]
    assert (found.name, found.owner, found.port, found.pairing_port) == (name, "anna@laptop", 4711, 4712)
    assert cluster.instance not in peers.peers()
    cluster.close()
    until(lambda: cluster.instance not in clusters.clusters(), "goodbye")


def test_instances_that_never_answer_do_not_hold_up_the_others(network: ExitStack) -> None:
    """Pointers to nowhere, far more than are asked at a time, and names that are none of ours."""
    from zeroconf import DNSOutgoing, DNSPointer, IPVersion, Zeroconf
    from zeroconf.const import _CLASS_IN, _FLAGS_AA, _FLAGS_QR_RESPONSE, _TYPE_PTR

    zeroconf = Zeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
    network.callback(zeroconf.close)
    browser, early = browse(network), advertise(network, unique("early"))
    until(lambda: early.instance in browser.peers(), "browser that listens")
    mark = unique("nobody")
    absurd = ["<script>alert(1)</script>", "../../etc/passwd", "\x1b[31mred", "ü" * 20, f"{mark}.sub-0000"]
    for instance in (*absurd, *(f"{mark}{number}-0000" for number in range(80))):
        out = DNSOutgoing(_FLAGS_QR_RESPONSE | _FLAGS_AA)
        pointer = DNSPointer(SERVICE_TYPE, _TYPE_PTR, _CLASS_IN, 60, f"{instance}.{SERVICE_TYPE}")
        out.add_answer_at_time(pointer, 0)
        zeroconf.send(out)
    until(lambda: any(instance.startswith(mark) for instance in browser.ignored()), "the first that is silent")
    peer = advertise(network, unique("mini"))
    until(lambda: peer.instance in browser.peers(), "peer")
    until(lambda: "<script>alert(1)</script>" in browser.ignored(), "reason")
    assert browser.ignored()["<script>alert(1)</script>"] == "its instance is not a name and 4 hex digits"
    assert browser.problem == ""


def test_the_address_that_reaches_the_world_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before those of virtual machines and containers, which others cannot reach."""
    import psutil

    cards = {"docker0": "172.17.0.1", "wlan0": "192.168.1.20", "br0": "10.0.0.1", "lo": "127.0.0.1", "off0": "10.9.9.9"}
    addresses = {
        name: [SimpleNamespace(address=address, family=socket.AF_INET, netmask=None)] for name, address in cards.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=name != "off0") for name in cards})
    monkeypatch.setattr(own, "_default_address", lambda: "192.168.1.20")
    assert own.local_addresses() == ("192.168.1.20", "10.0.0.1", "172.17.0.1", "127.0.0.1")
    monkeypatch.setattr(own, "_default_address", lambda: "")
    assert own.local_addresses() == ("10.0.0.1", "172.17.0.1", "192.168.1.20", "127.0.0.1")
