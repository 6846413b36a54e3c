"""What the end of a cell itself does wrong is the cell's error: the last round, which a sync object that was not
finished has there."""

from collections.abc import Iterator

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import run, running_cluster, text_of
from tests.conftest import shared_folders
from tests.training_cells import SETUP

NAMES = ("local", "local-2")
BEGUN = """
model = make_model(300)
sync = nc.DiLoCo(model, every=5, name="{name}", fresh=True)
work(model, 0)
sync.step()
"""
CHANGED = """
if rank == 1:
    model.weight = nn.Parameter(torch.zeros(7))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with shared_folders() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with running_cluster(local=2) as cluster:
            run(cluster, SETUP)
            yield cluster


def test_an_error_in_the_last_round_is_the_error_of_the_cell_on_its_node(cluster: Cluster) -> None:
    ended, outputs = cluster.run(BEGUN.format(name="changed") + CHANGED)
    assert ended.status == "error"
    assert {name: result.status for name, result in ended.results.items()} == {"local": "ok", "local-2": "error"}
    result = ended.results["local-2"]
    assert result.error_name == "ValueError"
    assert "'weight'" in result.error_value
    said = text_of(outputs, "local-2")
    assert "Error in callback" not in said
    assert result.error_value in said
    assert run(cluster, "print('next')") == dict.fromkeys(NAMES, "next\n")


def test_so_it_is_in_a_cell_that_awaits(cluster: Cluster) -> None:
    ended, _ = cluster.run("import asyncio; await asyncio.sleep(0)\n" + BEGUN.format(name="awaited") + CHANGED)
    assert {name: result.status for name, result in ended.results.items()} == {"local": "ok", "local-2": "error"}


def test_the_other_sync_objects_of_the_cell_leave_with_it(cluster: Cluster) -> None:
    """The other node does not wait for a finish that will not come."""
    both = BEGUN.format(name="first") + CHANGED + BEGUN.format(name="second")
    ended, outputs = cluster.run(both)
    assert {name: result.status for name, result in ended.results.items()} == {"local": "ok", "local-2": "error"}
    assert "Error in callback" not in text_of(outputs)
