"""Collectives between the kernels of a real cluster: in shared memory, and when a kernel is killed in the middle."""

from pathlib import Path

import pytest

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
