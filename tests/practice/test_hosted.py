"""A node that joins while a library's loop trains: it takes part, and does not keep the others at its own pace."""

import pytest

from tests.cluster import Watcher, running_cluster
from tests.practice.loops import ON_NODES, facts_of

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("no_processes_left", "folder")

LOOP = """
import time
from notebook_cluster.integrations.hosted import HostedSync
hosted = HostedSync(5, None, {}, True, "shard")
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = Examples(400, seed=rank)
hosted.begin(model, optimizer, data, 0, None)
print("training", flush=True)
steps, ends = 0, time.monotonic() + 600
while time.monotonic() < ends and not hosted.left_alone:
    at = torch.randint(400, (4,))
    model(data.x[at], data.y[at], at)["loss"].backward()
    optimizer.step(); optimizer.zero_grad()
    hosted.step(4)
    steps += 1
    if nc.node() != "local-3" and "local-3" in hosted.sync.members:  # it has come: this node is at its end
        break
    time.sleep(0.01)
hosted.finish()
say(theta=flat(model), steps=steps, alone=hosted.left_alone, early=time.monotonic() < ends)
"""


def test_a_node_that_joins_ends_its_loop_when_the_others_have_ended_theirs() -> None:
    with running_cluster(local=2) as cluster:
        assert cluster.run(ON_NODES)[0].status == "ok"
        watcher = Watcher(cluster.execute(LOOP))
        for name in ("local", "local-2"):
            watcher.wait_for("training", name)
        assert cluster.add("local", 1) == ["local-3"]
        ended = watcher.wait_end(120)
        assert ended.status == "ok", watcher.text()
        facts = facts_of({name: watcher.text(name) for name in ("local", "local-2", "local-3")})
    assert facts["local"]["theta"] == facts["local-2"]["theta"] == facts["local-3"]["theta"]
    assert {name: said["alone"] for name, said in facts.items()} == {"local": False, "local-2": False, "local-3": True}
    assert all(said["early"] for said in facts.values())
