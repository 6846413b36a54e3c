"""mDNS records as text: what is believed, and that nothing absurd gets any further."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from notebook_cluster.discovery import Advertiser, ClusterAdvertiser, FoundCluster, FoundPeer, records
from notebook_cluster.peering import peer_finder
from notebook_cluster.peering.candidates import Trust
from notebook_cluster.peering.peer_finder import PeerFinder
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import Trusted, is_key, new_identity, trusted_peers
from tests.in_loop import in_loop

KEY = new_identity().public_key
INSTANCE = records.instance_name("mini", KEY)


@pytest.mark.parametrize("group", ["", "room 3", "10b", "Überall " * 40])
def test_a_group_of_any_text_is_a_service_type_that_mdns_allows(group: str) -> None:
    from zeroconf import service_type_name

    types = records.service_types(group)
    assert all(service_type_name(service_type) == service_type for service_type in types)
    assert len({*types, *records.service_types(group + "!")}) == 4


def values(**changes: str) -> dict[bytes, bytes | None]:
    made = records.properties(records.PEER, "mini", KEY, {"device": "cpu"}, 4712)
    return {name.encode(): text.encode() for name, text in (made | changes).items()}


def parse_peer(text: Mapping[bytes, bytes | None], hosts: list[str], port: int | None, size: int = 100) -> FoundPeer:
    return records.parse(records.PEER, INSTANCE, text, hosts, port, size)


@in_loop
async def test_a_machine_whose_cable_was_pulled_is_not_taken_to_be_at_its_loopback_address(
    monkeypatch: pytest.MonkeyPatch, jupyter_dirs: Path
) -> None:
    heard: list[str] = []
    finder = PeerFinder(zmq.Context.instance(), Trust(), [], lambda new: heard.extend(peer.address for peer in new))
    own = ["10.77.0.1"]
    monkeypatch.setattr(peer_finder, "reachable_addresses", lambda: own)
    for host in ("10.77.0.2", "127.0.0.1", "10.77.0.2", "10.77.0.9"):
        finder._changed({INSTANCE: parse_peer(values(), [host], 4711)})
    assert heard == ["10.77.0.2:4711", "10.77.0.9:4711"]
    finder._changed({})
    finder._changed({INSTANCE: parse_peer(values(), ["127.0.0.1"], 4712)})  # nobody had heard of it for a while
    assert heard[2:] == ["10.77.0.9:4712"]
    own = ["127.0.0.1"]  # no network any more: what runs on this machine is where it says
    finder._changed({INSTANCE: parse_peer(values(), ["127.0.0.1"], 4711)})
    assert heard[3:] == ["127.0.0.1:4711"]


@in_loop
async def test_a_paired_peer_that_is_heard_after_another_of_its_name_is_not_taken_for_changed(
    jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted_peers().add(Trusted("mini", KEY, "anna@mini", "192.0.2.2:4711"))
    other = new_identity().public_key
    records_of = {
        key: FoundPeer("mini", key, (host,), 4711, PROTOCOL_VERSION, "cpu", f"mini {key}")
        for key, host in ((KEY, "192.0.2.2"), (other, "192.0.2.3"))
    }
    finder = PeerFinder(zmq.Context.instance(), Trust(), [], lambda new: None)
    finder._heard.set()
    finder._changed({"other": records_of[other]})
    looking = asyncio.create_task(finder.resolve("mini"))
    await asyncio.sleep(0.05)
    assert not looking.done()
    finder._changed({"other": records_of[other], "mini": records_of[KEY]})
    used, others = await looking
    assert (used.key, used.found_by, [candidate.key for candidate in others]) == (KEY, "mdns", [other])

    monkeypatch.setattr(peer_finder, "JUST_SHARED", 0.1)
    finder._changed({"other": records_of[other]})
    with pytest.raises(RequestError, match=r"'mini' was paired with key .* somebody may pretend to be it"):
        await finder.resolve("mini")


def test_a_good_record_is_a_peer() -> None:
    peer = parse_peer(values(), ["192.0.2.2", "not an address", "224.0.0.1", "0.0.0.0"], 4711)
    assert peer == FoundPeer("mini", KEY, ("192.0.2.2",), 4711, PROTOCOL_VERSION, "cpu", INSTANCE, 4712)


def test_a_good_record_is_a_cluster() -> None:
    text = records.properties(records.CLUSTER, "mini", KEY, {"owner": "anna@laptop\x1b[31m"}, 0)
    encoded = {name.encode(): value.encode() for name, value in text.items()}
    cluster = records.parse(records.CLUSTER, INSTANCE, encoded, ["192.0.2.2"], 4711, 100)
    assert cluster == FoundCluster("mini", "anna@laptop[31m", KEY, ("192.0.2.2",), 4711, 0, PROTOCOL_VERSION, INSTANCE)


def test_a_record_of_another_protocol_version_is_kept() -> None:
    assert parse_peer(values(protocol="7"), ["192.0.2.2"], 4711).protocol == 7


def test_a_record_that_says_nothing_about_pairing_has_no_code_open() -> None:
    text = values()
    del text[b"pair"]
    assert parse_peer(text, ["192.0.2.2"], 4711).pairing_port == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": "../x"}, r"its name '\.\./x' is not usable"),
        ({"name": "<b>x</b>"}, "its name '<b>x</b>' is not usable"),
        ({"name": ""}, "its name '' is not usable"),
        ({"key": "x" * 41}, "is not a CURVE public key"),
        ({"name": "desk"}, "does not belong to name 'desk' and its key"),
        ({"protocol": "one"}, "protocol version 'one' is not a number"),
        ({"protocol": "9" * 7}, "is not a number"),
        ({"pair": "-1"}, "pairing port '-1' is not a number"),
        ({"pair": "65536"}, "pairing port 65536 is not between 0 and 65535"),
    ],
)
def test_absurd_text_is_refused(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_peer(values(**changes), ["192.0.2.2"], 4711)


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
        parse_peer(values(), hosts, port, size)


FIELDS = st.sampled_from([b"name", b"key", b"protocol", b"pair", b"device", b"owner", b"other"])
SANE = st.sampled_from([b"mini", KEY.encode(), b"1", b"4711", b"cpu", b"", None])
TEXTS = st.dictionaries(FIELDS, SANE | st.binary(max_size=300) | st.text(max_size=80).map(str.encode))


@settings(max_examples=500, deadline=None)
@given(
    kind=st.sampled_from([records.PEER, records.CLUSTER]),
    instance=st.just(INSTANCE) | st.text(max_size=80),
    changes=TEXTS,
    complete=st.booleans(),
    hosts=st.lists(st.sampled_from(["192.0.2.2", "127.0.0.1", "::1"]) | st.ip_addresses().map(str) | st.text()),
    port=st.none() | st.integers(),
    size=st.integers(min_value=0, max_value=2000),
)
def test_any_record_is_either_valid_or_a_value_error(
    kind: "records.RecordKind[FoundPeer] | records.RecordKind[FoundCluster]",
    instance: str,
    changes: dict[bytes, bytes | None],
    complete: bool,
    hosts: list[str],
    port: int | None,
    size: int,
) -> None:
    try:
        found: FoundPeer | FoundCluster = records.parse(
            kind, instance, (values() if complete else {}) | changes, hosts, port, size
        )
    except ValueError:
        return
    assert is_name(found.name)
    assert is_key(found.public_key)
    assert found.instance == instance == records.instance_name(found.name, found.public_key)
    assert 0 < found.port < 65536
    assert 0 <= found.pairing_port < 65536
    assert found.hosts
    shown = found.device if isinstance(found, FoundPeer) else found.owner
    assert shown.isprintable()
    assert len(shown.encode()) <= 120


def test_the_longest_name_and_device_fit_into_mdns() -> None:
    name = "a" * 60 + "." + "b" * 2
    assert len(records.instance_name(name, KEY).encode()) <= 63
    assert "." not in records.instance_name(name, KEY)
    text = records.properties(records.PEER, name, KEY, {"device": "ü\n" * 500}, 65535)
    assert len(text["device"].encode()) <= 120


def test_a_name_that_others_would_refuse_is_not_advertised() -> None:
    with pytest.raises(ValueError, match="peer name 'my mac' is not usable"):
        Advertiser("my mac", KEY, 4711, "cpu")
    with pytest.raises(ValueError, match="cluster name 'my cluster' is not usable"):
        ClusterAdvertiser("my cluster", "anna@laptop", KEY, 4711, 0)


def test_a_pairing_port_that_cannot_be_is_not_advertised() -> None:
    with pytest.raises(ValueError, match="pairing port 65536 is not between 0"):
        Advertiser("mini", KEY, 4711, "cpu", pairing_port=65536)
    peer = Advertiser("mini", KEY, 4711, "cpu")
    with pytest.raises(ValueError, match="pairing port -1 is not between 0"):
        peer.set_pairing_port(-1)
