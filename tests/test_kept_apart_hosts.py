"""Hosts (network namespaces) of which two cannot reach each other: what ``notebook-cluster bench`` says of them, and a
cluster that is handed over among them, whose owner's machine may go."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests import namespaces
from tests.command import COMMAND
from tests.conftest import wait_until
from tests.hosts import CLUSTER, CODE, HostNotebook, desk_and_two_that_share, notebook_on
from tests.namespaces import Network
from tests.test_head_hosts import commits, go_on_without, members, training, whole

pytestmark = namespaces.needed(240)


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


@pytest.mark.proof
def test_its_owner_hands_it_over_in_the_middle_and_goes_and_comes_back(network: Network) -> None:
    desk, mini, stop = network["desk"], network["mini"], network.root / "stop"
    notebook = HostNotebook(desk)
    notebook.works(f"%cluster start {CLUSTER} --local 1 --no-panel")
    for name in ("mini", "book"):
        notebook.works(f"%cluster add {name} --code {CODE}")
    notebook.wait_for_nodes({"local", "mini", "book"})
    network.block("mini", "book")
    refused = notebook.start("%cluster hand-over mini")
    notebook.until(refused, timeout=60)
    assert "mini cannot reach book" in str(refused.error or refused.shown)
    network.open()
    notebook.start(training(stop).replace("%%on_all", "%%on_all --async"))
    notebook.wait_for_nodes({"local", "mini", "book"})
    notebook.works("%cluster hand-over mini")
    wait_until(lambda: any(len(members(row)) == 3 for row in commits(mini)[-3:]), 60, "a round of all three")

    go_on_without(desk, mini, notebook)
    again = HostNotebook(desk)
    try:
        shown = again.start(f"%cluster attach {CLUSTER}")
        again.until(shown, text="mini-line")
        stop.touch()
        again.until(shown, timeout=90)
        whole(shown, mini)
        again.works("%cluster hand-over local")
        again.works("%cluster stop")
    finally:
        again.close()
