"""``notebook-cluster bench`` on several hosts (network namespaces) of which two cannot reach each other."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests import namespaces
from tests.command import COMMAND
from tests.conftest import wait_until
from tests.hosts import CLUSTER, CODE, desk_and_two_that_share, notebook_on
from tests.namespaces import Network

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "everything is there"),
    pytest.mark.timeout(240),
]


@pytest.fixture
def network() -> Iterator[Network]:
    with desk_and_two_that_share() as made:
        yield made


@pytest.mark.proof
def test_ways_over_tcp_and_over_the_links_are_told_apart(network: Network) -> None:
    network.block("mini", "book")
    with notebook_on(network["desk"]) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
        notebook.wait_for_nodes({"local", "mini", "book"})
        ways: dict[tuple[str, str], Any] = {}

        def look() -> bool:
            done = network["desk"].run([COMMAND, "bench", "--mb", "1", "--json"])
            assert done.stdout, done.stderr
            ways.update({(way["source"], way["target"]): way for way in json.loads(done.stdout)["ways"]})
            # Nodes ask for the relay when they have found no way for a while.
            return not any(way["error"] for way in ways.values())

        wait_until(look, 120, lambda: f"figures of all ways: {ways}")
        kept_apart = {("mini", "book"), ("book", "mini")}
        assert {pair for pair, way in ways.items() if way["way"] == "relay"} == kept_apart
        assert {way["way"] for pair, way in ways.items() if pair not in kept_apart} == {"tcp+curve"}
        assert len(ways) == 6
        assert all(way["megabytes_per_s"] > 0 and way["round_trip_ms"] > 0 for way in ways.values())
        notebook.works("%cluster bench --mb 1")
