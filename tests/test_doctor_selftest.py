"""The doctor's own measurements of a machine: multicast and TCP, in network namespaces with real firewalls."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.agent.diagnosis import MAX_PACKAGES, diagnose, package_versions
from notebook_cluster.discovery.addresses import MAX_TARGETS, reach
from notebook_cluster.protocol.peer import Diagnose
from tests import namespaces
from tests.namespaces import Host, Network

needs_namespaces = namespaces.needed()


def spaced(test: Any) -> Any:
    for mark in needs_namespaces:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network("desk", "mini") as made:
        yield made


@pytest.fixture
def desk(network: Network) -> Iterator[Host]:
    yield network["desk"]
    network["desk"].open_firewall()


def in_host(host: Host, expression: str) -> Any:
    """The value of an expression over discovery.addresses, computed in ``host``."""
    code = f"import asyncio, json\nfrom notebook_cluster.discovery.addresses import *\nprint(json.dumps({expression}))"
    done = host.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@spaced
def test_multicast_works_on_a_host_without_firewall(desk: Host) -> None:
    assert in_host(desk, "[interfaces(), multicast_problem()]") == [[["eth0", desk.address]], ""]


@spaced
def test_a_firewall_on_the_mdns_port_is_named_with_its_interface(desk: Host) -> None:
    desk.firewall_inbound(multicast=True)
    said = in_host(desk, "multicast_problem()")
    assert said == f"eth0 ({desk.address}): UDP port 5353 is blocked, other multicast passes"


@spaced
def test_a_firewall_for_all_that_is_sent_to_the_group_is_named(desk: Host) -> None:
    desk.run(["nft", "add table inet out"])
    desk.run(["nft", "add chain inet out output { type filter hook output priority 0; }"])
    desk.run(["nft", "add rule inet out output ip daddr 224.0.0.251 drop"])
    try:
        said = in_host(desk, "multicast_problem()")
    finally:
        desk.run(["nft", "delete table inet out"])
    assert said.startswith(f"eth0 ({desk.address}): ")
    assert "224.0.0.251" in said


@spaced
def test_tcp_says_whether_a_port_is_open_refused_or_silently_dropped(network: Network, desk: Host) -> None:
    server = network["mini"].popen([sys.executable, "-m", "http.server", "4000"])
    target = network["mini"].address
    try:
        opened = _until_open(desk, target)
        network["mini"].block_port(4001)
        answers = in_host(
            desk, f"asyncio.run(reach({{'closed': [('{target}', 4002)], 'dropped': [('{target}', 4001)],"
            f" 'nowhere': [('10.99.0.1', 1)], 'any': [('{target}', 4001), ('{target}', 4000)]}}))"
        )  # fmt: skip
    finally:
        network["mini"].open_firewall()
        server.terminate()
        server.wait(30)
    assert opened == f"{target}:4000"
    assert answers["closed"] == f"no: {target}:4002 refused the connection"
    assert answers["dropped"] == f"no: {target}:4001 did not answer in 2 s"
    assert answers["nowhere"].startswith("no: 10.99.0.1:1 cannot be reached")
    assert answers["any"] == f"{target}:4000"


def _until_open(host: Host, address: str) -> str:
    deadline = time.monotonic() + 20
    while True:
        answer: str = in_host(host, f"asyncio.run(reach({{'a': [('{address}', 4000)]}}))")["a"]
        if not answer.startswith("no: ") or time.monotonic() > deadline:
            return answer


# ---- everywhere


def test_targets_beyond_the_limit_and_odd_ones_are_named_and_not_tried() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        place = listening.getsockname()
        targets = {
            "good": [place],
            "many": [place] * MAX_TARGETS,
            "none": [],
            "odd": [("a b; c", 1)],
            "port": [("::1", 0)],
        }
        answers = asyncio.run(reach(targets))
    assert answers["good"] == f"127.0.0.1:{place[1]}"
    assert f"{MAX_TARGETS} addresses" in answers["many"]
    assert answers["none"] == "no: no address"
    assert "is not an address" in answers["odd"]
    assert "no usable port" in answers["port"]


def test_versions_are_those_of_the_names_that_were_asked_for() -> None:
    versions = package_versions(["PyZMQ", "no-such-thing", "x; reboot", "msgspec"])
    assert sorted(versions) == ["msgspec", "pyzmq"]
    assert 10 < len(package_versions()) <= MAX_PACKAGES


def test_a_made_up_package_on_the_path_is_seen_once_in_the_version_that_an_import_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        made_up_package(tmp_path / str(number), "nbc-demo", f"{number}.0")
        monkeypatch.syspath_prepend(tmp_path / str(number))
    assert package_versions()["nbc-demo"] == "2.0"
    assert package_versions(["nbc_demo"]) == {"nbc-demo": "2.0"}


def made_up_package(folder: Path, name: str, version: str) -> None:
    """An installed distribution in ``folder``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_diagnosis_has_the_clock_and_the_facts_and_one_for_bytes_looks_at_nothing() -> None:
    before = time.time()
    said = asyncio.run(diagnose(Diagnose(ticket=7, packages=["numpy"])))
    assert before <= said.time <= time.time()
    assert said.ticket == 7
    assert {"python", "platform", "notebook-cluster"} <= set(said.facts)
    assert list(said.packages) == ["numpy"]
    quick = asyncio.run(diagnose(Diagnose(ticket=8, only_bytes=True)))
    assert (quick.facts, quick.packages, quick.interfaces) == ({}, {}, [])
