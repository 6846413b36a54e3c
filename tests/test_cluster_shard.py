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


UNLIKE = """
import os, random, time
for _ in nc.shard(random.sample(range(900), 900), 5, epochs=9999):
    time.sleep(0.01)
    if os.path.exists("told"):
        break
"""


def got(path: Path) -> list[int]:
    return [element for line in path.read_text().splitlines() for element in json.loads(line)]


def stopped(work: Path, node: str) -> list[Path]:
    """Files of the kernels with this name whose loop is at its tenth batch."""
    return [path for path in work.glob(f"got-{node}-*") if len(got(path)) == 50]


def test_a_killed_node_takes_part_again_nothing_is_twice_or_left_out_and_unlike_data_is_told(work: Path) -> None:
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
        watcher = Watcher(cluster.execute(UNLIKE))
        told_of = [f"nc.shard: {name!r} has other data than 'local', or in another order" for name in names[1:]]
        events = lambda: "\n".join(row.text for row in cluster.state().events)  # noqa: E731
        wait_until(lambda: all(told in events() for told in told_of), what=events)
        (work / "told").touch()
        watcher.wait_end()
    parts = [got(path) for path in work.glob("got-*")]
    assert len(parts) == 4
    assert sorted(element for part in parts for element in part) == list(range(900))
    assert len(got(first)) == 50
