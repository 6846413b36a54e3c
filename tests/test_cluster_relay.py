"""Clusters on several hosts of which two cannot reach each other: everything works, over the links."""

from collections.abc import Iterator

import pytest

from tests import namespaces
from tests.conftest import wait_until
from tests.hosts import CLUSTER, CODE, HostNotebook, desk_and_two_that_share, notebook_on
from tests.namespaces import Network

pytestmark = namespaces.needed(240)

NAMES = ["book", "local", "mini"]


@pytest.fixture
def network() -> Iterator[Network]:
    with desk_and_two_that_share() as made:
        yield made


def start(notebook: HostNotebook) -> None:
    notebook.works(f"%cluster start {CLUSTER} --peers all --code {CODE} --no-panel")
    notebook.wait_for_nodes(set(NAMES))


def last_lines(notebook: HostNotebook) -> set[str]:
    return {notebook.printed(name).splitlines()[-1] for name in NAMES}


COLLECTIVES = """
%%on_all
import hashlib
import numpy as np
total = nc.all_reduce(np.arange(2_000_000, dtype=np.float32) * (nc.rank() + 1))
gathered = nc.all_gather({"from": nc.rank()})
if nc.node() == "mini":
    nc.send(np.full(500_000, 7.0), dst=[row for row in range(3) if row not in (0, nc.rank())][0])
elif nc.node() == "book":
    assert nc.recv(src=[row for row in range(3) if row not in (0, nc.rank())][0]).sum() == 3_500_000
print("done", [row["from"] for row in gathered], hashlib.sha256(total.tobytes()).hexdigest()[:16])
"""

TRAIN = """
%%on_all
import hashlib
import numpy as np, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(512, 512)
sync = nc.LocalSGD(model, every=1, name="model")
for step in range(3):
    with torch.no_grad():
        model.weight += nc.rank() + 1
    sync.step(loss=step)
sync.finish()
print("trained", sync.round, hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()[:16])
"""


def test_collectives_work_between_nodes_that_cannot_reach_each_other(network: Network) -> None:
    network.block("mini", "book")
    with notebook_on(network["desk"]) as notebook:
        start(notebook)
        cell = notebook.run(COLLECTIVES)
        assert cell.error is None, cell.shown
        (line,) = last_lines(notebook)
        assert line.startswith("done [0, 1, 2] ")
        notebook.works("%cluster restart mini")
        notebook.wait_for_nodes(set(NAMES))
        cell = notebook.run(COLLECTIVES)
        assert cell.error is None, cell.shown
        assert last_lines(notebook) == {line}
        both = {"mini cannot reach book", "book cannot reach mini"}
        wait_until(lambda: both == {text.split(" at ")[0] for text in notebook.events() if "cannot reach" in text})


def test_training_goes_on_with_all_nodes_when_the_way_between_two_is_cut(network: Network) -> None:
    """Their connection stands, and nothing gets through it any more."""
    with notebook_on(network["desk"]) as notebook:
        start(notebook)
        cell = notebook.run(TRAIN)
        assert cell.error is None, cell.shown
        assert len(last_lines(notebook)) == 1
        network.block("mini", "book")
        cell = notebook.run(TRAIN)
        assert cell.error is None, cell.shown
        assert len(last_lines(notebook)) == 1
        assert notebook.commits() == [NAMES] * 6
        wait_until(lambda: any("cannot reach" in text and "relayed" in text for text in notebook.events()))
