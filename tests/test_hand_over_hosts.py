"""A cluster that is handed over between hosts: who cannot reach whom is named, and its owner's machine may go."""

import time
from collections.abc import Iterator

import pytest

from notebook_cluster.journal.records import CommitRecord
from tests import namespaces
from tests.conftest import wait_until
from tests.hosts import CLUSTER, CODE, HostNotebook, desk_and_two_that_share, numbers
from tests.namespaces import Network
from tests.test_head_hosts import PATIENCE, bring_back, commits, members, take_away, training

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "everything is there"),
    pytest.mark.timeout(240),
]


@pytest.fixture
def network() -> Iterator[Network]:
    with desk_and_two_that_share() as made:
        yield made


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

    take_away(desk)
    gone = time.time()
    after = wait_until(
        lambda: [row for row in commits(mini) if row.time > gone and len(members(row)) == 2][:1], 60,
        "a round of the two that are left",
    )[0]  # fmt: skip
    before = [row for row in commits(mini) if row.time < after.time][-1]
    assert after.time - before.time < PATIENCE
    notebook.close()
    rounds = len(commits(mini))
    wait_until(lambda: len(commits(mini)) > rounds + 5, 60, "rounds without their owner")
    bring_back(desk, desk.address.rpartition(".")[0] + ".77")
    again = HostNotebook(desk)
    try:
        shown = again.start(f"%cluster attach {CLUSTER}")
        again.until(shown, text="mini-line")
        stop.touch()
        again.until(shown, timeout=90)
        for name in ("mini", "book"):
            lines = numbers(shown.shown, f"{name}-line")
            assert lines == list(range(lines[0], lines[-1] + 1)), f"{name}: a line is missing, doubled or out of order"
        history = [row.record.commit.round for row in commits(mini) if isinstance(row.record, CommitRecord)]
        assert history == list(range(1, len(history) + 1))
        again.works("%cluster hand-over local")
        again.works("%cluster stop")
    finally:
        again.close()
