"""nc.shard in a real cluster: a node is killed in mid-epoch, comes back and takes its part of the rest."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cluster import Watcher, running_cluster
from tests.conftest import wait_until

pytestmark = pytest.mark.usefixtures("work")

LOOP = """
import json, os, time
with open(f"got-{nc.node()}-{os.getpid()}", "a", buffering=1) as got:
    data = nc.shard(list(range(900)), 5)
    for number, batch in enumerate(data):
        got.write(json.dumps(batch) + "\\n")
        while number >= 9 and not os.path.exists("go"):
            taken = data._loop.position().epochs[-1].taken
            if sum(position in taken for position in range(900)) >= 150:
                open(f"knows-{nc.node()}", "w").close()
            time.sleep(0.01)
"""


def got(path: Path) -> list[int]:
    return [element for line in path.read_text().splitlines() for element in json.loads(line)]


def stopped(work: Path, node: str) -> list[Path]:
    """Files of the kernels with this name whose loop is at its tenth batch."""
    return [path for path in work.glob(f"got-{node}-*") if len(got(path)) == 50]


def test_a_killed_node_takes_part_again_and_nothing_is_twice_or_left_out(work: Path) -> None:
    with running_cluster(local=3) as cluster:
        watcher = Watcher(cluster.execute(LOOP))
        names = ("local", "local-2", "local-3")
        wait_until(lambda: all(stopped(work, name) for name in names), 60)
        (first,) = stopped(work, "local-3")
        # what a node has taken and nobody has heard of is given out again
        wait_until(lambda: all((work / f"knows-{name}").exists() for name in names), 60)
        os.kill(int(first.name.rpartition("-")[2]), signal.SIGKILL)
        wait_until(lambda: {node.name: node for node in cluster.state().nodes}["local-3"].condition == "dead", 60)
        cluster.restart("local-3")
        wait_until(lambda: len(stopped(work, "local-3")) == 2, 60)
        (work / "go").touch()
        watcher.wait_end()
    parts = [got(path) for path in work.glob("got-*")]
    assert len(parts) == 4
    assert sorted(element for part in parts for element in part) == list(range(900))
    assert len(got(first)) == 50
