"""The head of a cluster is gone for good, and its owner goes on from here with what the other machines keep."""

import signal
import time

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.client.start import read_connection
from tests.cluster import Watcher, end, run, running_cluster
from tests.conftest import wait_until
from tests.strangers import Strangers
from tests.test_cluster_take_over import CELL, words
from tests.test_head import command
from tests.training_cells import SETUP, commits

pytestmark = pytest.mark.usefixtures("work")


@pytest.mark.proof
@pytest.mark.timeout(240)
def test_a_training_goes_on_from_here_when_its_head_is_gone_for_good(strangers: Strangers) -> None:
    mini, desk = strangers("mini"), strangers("desk")
    with running_cluster("digits", local=1, head=mini.name, code=mini.code) as first:
        first.add(desk.name, code=desk.code)
        run(first, SETUP)
        watcher = Watcher(first.execute(CELL.format(steps=100_000, pause=0.02)))
        first.wait_until(lambda state: state.jobs and state.jobs[0].round >= 3)
        refused = command("take-over", "digits")
        assert refused.returncode == 1
        assert f"cluster 'digits' runs, led from {mini.name}: %cluster attach digits" in refused.stderr
        first.wait_until(lambda state: state.jobs[0].round >= 5)
        last = first.state().jobs[0].round
        mini.end(signal.SIGKILL)
        gone = time.time()
        wait_until(lambda: first.connection.closed, 120, "the view to give it up")
        assert "cannot be reached" in str(first.connection.closed)
        assert watcher.ended is None
        taken = command("take-over", "digits")
        assert taken.returncode == 0, taken.stderr
        second = Cluster.attach("digits")
        try:
            told = taken.stdout
            assert "cluster digits is ready (" in told
            assert f"{desk.name}: ended 1 node of the cluster before, after a checkpoint" in told
            round = int(words(told, "took over training 'model' after round ")[0])
            assert last <= round
            file = read_connection("digits")
            assert file is not None
            assert file.head == ""
            assert {row.name for row in second.state().nodes} == {"local", desk.name}
            run(second, SETUP)
            ended = run(second, CELL.format(steps=4, pause=0))
            records = commits(second)
            print(f"from the kill of the head to the next COMMIT: {records[0]['time'] - gone:.1f} s")
            assert [record["commit"]["round"] for record in records] == [round + 1, round + 2]
            assert len({text.rpartition("ends ")[2] for text in ended.values()}) == 1
            # The head comes back: nobody but its own machine obeys it.
            mini.again()
            mini.said("(leads cluster digits from here)")
            desk.said("(the head of cluster digits is granted no more)")
            assert run(second, "print(world_size)") == {"local": "2\n", desk.name: "2\n"}
        finally:
            end(second)
            second.close()
