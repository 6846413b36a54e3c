"""``notebook-cluster doctor`` on several hosts (network namespaces): it finds what is really broken there."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import namespaces
from tests.command import COMMAND
from tests.conftest import wait_until
from tests.namespaces import Host, Network

pytestmark = namespaces.needed()
CODE = "tiger-lamp-42"
PORT = 4500
Findings = list[dict[str, Any]]


DRIVER = """
import sys, time
import msgspec
from notebook_cluster.client import Cluster
with Cluster.start("doctored", local=1, peers=["all"], code=sys.argv[1]) as cluster:
    try:
        while {node.peer for node in cluster.state().nodes if node.condition == "ok"} != {"local", "mini", "other"}:
            time.sleep(0.1)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(msgspec.json.encode(cluster.examine()).decode(), flush=True)
    finally:
        cluster.stop()
"""
"""Starts a cluster with every peer of the network, then prints the findings for each line that it reads."""


def share(host: Host, name: str) -> None:
    """Start an agent on ``host`` whose link is at PORT, and open CODE."""
    log = host.folder / "share.txt"
    with log.open("wb") as output:
        command = [COMMAND, "share", "--name", name, "--port", str(PORT), "--code", CODE]
        process = host.popen(command, stdout=output, stderr=output)

    def listens() -> bool:
        assert process.poll() is None, log.read_text()
        return f":{PORT}" in host.run(["ss", "-lnt"]).stdout

    wait_until(listens, 60, f"the agent {name} to listen")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network("desk", "mini", "other") as made:
        share(made["mini"], "mini")
        share(made["other"], "mini")
        yield made


@pytest.fixture
def examine(network: Network) -> Iterator[Callable[[Callable[[Findings], bool]], Findings]]:
    """Runs the doctor on the host ``desk`` until its findings are as wanted: records need a moment on the network."""

    def until(wanted: Callable[[Findings], bool]) -> Findings:
        found: Findings = []

        def look() -> bool:
            done = network["desk"].run([COMMAND, "doctor", "--json"])
            assert done.returncode in (0, 1), done.stderr
            found[:] = json.loads(done.stdout)
            return wanted(found)

        wait_until(look, 60, lambda: f"the findings, last: {json.dumps(found, indent=1)}")
        return found

    yield until
    for host in network.hosts.values():
        host.open_firewall()


def texts(findings: Findings, subject: str, level: str) -> list[str]:
    return [one["text"] for one in findings if (one["subject"], one["level"]) == (subject, level)]


def test_two_peers_of_one_name_are_found(network: Network, examine: Any) -> None:
    findings = examine(lambda found: texts(found, "names", "warning"))
    (said,) = texts(findings, "names", "warning")
    assert all(f"{network[name].address}:{PORT}" in said for name in ("mini", "other"))


def test_a_port_that_a_firewall_blocks_is_found(network: Network, examine: Any) -> None:
    network["mini"].block_port(PORT)
    findings = examine(lambda found: texts(found, "port", "warning"))
    (said,) = texts(findings, "port", "warning")
    assert f"cannot reach mini: {network['mini'].address}:{PORT} did not answer in 2 s" in said
    (fix,) = [one["fix"] for one in findings if one["text"] == said]
    assert f"ufw allow {PORT}/tcp" in fix


def test_multicast_that_a_firewall_blocks_is_found(network: Network, examine: Any) -> None:
    network["desk"].firewall_inbound(multicast=True)
    findings = examine(lambda found: texts(found, "multicast", "warning"))
    (said,) = texts(findings, "multicast", "warning")
    assert "eth0" in said
    assert "UDP port 5353 is blocked" in said


@pytest.fixture(scope="module")
def driver() -> Iterator[tuple[Network, Callable[[], Findings]]]:
    """A cluster of three hosts, two of which are kept apart; the function examines it."""
    with Network("desk", "mini", "other") as made:
        made.block("mini", "other")
        for name in ("mini", "other"):
            share(made[name], name)
        with (made.root / "driver.txt").open("wb") as errors:
            process = made["desk"].popen(
                [sys.executable, "-c", DRIVER, CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True,
            )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", (made.root / "driver.txt").read_text()

        def ask() -> Findings:
            process.stdin.write("examine\n")
            process.stdin.flush()
            findings: Findings = json.loads(process.stdout.readline())
            return findings

        yield made, ask
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


def test_two_peers_that_the_network_keeps_apart_are_found(driver: tuple[Network, Callable[[], Findings]]) -> None:
    _, ask = driver
    findings = ask()
    (said,) = texts(findings, "isolation", "warning")
    assert "mini and other cannot reach each other" in said
    (table,) = [one["table"] for one in findings if one["subject"] == "isolation"]
    assert {tuple(row[:2]) for row in table[1:]} == {("mini", "other"), ("other", "mini")}
    (relayed,) = texts(findings, "relay", "warning")
    assert "mini and other" in relayed


def test_a_peer_that_takes_no_connections_is_found(driver: tuple[Network, Callable[[], Findings]]) -> None:
    network, ask = driver
    network["mini"].firewall_inbound()
    findings = ask()
    (said,) = texts(findings, "port", "warning")
    assert "mini takes no connections of local" in said
    (fix,) = [one["fix"] for one in findings if one["text"] == said]
    assert fix == f"# on mini\nsudo ufw allow proto tcp from {network['desk'].address}"
