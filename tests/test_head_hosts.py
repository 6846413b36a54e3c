"""A cluster that is led from another host: its owner's machine is taken away, and comes back somewhere else."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.journal.reading import Noted, read_rounds
from notebook_cluster.journal.records import CommitRecord
from notebook_cluster.journal.store import journal_path
from tests import namespaces
from tests.conftest import wait_until
from tests.hosts import CLUSTER, CODE, HostNotebook, desk_and_two_that_share, notebook_on, numbers
from tests.namespaces import Host, Network
from tests.notebook_kernel import Cell

pytestmark = namespaces.needed(240)

PATIENCE = 7.0
"""Seconds between two rounds at most, when the owner's machine goes: 5 until nobody waits for its node any more."""


@pytest.fixture
def network() -> Iterator[Network]:
    with desk_and_two_that_share() as made:
        yield made


def training(stop: Path) -> str:
    """A cell that trains and prints numbered lines until ``stop`` is there."""
    return f"""
%%on_all
import hashlib, os, time
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(64, 64)
sync = nc.DiLoCo(model, every=10, name="night")
number = 0
while not os.path.exists({str(stop)!r}):
    number += 1
    print(nc.node() + "-line", number, flush=True)
    with torch.no_grad():
        model.weight += 0.01 * torch.randn(64, 64)
    sync.step()
    time.sleep(0.05)
sync.finish()
print("trained", sync.round, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16])
"""


def head_folder(host: Host) -> Path:
    """Where the head of the cluster keeps its run on ``host``."""
    (folder,) = (host.folder / "data" / "notebook_cluster" / "agents" / host.name / "heads").glob(f"{CLUSTER}-*")
    return folder


def commits(host: Host) -> list[Noted]:
    """The rounds that the head there has committed, in order."""
    return [noted for noted in read_rounds(journal_path(head_folder(host))) if isinstance(noted.record, CommitRecord)]


def members(noted: Noted) -> set[str]:
    assert isinstance(noted.record, CommitRecord)
    return set(noted.record.commit.members)


def take_away(host: Host) -> None:
    """Its cable is out, and everything that ran there is gone."""
    host.link_down()
    pids = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True
    ).stdout.split()
    for pid in map(int, pids):
        os.kill(pid, signal.SIGKILL)


def bring_back(host: Host, address: str) -> None:
    """Its cable is in again, at another ``address``."""
    inside = ["ip", "-n", host.namespace]
    subprocess.run([*inside, "address", "flush", "dev", "eth0"], check=True)
    subprocess.run([*inside, "address", "add", f"{address}/24", "dev", "eth0"], check=True)
    host.link_up()


def go_on_without(desk: Host, mini: Host, notebook: HostNotebook) -> None:
    """Take ``desk`` away in the middle of a training of three that is led from ``mini``: the other two go on, at once
    and for a while. Then it is back, at another address."""
    take_away(desk)
    gone = time.time()
    after = wait_until(
        lambda: [row for row in commits(mini) if row.time > gone and len(members(row)) == 2][:1], 60,
        "a round of the two that are left",
    )[0]  # fmt: skip
    before = [row for row in commits(mini) if row.time < after.time][-1]
    print(f"a round {after.time - before.time:.2f} s after the one before, when the owner's machine was taken away")
    assert after.time - before.time < PATIENCE
    notebook.close()
    rounds = len(commits(mini))
    wait_until(lambda: len(commits(mini)) > rounds + 5, 60, "rounds without their owner")
    bring_back(desk, desk.address.rpartition(".")[0] + ".77")


def whole(shown: Cell, mini: Host) -> list[int]:
    """The rounds that ``mini`` has committed: all of them, and of its lines and those of book none is missing."""
    for name in ("mini", "book"):
        lines = numbers(shown.shown, f"{name}-line")
        assert lines == list(range(lines[0], lines[-1] + 1)), f"{name}: a line is missing, doubled or out of order"
    history = [row.record.commit.round for row in commits(mini) if isinstance(row.record, CommitRecord)]
    assert history == list(range(1, len(history) + 1))
    return history


@pytest.mark.proof
def test_a_cell_is_still_shown_when_the_network_was_away_for_a_while(network: Network) -> None:
    desk, mini, stop = network["desk"], network["mini"], network.root / "stop"
    with notebook_on(desk) as notebook:
        notebook.works(f"%cluster start {CLUSTER} --head mini --code {CODE} --local 0 --no-panel")
        notebook.works("%cluster add mini")
        cell = notebook.start(training(stop))
        notebook.until(cell, text="mini-line 20\n")
        desk.link_down()
        shared = mini.folder / "share-mini.txt"
        wait_until(lambda: f"cluster {CLUSTER} is lost" in shared.read_text(), 60, "the window to be given up there")
        desk.link_up()
        last = numbers(cell.shown, "mini-line")[-1]
        stop.touch()
        notebook.until(cell, timeout=90)
        assert cell.error is None, cell.error
        lines = numbers(cell.shown, "mini-line")
        assert lines[-1] > last + 100
        assert lines == list(range(1, lines[-1] + 1))
        assert "trained" in cell.shown


def test_training_goes_on_without_its_owner_who_finds_all_of_it_when_they_are_back(network: Network) -> None:
    desk, mini, stop = network["desk"], network["mini"], network.root / "stop"
    notebook = HostNotebook(desk)
    notebook.works(f"%cluster start {CLUSTER} --head mini --code {CODE} --local 1 --no-panel")
    notebook.works("%cluster add mini")
    notebook.works(f"%cluster add book --code {CODE}")
    notebook.wait_for_nodes({"local", "mini", "book"})
    notebook.start(training(stop))
    wait_until(lambda: any(len(members(row)) == 3 for row in commits(mini)), 60, "a round of all three")
    go_on_without(desk, mini, notebook)
    again = HostNotebook(desk)
    try:
        shown = again.start(f"%cluster attach {CLUSTER}")
        again.until(shown, text="mini-line")
        stop.touch()
        again.until(shown, timeout=90)
        history = whole(shown, mini)
        assert all(numbers(shown.shown, f"{name}-line")[-1] > 60 for name in ("mini", "book"))
        ends = [line for line in shown.shown.splitlines() if line.startswith("trained")]
        assert ends
        assert {line.split()[1] for line in ends} == {str(history[-1])}
        assert len({line.split()[2] for line in ends}) == 1
        again.works("%cluster stop")
    finally:
        again.close()
