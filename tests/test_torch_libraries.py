"""Code of Hugging Face's libraries, and what torch waits for: no process group comes about by itself, and one that was
asked for lets go of a node when a Stop comes or another node is lost."""

import json
from collections.abc import Iterator

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, mend, run, shared_cluster, text_of
from tests.conftest import wait_until

pytest.importorskip("torch")

LISTENING = """
import os, psutil
def listening():
    found = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"}
    return sorted(found)
"""
PLAIN = """
import json, torch
def a_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
def some_data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 8, generator=generator), torch.randn(24, 1, generator=generator)
def plain_losses():
    model, (x, y) = a_model(), some_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for at in range(0, 24, 4):
        loss = torch.nn.functional.mse_loss(model(x[at:at + 4]), y[at:at + 4])
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        losses.append(loss.item())
    return losses
"""
TRAINER = """
from transformers import Trainer, TrainerCallback, TrainingArguments
class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = a_model()
    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.inner(x), labels)}
class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            losses.append(logs["loss"])
losses, (x, y) = [], some_data()
class InOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)
trainer = InOrder(
    model=Wrapped(),
    args=TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=1, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
        disable_tqdm=True, optim="sgd",
    ),
    train_dataset=[{"x": a, "labels": b} for a, b in zip(x, y)],
    callbacks=[Losses()],
)
before = listening()
trainer.train()
"""
ACCELERATOR = """
from accelerate import Accelerator
before = listening()
accelerator = Accelerator(cpu=True)
model, (x, y), losses = a_model(), some_data(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for at in range(0, 24, 4):
    loss = torch.nn.functional.mse_loss(model(x[at:at + 4]), y[at:at + 4])
    optimizer.zero_grad(); accelerator.backward(loss); optimizer.step()
    losses.append(loss.item())
"""
REPORT = """
import torch.distributed
facts = {"group": torch.distributed.is_initialized(), "new": sorted(set(listening()) - set(before)),
         "loss": max(abs(a - b) for a, b in zip(losses, plain_losses(), strict=True)), "count": len(losses)}
print("FACTS", json.dumps(facts))
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """That of all tests: libraries take seconds to load. Who died has a new kernel in the next test."""
    yield shared
    mend(shared)


@pytest.mark.parametrize("source", [TRAINER, ACCELERATOR], ids=["Trainer", "Accelerator"])
def test_code_of_hugging_face_trains_each_node_by_itself(cluster: Cluster, source: str) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    run(cluster, LISTENING + PLAIN)
    for targets in ((), ("local",)):
        said = run(cluster, source + REPORT, targets)
        assert set(said) == set(targets or ("local", "local-2"))
        for text in said.values():
            facts = json.loads(text[text.index("FACTS") + 5 :].splitlines()[0])
            assert (facts["group"], facts["new"], facts["count"]) == (False, [], 6)
            assert facts["loss"] < 1e-5
            assert "process group" not in text


def test_accelerate_joins_the_group_that_was_asked_for_and_the_next_cell_is_without_it(cluster: Cluster) -> None:
    pytest.importorskip("accelerate")
    run(cluster, LISTENING + PLAIN)
    ask = "\nprint(accelerator.distributed_type.value, accelerator.num_processes, type(model).__name__)"
    assert set(run(cluster, ACCELERATOR + ask).values()) == {"NO 1 Sequential\n"}
    said = run(cluster, "nc.torch_distributed()\n" + ACCELERATOR + ask)
    assert set(said.values()) == {"MULTI_CPU 2 DistributedDataParallel\n"}
    assert set(run(cluster, ACCELERATOR + ask).values()) == {"NO 1 Sequential\n"}


def test_the_variables_of_torchrun_are_those_of_the_cells_nodes_and_gone_at_its_end(cluster: Cluster) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    ask = f"import os; print(*[os.environ.get(name) for name in {names}])"
    nothing = "None None None None None\n"
    assert set(run(cluster, ask).values()) == {nothing}
    said = run(cluster, "nc.torch_distributed()\n" + ask)
    assert said == {"local": "0 0 2 2 127.0.0.1\n", "local-2": "1 1 2 2 127.0.0.1\n"}
    assert run(cluster, "nc.torch_distributed()\n" + ask, ("local-2",)) == {"local-2": "0 0 1 1 127.0.0.1\n"}
    run(cluster, "os.environ['RANK'] = 'mine'")
    cluster.run("nc.torch_distributed(); 1 / 0")
    assert set(run(cluster, ask + "; del os.environ['RANK']").values()) == {nothing.replace("None", "mine", 1)}


def test_what_jax_wants_to_know_is_that_of_the_cells_nodes(cluster: Cluster) -> None:
    ask = """
