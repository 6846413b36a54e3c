"""A cluster that is handed over between hosts: who cannot reach whom is named, and its owner's machine may go."""

from collections.abc import Iterator

import pytest

from tests import namespaces
from tests.conftest import wait_until
from tests.hosts import CLUSTER, CODE, HostNotebook, desk_and_two_that_share
from tests.namespaces import Network
from tests.test_head_hosts import commits, go_on_without, members, training, whole

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
