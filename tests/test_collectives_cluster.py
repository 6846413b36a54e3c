"""Collectives between the kernels of a real cluster: in shared memory, and when a kernel is killed in the middle."""

from pathlib import Path

import pytest

from notebook_cluster.node.namespace.api import first_nodes
from notebook_cluster.protocol.node import NodeAddress
from tests.cluster import run, running_cluster, text_of
from tests.conftest import wait_until

MEMORY = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not MEMORY.is_dir(), reason="this system has no /dev/shm")

REDUCE = """
import hashlib
import numpy as np
x = np.random.default_rng(rank).standard_normal(5_000_011).astype(np.float32)
found = {name: hashlib.sha256(nc.all_reduce(x, algorithm=name)).hexdigest() for name in ("shared", "slices", "ring")}
for name in ("shared", "slices"):
    y = x.copy()
    found["in place, " + name] = hashlib.sha256(nc.all_reduce(y, algorithm=name, out=y)).hexdigest()
with open("/proc/self/maps") as maps:
    print(len(set(found.values())), found["shared"], maps.read().count("/dev/shm/nbc-"))
"""

KILLED = """
import os, signal
import numpy as np
for step in range(1000):
    if rank == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    nc.all_reduce(np.ones(2_000_000, np.float32))
"""


def test_kernels_share_memory_and_leave_none(
    jupyter_dirs: Path, no_processes_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jupyter_dirs)
    before = set(MEMORY.glob("nbc-*"))
    with running_cluster(local=2) as cluster:
        said = {name: text.split() for name, text in run(cluster, REDUCE).items()}
        assert said["local"] == said["local-2"]
        assert said["local"][0] == "1"  # the same bits whichever way, and wherever
        assert said["local"][2] == "2"  # both files, which have no name any more
        wait_until(lambda: set(MEMORY.glob("nbc-*")) <= before)  # those of other programs come and go

        ended, outputs = cluster.run(KILLED)
        assert "SIGKILL" in ended.results["local-2"].reason
        assert "PeerLost" in text_of(outputs, "local")
        assert "local-2" in text_of(outputs, "local")
        wait_until(lambda: set(MEMORY.glob("nbc-*")) <= before)  # those of other programs come and go

        after = run(cluster, "print(open('/proc/self/maps').read().count('/dev/shm/nbc-'))", ("local",))
        assert after == {"local": "0\n"}


FIRST = """
import os
with nc.one_node_first() as first:
    found = os.path.exists("downloaded")
    open("downloaded", "w").close()
print(first, found)
"""


def test_one_node_of_a_machine_goes_first_and_the_others_find_what_it_has_left(
    jupyter_dirs: Path, no_processes_left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(jupyter_dirs)
    with running_cluster(local=3) as cluster:
        assert run(cluster, FIRST) == {"local": "True False\n", "local-2": "False True\n", "local-3": "False True\n"}
        assert run(cluster, FIRST, ("local-2",)) == {"local-2": "True True\n"}

        ended, _ = cluster.run("with nc.one_node_first():\n    if rank == 0: raise OSError('no network')\n    x = 1")
        errors = {name: (result.error_name, result.error_value) for name, result in ended.results.items()}
        assert errors["local"] == ("OSError", "no network")
        assert errors["local-2"][0] == errors["local-3"][0] == "PeerLost"
        assert "local raised OSError" in errors["local-2"][1]

        ended, _ = cluster.run("with nc.one_node_first():\n    nc.barrier()")
        said = [result.error_value for result in ended.results.values()]
        assert any("one_node_first(per=machine)" in text and "barrier" in text for text in said), said

        ended, _ = cluster.run("with nc.one_node_first('room'): pass")
        assert "one_node_first: per='room': use" in ended.results["local"].error_value

        cluster.restart("local-3")  # what it runs again alone waits for nobody
        assert run(cluster, "print(x, first)", ("local-3",)) == {"local-3": "1 True\n"}


def test_the_first_node_of_each_machine_or_of_all_is_that_of_the_lowest_rank() -> None:
    rows = [
        NodeAddress(name, 1, rank, 0, name, machine, "cpu", [], "", 0, "", 0)
        for rank, (name, machine) in enumerate([("mini", "a"), ("mini-2", "a"), ("desk", "b"), ("desk-2", "b")])
    ]
    assert first_nodes(rows, "machine") == {"mini", "desk"}
    assert first_nodes(rows, "cluster") == {"mini"}