import os
asked = nc.jax_distributed()
address, count = asked["coordinator_address"], asked["num_processes"]
alike = set(nc.all_gather(address)) == {address}
print(count, asked["process_id"], address == os.environ["JAX_COORDINATOR_ADDRESS"], alike)
"""
    assert run(cluster, ask) == {"local": "2 0 True True\n", "local-2": "2 1 True True\n"}
    assert run(cluster, ask, ("local-2",)) == {"local-2": "1 0 True True\n"}
    assert set(run(cluster, "print([name for name in os.environ if 'JAX_' in name])").values()) == {"[]\n"}


def test_a_group_that_other_code_forms_is_named_once_in_the_cell(cluster: Cluster) -> None:
    form = """
import os, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store-{nc.node()}", rank=0, world_size=1)
"""
    warned, outputs = cluster.run(form)
    assert warned.status == "ok"
    for name in ("local", "local-2"):
        assert "formed a process group of torch's own (gloo, rank 0 of 1)" in text_of(outputs, name)
    assert set(run(cluster, "print(dist.is_initialized())").values()) == {"True\n"}
    run(cluster, "dist.destroy_process_group()")
    assert "process group" not in run(cluster, "nc.torch_distributed()")["local"]


WAITS = {
    "all_reduce": "dist.all_reduce(torch.ones(10))",
    "barrier": "dist.barrier()",
    "new_group": "dist.new_group([0, 1])",
    "backward of DDP": """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
if rank == 1:
    leave()
model(torch.randn(4, 4)).sum().backward()""",
}
AGAIN = "nc.torch_distributed(); t = torch.ones(2); dist.all_reduce(t); print(t.tolist())"


def waiting(wait: str, leave: str) -> str:
    return f"""
import os, signal, time, torch, torch.distributed as dist
def leave():
    {leave}
nc.torch_distributed()
print("in", flush=True)
if rank == 1 and "backward" not in {wait!r}:
    leave()
{wait}
"""


@pytest.mark.parametrize("wait", WAITS)
def test_stop_ends_a_wait_inside_torch_and_the_next_cell_works(cluster: Cluster, wait: str) -> None:
    watcher = Watcher(cluster.execute(waiting(WAITS[wait], "nc.recv(0)")))
    watcher.wait_for("in", "local")
    watcher.wait_for("in", "local-2")
    wait_until(lambda: all(row.busy for row in cluster.state().nodes))
    cluster.interrupt()
    ended = watcher.wait_end(20)
    assert ended.status == "interrupted", watcher.text()
    assert {result.status for result in ended.results.values()} == {"interrupted"}, watcher.text()
    assert set(run(cluster, AGAIN).values()) == {"[2.0, 2.0]\n"}


def test_stop_ends_the_waits_of_all_nodes_for_each_other(cluster: Cluster) -> None:
    watcher = Watcher(cluster.execute(waiting("dist.recv(torch.ones(2), 1 - rank)", "pass")))
    watcher.wait_for("in", "local")
    watcher.wait_for("in", "local-2")
    cluster.interrupt()
    ended = watcher.wait_end(20)
    assert {result.status for result in ended.results.values()} == {"interrupted"}, watcher.text()
    assert set(run(cluster, AGAIN).values()) == {"[2.0, 2.0]\n"}


@pytest.mark.parametrize("wait", WAITS)
def test_a_node_that_raises_ends_the_wait_of_the_others(cluster: Cluster, wait: str) -> None:
    watcher = Watcher(cluster.execute(waiting(WAITS[wait], "raise ValueError('no data')")))
    ended = watcher.wait_end(30)
    assert ended.results["local-2"].error_name == "ValueError"
    assert ended.results["local"].status == "error"
    assert set(run(cluster, AGAIN).values()) == {"[2.0, 2.0]\n"}


@pytest.mark.parametrize("wait", WAITS)
def test_a_node_that_is_killed_ends_the_wait_of_the_others(cluster: Cluster, wait: str) -> None:
    watcher = Watcher(cluster.execute(waiting(WAITS[wait], "os.kill(os.getpid(), signal.SIGKILL)")))
    ended = watcher.wait_end(30)
    assert ended.results["local-2"].status == "lost"
    assert ended.results["local"].status == "error"
    assert run(cluster, AGAIN, ("local",)) == {"local": "[1.0, 1.0]\n"}
