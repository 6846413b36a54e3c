"""A cluster whose coordinator runs on a peer, its head: used through a window as one that is led from here."""

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import run, running_cluster
from tests.strangers import Strangers

pytestmark = pytest.mark.usefixtures("work")


def test_a_cluster_that_is_led_from_a_peer_runs_cells_here_and_there(strangers: Strangers) -> None:
    mini, desk = strangers("mini"), strangers("desk")
    said: list[str] = []
    with running_cluster("lesson", local=1, head=mini.name, code=mini.code, on_progress=said.append) as cluster:
        assert cluster.add(mini.name) == [mini.name]
        assert cluster.add(desk.name, code=desk.code) == [desk.name]
        assert run(cluster, "print(world_size)") == {"local": "3\n", mini.name: "3\n", desk.name: "3\n"}
        with Cluster.attach("lesson") as other:
            assert [node.name for node in other.state().nodes] == ["local", mini.name, desk.name]
