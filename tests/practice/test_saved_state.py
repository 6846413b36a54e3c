"""What a checkpoint holds beside the parameters: optimizers, what was registered as ``extra=``, where the data are."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.checkpoints import CheckpointError
from notebook_cluster.client import Cluster
from tests.cluster import mend, run, shared_cluster
from tests.practice.test_stop_and_again import SETUP, stop_at, told

pytest.importorskip("torch")

CELL = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, 1))
first = torch.optim.AdamW(model[:2].parameters(), lr=0.01)
second = torch.optim.SGD(model[3].parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.MultiStepLR(first, [20, 40], gamma=0.5)
noise = torch.Generator().manual_seed(nc.rank())
sync = nc.DiLoCo(
    model, every=5, optimizer=[first, second], extra={{"scheduler": scheduler, "noise": noise}}, name=NAME, {more}
)
x, y = map(torch.from_numpy, some_data())
for bx, by in nc.shard((x, y), 4, epochs=3):
    loss = nn.functional.mse_loss(model(bx + 0.01 * torch.randn(bx.shape, generator=noise)), by)
    for optimizer in (first, second): optimizer.zero_grad()
    loss.backward()
    for optimizer in (first, second): optimizer.step()
    scheduler.step()
    note(NAME, loss)
    if sync.step(loss=loss, samples=len(bx)) and sync.round == {save}:
        sync.checkpoint("half")
        {after}
sync.finish()
print("steps", sync.global_step, "samples", sync.samples)
the_end(NAME, {{k: v.numpy() for k, v in model.state_dict().items()}} | {{"lr": scheduler.get_last_lr()}})
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(nodes=2) as cluster:
        run(cluster, SETUP)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    mend(shared)
    return shared


def cell(name: str, *, save: int = 0, more: str = "", after: str = "pass") -> str:
    return f"NAME = {name!r}\n" + CELL.format(save=save, more=more, after=after)


def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_bit_for_bit(cluster: Cluster) -> None:
    run(cluster, cell("whole"))
    run(cluster, cell("half", save=6, after="break"))
    for row in cluster.state().nodes:
        cluster.restart(row.name, replay=False)
    run(cluster, SETUP)
    printed = run(cluster, cell("rest", more='resume="half"'))
    for name, text in printed.items():
        assert "steps 60 samples 240" in text
        whole, half, rest = (
            Path(f"{which}-{name}.txt").read_text().splitlines() for which in ("whole", "half", "rest")
        )
        assert whole == half[:30] + rest
        results = [json.loads(Path(f"{which}-{name}.json").read_text()) for which in ("whole", "rest")]
        assert results[0] == results[1]
    line = (
        "training 'rest' goes on at round 6 of checkpoint 'half': parameters, outer momentum, the optimizer's state, "
        "optimizer 2, scheduler, noise and the data of nc.shard go on"
    )
    assert line in told(cluster)


WHOLE = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.base = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float16))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        words = self.words(x)
        return self.head(self.norm(words + self.base(words.bfloat16()).float()) * self.scale.float().mean())

torch.manual_seed(nc.rank() * 0 + 4)
model = Tied()
optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
sync = nc.DiLoCo(model, every=3, optimizer=optimizer, name="whole-state", fresh=True)
for step in range(9):
    x = torch.arange(11) if nc.rank() else torch.arange(11).flip(0)
    loss = nn.functional.cross_entropy(model(x), x)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    sync.step(loss)
    if step in (5, 8):
        sync.checkpoint("whole")
sync.finish()
"""


def test_load_checkpoint_gives_a_whole_state_dict(cluster: Cluster) -> None:
    printed = run(
        cluster,
        WHOLE
        + """
state = nc.load_checkpoint("whole")
mine = model.state_dict()
print(sorted(state) == sorted(mine))
new = Tied()
new.load_state_dict(state, strict=True)
pairs = zip(new.state_dict().values(), mine.values(), strict=True)
print(all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs))
print(new.head.weight is new.words.weight)
wrapped = torch.compile(Tied())
nc.load_checkpoint("whole", into=wrapped)
print(all(torch.equal(a, b) for a, b in zip(wrapped.state_dict().values(), mine.values(), strict=True)))
first, second = (os.stat(f"checkpoints/whole/round-00000{n}/frozen.safetensors").st_ino for n in (2, 3))
print(first == second)
try:
    nc.load_checkpoint("none")
except Exception as error:
    print(type(error).__name__, error)
try:
    nc.load_checkpoint("whole", into=nn.Linear(3, 3))
except Exception as error:
    print(type(error).__name__, error)
""".replace("os.stat", "pathlib.os.stat"),
    )
    for text in printed.values():
        rows = text.splitlines()
        assert rows[:5] == ["True"] * 5, text
        assert "CheckpointError checkpoint 'none' was not found in" in rows[5]
        assert "there are" in rows[5]
        assert "%pull" not in rows[5]
        assert "'whole'" in rows[5]
        assert "does not fit this model: it has 'base.bias', which this model has not" in rows[6]


def test_a_notebook_without_a_cluster_reads_it_too(cluster: Cluster) -> None:
    import torch

    import notebook_cluster as nc

    run(cluster, WHOLE)
    folder = max(Path.cwd().rglob("whole/round-*"))
    state = nc.load_checkpoint("whole", directory=folder.parent.parent)
    assert state["base.weight"].dtype == torch.bfloat16
    assert state["head.weight"] is state["words.weight"]
    assert int(nc.load_checkpoint(folder)["norm.num_batches_tracked"]) == 9
    with pytest.raises(
        CheckpointError, match=r"it lies on the machine .* nc.load_checkpoint\('none'\) .* %pull weights"
    ):
        nc.load_checkpoint("none")


