"""A cluster that is handed over to a peer while it runs, and back."""

from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, ClusterError
from tests.cluster import Watcher, run, running_cluster
from tests.conftest import wait_until
from tests.strangers import Strangers
from tests.test_head import COUNT, counted, window

pytestmark = pytest.mark.usefixtures("work")


def test_a_running_cell_goes_on_when_the_cluster_is_led_from_a_peer_and_again_from_here(strangers: Strangers) -> None:
    mini = strangers("mini")
    with running_cluster("lesson", local=1) as cluster:
        cluster.add(mini.name, code=mini.code)
        run(cluster, "kept = 41")
        stop = Path.cwd() / "stop"
        watcher = Watcher(cluster.execute(COUNT.format(stop=stop)))
        wait_until(lambda: len(counted(watcher.look() or watcher.text())) > 20, what="the cell to count")
        assert cluster.hand_over(mini.name) == mini.name
        assert window().head == mini.name
        assert cluster.state().head == mini.name
        before = len(counted(watcher.text()))
        wait_until(lambda: len(counted(watcher.look() or watcher.text())) > before + 20, what="the cell to go on")
        with pytest.raises(ClusterError, match=f"led from {mini.name} already"):
            cluster.hand_over(mini.name)
        assert cluster.hand_over("local") == ""
        assert window().head == ""
        before = len(counted(watcher.text()))
        wait_until(lambda: len(counted(watcher.look() or watcher.text())) > before + 20, what="the cell to go on")
        stop.touch()
        watcher.wait_end(60)
        for name in ("local", mini.name):
            numbers = counted(watcher.text(name))
            assert numbers == list(range(1, numbers[-1] + 1))
        assert run(cluster, "print(kept + 1, world_size)") == {"local": "42 2\n", mini.name: "42 2\n"}
        with Cluster.attach("lesson") as other:
            assert [node.condition for node in other.state().nodes] == ["ok", "ok"]