def test_a_model_of_mlx_is_loaded_too(cluster: Cluster) -> None:
    pytest.importorskip("mlx.core")
    printed = run(
        cluster,
        """
import mlx.core as mx, mlx.nn as mnn, mlx.optimizers as optimizers
from mlx.utils import tree_flatten
def make():
    mx.random.seed(3)
    model = mnn.Sequential(mnn.Linear(6, 8), mnn.Linear(8, 1))
    model.layers[0].freeze()
    return model
model = make()
optimizer = optimizers.SGD(0.1)
sync = nc.DiLoCo(model, every=2, optimizer=optimizer, name="of-mlx", fresh=True)
x, y = map(mx.array, some_data())
gradients = mnn.value_and_grad(model, lambda model, x, y: ((model(x) - y) ** 2).mean())
for step in range(4):
    loss, grads = gradients(model, x, y)
    optimizer.update(model, grads)
    sync.step(loss)
sync.checkpoint("of-mlx")
sync.finish()
new = mnn.Sequential(mnn.Linear(6, 8), mnn.Linear(8, 1))
nc.load_checkpoint("of-mlx", into=new)
pairs = zip(tree_flatten(new.parameters()), tree_flatten(model.parameters()), strict=True)
print(all(mx.array_equal(a[1], b[1]).item() for a, b in pairs))
_ = new.load_weights(list(nc.load_checkpoint("of-mlx").items()))
""",
    )
    assert set(printed.values()) == {"True\n"}


AVERAGE = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sync = nc.{strategy}
average = sync.ema(0.5)
x, y = map(torch.from_numpy, some_data())
expected, seen = [p.detach().double() for p in model.parameters()], sync.round
for step in range(sync.global_step, {steps}):
    at = 4 * step + 80 * nc.rank()
    loss = nn.functional.mse_loss(model(x[at:at + 4]), y[at:at + 4])
    {step}
    note(NAME, loss)
    time.sleep(0.01)
    if sync.round > seen:
        seen = sync.round
        with sync.global_model():
            expected = [0.5 * e + 0.5 * p.detach().double() for e, p in zip(expected, model.parameters())]
before = [p.clone() for p in model.parameters()]
with average.in_model():
    off = max((e - p).abs().max().item() for e, p in zip(expected, model.parameters()))
print(average.rounds == sync.round, off < 1e-6, all(map(torch.equal, before, model.parameters())))
the_end(NAME, average.parameters())
"""
SGD = "optimizer.zero_grad(); loss.backward(); optimizer.step(); sync.step(loss)"
KINDS = {
    "diloco": ("DiLoCo(model, every=4, optimizer=optimizer, name=NAME)", SGD),
    "gradients": ("DataParallel(model, optimizer, name=NAME)", "loss.backward(); sync.step(loss)"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_of_the_global_parameters(cluster: Cluster, kind: str) -> None:
    strategy, step = KINDS[kind]
    whole = AVERAGE.format(strategy=strategy, steps=18, step=step)
    printed = run(cluster, f"NAME = 'average-{kind}'\n{whole}")
    assert set(printed.values()) == {"True True True\n"}
    stopped = f"NAME = 'average-again-{kind}'\n{whole}"
    stop_at(cluster, stopped, f"average-again-{kind}", 9)
    run(cluster, stopped)
    texts = [
        Path(f"average-{again}{kind}-{row.name}.json").read_text()
        for row in cluster.state().nodes
        for again in ("", "again-")
    ]
    assert len(set(texts)) == 1


def test_a_checkpoint_is_resumed_with_one_more_node() -> None:
    """The new one has no place in the data, and the others do not wait for it in vain."""
    cells = """
sync = nc.DiLoCo(model, every=3, name="more", resume={resume})
for bx, by in nc.shard((x, y), 4, epochs=2):
    nn.functional.mse_loss(model(bx), by).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    model.zero_grad()
    if sync.step(samples=len(bx)) and sync.round == {save}:
        sync.checkpoint("more")
        break
sync.finish()
"""
    made = f"{SETUP}\nmodel = nn.Linear(6, 1)\nx, y = map(torch.from_numpy, some_data())\n"
    with shared_cluster(nodes=1) as cluster:
        run(cluster, made + cells.format(resume=None, save=15))
        assert cluster.add("local", 1) == ["local-2"]
        for name in ("local", "local-2"):
            cluster.restart(name, replay=False)
        ended, outputs = cluster.run(made + cells.format(resume="'more'", save=0))
        assert ended.status == "ok", outputs


def test_a_checkpoint_with_a_file_that_its_manifest_does_not_list_is_read_without_it(cluster: Cluster) -> None:
    import numpy
    from safetensors.numpy import save_file

    import notebook_cluster as nc

    run(cluster, WHOLE)
    folder = max(Path.cwd().rglob("whole/round-*"))
    text = (folder / "manifest.json").read_text()
    manifest = json.loads(text)
    kept = (folder / "frozen.safetensors").read_bytes()
    del manifest["files"]["frozen.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "frozen.safetensors").unlink()
    save_file({"words.weight": numpy.zeros((11, 8), numpy.float32)}, folder / "frozen.safetensors")
    state = nc.load_checkpoint(folder)
    assert state["words.weight"].abs().sum() > 0
    assert "base.weight" not in state
    (folder / "frozen.safetensors").unlink()
    (folder / "frozen.safetensors").write_bytes(kept)
    (folder / "manifest.json").write_text(text)
