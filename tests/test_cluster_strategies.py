"""The strategies on real kernels: equal states after every round, nodes of unlike speed, a step that loses a node."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.rounds.member.state import MemberSettings
from notebook_cluster.training.loop import encoding
from tests.cluster import Watcher, mend, run, shared_cluster, text_of
from tests.training_cells import SETUP, job

NAMES = ("local", "local-2", "local-3")
PAIR = NAMES[:2]

SETUP_MORE = """
def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 200), nn.Tanh(), nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 5))

def loss_of(model, seed, size=16):
    x = torch.randn(size, 20, generator=torch.Generator().manual_seed(seed))
    return (model(x) - x[:, :5].tanh()).square().mean()

def flat(model):
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()]).numpy()

def digest(model):
    return state_hash(flat(model), np.empty(0, np.float32))

def loop(sync, model, steps, seconds=0.0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, 100 * step + rank)
        loss.backward()
        optimizer.step()
        time.sleep(seconds)
        if done := sync.step(loss=loss, samples=16):
            hashes.append(done.state_hash)
    sync.finish()

hashes = []
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """That of all tests: torch and its optimisers take two seconds to load."""
    run(shared, SETUP + SETUP_MORE)
    yield shared
    mend(shared)


def said_by_all(cluster: Cluster, source: str) -> str:
    """What every node printed, which must be the same."""
    said = run(cluster, source)
    assert set(said) == set(NAMES)
    assert len(set(said.values())) == 1, said
    return said["local"]


def test_every_strategy_leaves_all_nodes_with_one_state_after_every_round(cluster: Cluster) -> None:
    for name, made in {
        "streaming": "nc.DiLoCo(model, every=6, name='streaming', fragments=3, overlap=2)",
        "sparse": "nc.SparseLoCo(model, every=3, name='sparse', overlap=1)",
        "topk": "nc.LocalSGD(model, every=3, name='topk', codec='topk-256')",
        "randomk": "nc.LocalSGD(model, every=3, name='randomk', codec='randomk-1024')",
        "quorum": "nc.DiLoCo(model, every=4, name='quorum', quorum=2, grace=0.2, codec='int8')",
    }.items():
        said = said_by_all(
            cluster,
            f"""
hashes.clear()
model = network(rank)
before = loss_of(network(0), 1, 256).item()
loop({made}, model, 20, seconds=0.02 if {name!r} == "quorum" and rank == 2 else 0.0)
assert loss_of(model, 1, 256).item() < before
print(digest(model))
""",
        )
        assert len(said.split()) == 1
        view = job(cluster, name)
        assert view.round >= 5
        assert view.hash_mismatches == 0
    # gradients: one state at every step, and one step where one machine would have taken it
    said = said_by_all(
        cluster,
        """
model = network(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
sync = nc.DataParallel(model, optimizer, name="parallel", resend=6)
for step in range(10):
    loss_of(model, 100 * step + rank).backward()
    sync.step(samples=16)
    print(digest(model))
alone = network(0)
optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
for step in range(10):
    optimizer.zero_grad()
    (sum(loss_of(alone, 100 * step + other) for other in range(3)) / 3).backward()
    optimizer.step()
assert np.abs(flat(alone) - flat(model)).max() < 1e-5
""",
    )
    assert len(set(said.split())) == 10
    assert job(cluster, "parallel").round == 11
    # momenta: a step of all without an optimizer
    said = said_by_all(
        cluster,
        """
model = network(rank)
before = loss_of(network(0), 1, 256).item()
sync = nc.DeMo(model, lr=0.003, name="momenta")
for step in range(20):
    loss_of(model, 100 * step + rank).backward()
    print(sync.step(samples=16).state_hash, digest(model))
assert loss_of(model, 1, 256).item() < before
""",
    )
    assert len(set(said.splitlines())) == 20
    view = job(cluster, "momenta")
    assert (view.round, view.hash_mismatches) == (20, 0)


def test_a_step_that_loses_a_node_is_taken_by_the_others(cluster: Cluster) -> None:
    ended, _ = cluster.run("""
model = network(rank)
sync = nc.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=0.003))
if rank == 1:
    when("send", rounds.Prepared, 4, die)
for step in range(9):
    loss_of(model, 100 * step + rank).backward()
    sync.step(samples=16)
sync.finish()
""")
    assert "SIGKILL" in ended.results["local-2"].reason
    ends = run(cluster, "print(digest(model))", ("local", "local-3"))
    assert ends["local"] == ends["local-3"]
    assert (job(cluster).round, job(cluster).hash_mismatches) == (9, 0)


def test_optimizers_that_differ_are_named_below_the_cell(cluster: Cluster) -> None:
    watcher = Watcher(
        cluster.execute("""
model = network(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = nc.DataParallel(model, optimizer, name="apart")
for step in range(3):
    optimizer.param_groups[0]["lr"] /= 1 + rank // 2
    loss_of(model, 100 * step + rank).backward()
    sync.step(samples=16)
sync.finish()
""")
    )
    watcher.wait_end()
    told = "optimizers of 'apart' differ in round 1 ('local' SGD(lr=0.1), 'local-3' SGD(lr=0.05))"
    assert [note.partition(": ")[0] for note in watcher.notes] == [told]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("DataParallel(model, optimizer", "DiLoCo(model, every=2", "parameters go on; outer momentum, "),
        ("DiLoCo(model, every=1, momentum_dtype='bfloat16'", "DataParallel(model, optimizer", "parameters go on; "),
        ("LocalSGD(model, every=1", "DiLoCo(model, every=2, momentum_dtype='bfloat16'", "parameters go on; outer mom"),
        ("DiLoCo(model, every=1", "LocalSGD(model, every=2", "parameters go on; the optimizer, "),
        ("DiLoCo(model, every=1", "DiLoCo(model, every=2, codec='int8'", "parameters and outer momentum go on; "),
        ("DeMo(model, lr=0.003", "DiLoCo(model, every=2", "parameters go on; outer momentum, "),
        ("DiLoCo(model, every=1", "DeMo(model, lr=0.003", "parameters go on; each node's momentum "),
        ("DataParallel(model, optimizer, mode='server'", "DataParallel(model, optimizer", "parameters go on; "),
    ],
    ids=["gradients", "to-gradients", "bfloat16", "none", "codec", "momenta", "to-momenta", "server"],
)
def test_another_strategy_goes_on_from_the_parameters_and_a_new_node_gets_them(
    cluster: Cluster, request: pytest.FixtureRequest, before: str, after: str, told: str
) -> None:
    name = request.node.callspec.id
    source = """
model = network(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = nc.{0}, name={1!r})
print("from", state_hash(flat(model), np.empty(0, np.float32)))
for step in range(4):
    optimizer.zero_grad()
    loss_of(model, 100 * step + rank).backward()
    optimizer.step() if type(sync).__name__ in ("DiLoCo", "LocalSGD") else None
    sync.step(samples=16)
sync.finish()
print("to", digest(model))
"""
    ends = run(cluster, source.format(before, name), PAIR)
    watcher = Watcher(cluster.execute(source.format(after, name)))
    assert watcher.wait_end().status == "ok"
    texts = [text_of(watcher.outputs, node) for node in NAMES]
    (left,) = {hash for text in ends.values() for hash in re.findall(r"^to (\w+)$", text, re.M)}
    assert [re.findall(r"^from (\w+)$", text, re.M) for text in texts] == [[left]] * 3
    assert len({hash for text in texts for hash in re.findall(r"^to (\w+)$", text, re.M)}) == 1
    (line,) = (note for note in watcher.notes if "goes on at round" in note)
    assert line.partition(": ")[2].startswith(told)
    assert job(cluster, name).hash_mismatches == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("DiLoCo(model, every=6", "DiLoCo(model, every=6, fragments=2"),
        ("DiLoCo(model, every=6, fragments=2", "DiLoCo(model, every=6"),
        ("DiLoCo(model, every=6", "DataParallel(model, optimizer"),
        ("LocalSGD(model, every=6", "DeMo(model, lr=0.003"),
    ],
    ids=["cut", "whole", "gradients", "momenta"],
)
def test_a_stopped_run_goes_on_with_another_strategy_or_other_fragments_without_the_work_of_no_round(
    cluster: Cluster, request: pytest.FixtureRequest, tmp_path: Path, before: str, after: str
) -> None:
    name, stopped = request.node.callspec.id, tmp_path / "stopped"
    source = """
model = network(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = nc.{0}, name={1!r})
print("from", sync.round, digest(model))
for step in range({2}):
    optimizer.zero_grad()
    loss_of(model, 100 * step + rank).backward()
    optimizer.step() if "every" in {0!r} else None
    sync.step(samples=16)
    if step == 12:
        print("one step since the last round")
    while step >= 12 and not os.path.exists({3!r}):
        time.sleep(0.05)
    time.sleep(0.3 if step >= 12 else 0)  # the Stop may come a little after the file
sync.finish()
print("to", sync.round, digest(model))
"""
    watcher = Watcher(cluster.execute(source.format(before, name, 18, str(stopped))))
    for node in NAMES:
        watcher.wait_for("one step since", node)
    cluster.interrupt()
    stopped.touch()  # each node is between two steps
    watcher.wait_end()
    again = Watcher(cluster.execute(source.format(after, name, 12, "")))
    assert again.wait_end().status == "ok", again.text()
    lines = [note for note in again.notes if "goes on at round" in note]
    assert lines
    for line in lines:  # a Stop that waits for two seconds falls into a step
        assert re.search(
            "since then that is in no round is lost: it was of another strategy|since then (is|are) lost", line
        )
    texts = [text_of(again.outputs, node) for node in NAMES]
    for said in ("from", "to"):
        assert len({found for text in texts for found in re.findall(rf"^{said}.* (\w+)$", text, re.M)}) == 1


def test_a_sync_object_that_one_node_alone_makes_is_told_below_the_cell(cluster: Cluster) -> None:
    watcher = Watcher(
        cluster.execute("""
if rank == 0:
    model = network(0)
    sync = nc.DiLoCo(model, every=5, name="alone")
    sync.finish()
""")
    )
    assert watcher.wait_end().status == "ok"
    said = "'alone' is trained without 'local-2', 'local-3', where the cell ended without a sync object of this name"
    assert [note.partition(": make")[0] for note in watcher.notes] == [said]


ALL = "'local', 'local-2', 'local-3'"


@pytest.mark.parametrize(
    ("made", "data", "told"),
    [
        ("", "step", f"{ALL} did the same work for 'odd' in rounds 1 and 2, to the bit"),
        ("model = network(0)", "100 * step + rank", f"the model of 'odd' is not trained on {ALL}"),
        ("", "100 * step + rank", ""),
    ],
    ids=["same data", "made anew", "as it should be"],
)
def test_a_loop_that_trains_nothing_together_is_named_below_the_cell(
    cluster: Cluster, made: str, data: str, told: str
) -> None:
    watcher = Watcher(
        cluster.execute(f"""
model = network(0)
sync = nc.DiLoCo(model, every=5, name="odd", fresh=True)
{made}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(15):
    optimizer.zero_grad()
    loss_of(model, {data}).backward()
    optimizer.step()
    sync.step(samples=16)
sync.finish()
""")
    )
    watcher.wait_end()
    assert [note.partition(": ")[0] for note in watcher.notes] == [told] * bool(told)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nc.DiLoco(model)", "no attribute 'DiLoco': do you mean 'DiLoCo'?"),
        ("nc.fit(model)", "no attribute 'fit': sync = nc.DiLoCo(model, every=100), then sync.step(loss=loss) in your"),
        ("nc.nothing(model)", "module 'notebook_cluster' has no attribute 'nothing'"),
        (
            "nc.DiLoCo(model, 3, every=10)",
            "for argument 'every' (an optimizer goes to optimizer=): it is nc.DiLoCo(model, every); by name name=",
        ),
        *(
            (
                f"adam = torch.optim.Adam(model.parameters()); nc.{strategy}(model, adam, every=10)",
                "for argument 'every' (every= got Adam, which goes to optimizer=): it is nc.",
            )
            for strategy in ("DiLoCo", "LocalSGD", "SparseLoCo")
        ),
        (
            "nc.DiLoCo(model, torch.optim.SGD(model.parameters(), 0.1))",
            "every= got SGD, which goes to optimizer=: use a whole number of steps from 1, for example every=100",
        ),
        ("nc.DeMo(model, torch.optim.SGD(model.parameters(), 0.1))", "lr= got SGD: nc.DeMo is the optimizer, give it"),
        ("nc.DiLoCo(model, scheduler=1)", "'scheduler' (extra={'scheduler': scheduler} keeps what has"),
        ("nc.DataParallel(model)", "'optimizer': it is nc.DataParallel(model, optimizer); by name name="),
        ("nc.shard([1], [2], batch_size=1)", "'batch_size': it is nc.shard(data, batch_size); by name shuffle="),
        ("for x, y in nc.shard([(1, 2)] * 9, 3): pass", "a batch of a list or a stream is a list of its items, one of"),
        ("for x, y in [(1, 2, 3)]: pass", "too many values to unpack (expected 2)"),
        ("nc.shard([1], 1)[0]", "a shard is no dataset for a DataLoader: it gives this node's batches itself"),
        ("nc.DiLoCo(model, codec='int5')", "codec='int5': use one of 'float32', "),
        ("nc.DiLoCo(model, resume='nothing')", "checkpoint 'nothing' was not found on local"),
        ("nc.DiLoCo(model, resume=True)", "resume= is a bool and not the name of a checkpoint: it takes the NAME that"),
        ("nc.DiLoCo(model, resume='checkpoints/digits/round-000012')", "was given): write resume='digits'"),
        ("nc.DiLoCo(model, checkpoint='x')", "'checkpoint' (sync.checkpoint(NAME) saves a checkpoint, resume=NAME"),
        ("nc.DataParallel(model, None, every=5)", "'every' (with every step a round it has none; nc.DiLoCo("),
        ("nc.DiLoCo(model).step(samples='many')", "samples='many': pass the number of examples in the batch"),
        (
            "nc.DiLoCo(model).step(loss=1.0, accuracy=0.5)",
            "TypeError: sync.step() got an unexpected keyword argument 'accuracy': it is sync.step(loss, samples); "
            "nc.report(accuracy=...) shows another number",
        ),
        ("nc.DiLoCo(model).step(1.0, sample=3)", "'sample': it is sync.step(loss, samples); samples=len(x) is the"),
        (
            "nc.DataParallel(model, torch.optim.SGD(model.parameters(), 0.1)).step(1.0, 2, 3)",
            "4 were given: it is sync.step(loss, samples, grads=)",
        ),
        ("nc.DiLoCo(model).checkpoint()", "'name': it is sync.checkpoint(name)"),
        ("nc.DiLoCo(model).save('x')", "object has no attribute 'save': sync.checkpoint(NAME) saves one"),
        ("nc.DiLoCo(model).finnish()", "object has no attribute 'finnish': do you mean 'finish'?"),
        (
            "sync = nc.DiLoCo(model); sync.finish(); list(model.parameters())[-1].requires_grad_(False); sync.step()",
            "parameter '4.bias' was removed (or frozen) after the sync object was made: make the sync object again",
        ),
    ],
)
def test_a_mistake_is_shown_where_the_user_made_it_with_the_way_out(cluster: Cluster, line: str, said: str) -> None:
    ended, outputs = cluster.run(f"model = network(0)\n{line}")
    assert {result.status for result in ended.results.values()} == {"error"}
    text = re.sub(r"\x1b\[[0-9;]*m", "", text_of(outputs, "local"))
    assert said in text
    assert f"----> 2 {line}" in text
    assert ".py:" not in text, "no line of the package stands between the user's and the message"


def test_a_metric_in_the_place_of_samples_is_told_and_counted(cluster: Cluster) -> None:
    _, outputs = cluster.run(
        "model = network(0)\nsync = nc.DiLoCo(model, every=2, fresh=True)\n"
        "for accuracy in (0.25, 0.5):\n    sync.step(1.0, accuracy)\nprint(sync.samples)"
    )
    text = text_of(outputs, "local")
    assert text.count("sync.step() was given less than one sample: samples is the number of examples") == 1
    assert "0.75" in text


def test_a_function_of_the_users_own_is_not_taken_for_one_of_the_package(cluster: Cluster) -> None:
    own = "class DeMo:\n    def step(self, x): pass\n    def forward(self): pass\ndef report(x): pass\n"
    own += "from notebook_cluster import shard\nnc.DeMo(network(0), lr=1.0).finish()\n"
    for call in ("report()", "DeMo().step()", "DeMo().forward(1)", "DeMo().save", "shard([1], 2, 3)"):
        ended, outputs = cluster.run(own + call)
        assert {result.status for result in ended.results.values()} == {"error"}
        text = text_of(outputs, "local")
        assert ("it is nc." in text) == call.startswith("shard")
        assert "sync." not in text


MLX = """
import mlx.core as mx, mlx.nn as mlx_nn, mlx.optimizers as mlx_optim
from mlx.utils import tree_flatten

class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 100), nn.Linear(100, 5)
    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

class Ours(mlx_nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlx_nn.Linear(20, 100), mlx_nn.Linear(100, 5)
    def __call__(self, x):
        return self.second(mx.tanh(self.first(x)))

def batch(step):
    x = np.random.default_rng([step, rank]).standard_normal((16, 20)).astype(np.float32)
    return x, np.tanh(x[:, :5])

def taken(sync, model, step):
    "One step as people write it in either framework; its loss."
    x, y = batch(step)
    if isinstance(model, Ours):
        loss, grads = mlx_nn.value_and_grad(model, lambda model, x, y: mx.square(model(x) - y).mean())(
            model, mx.array(x), mx.array(y))
        sync.step(loss=loss, samples=16, grads=grads)
    else:
        loss = (model(torch.from_numpy(x)) - torch.from_numpy(y)).square().mean()
        loss.backward()
        sync.step(loss=loss, samples=16)
    return loss.item()

def flat(model):
    named = tree_flatten(model.parameters()) if isinstance(model, Ours) else model.state_dict().items()
    return np.concatenate([np.asarray(array).ravel() for _, array in sorted(named)])
"""


def test_a_kernel_with_torch_and_one_with_mlx_train_one_model(cluster: Cluster) -> None:
    pytest.importorskip("mlx.core")
    run(cluster, MLX, PAIR)
    said = run(
        cluster,
        """
model = Ours() if rank else Theirs()
sync = nc.DeMo(model, lr=0.002, name="unlike-momenta")
losses = []
for step in range(40):
    losses.append(taken(sync, model, step))
    print(state_hash(flat(model), np.empty(0, np.float32)))
assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), losses
""",
        PAIR,
    )
    assert said["local"] == said["local-2"]
    assert len(set(said["local"].split())) == 40
    assert (job(cluster, "unlike-momenta").round, job(cluster, "unlike-momenta").hash_mismatches) == (40, 0)
    said = run(
        cluster,
        """
def made(model):
    return mlx_optim.SGD(0.1, momentum=0.9) if rank else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

model = Ours() if rank else Theirs()
sync = nc.DataParallel(model, made(model), name="unlike-parallel", resend=5)
losses = [taken(sync, model, step) for step in range(20)]
sync.finish()
assert losses[-1] < 0.7 * losses[0], losses
print(state_hash(flat(model), np.empty(0, np.float32)))
""",
        PAIR,
    )
    assert said["local"] == said["local-2"]  # the last thing a loop does is to send the parameters again
    run(cluster, "sync.checkpoint('rest')", PAIR)  # while neither main thread is in the loop
    run(
        cluster,
        """
model = Ours() if rank else Theirs()
optimizer = made(model)
sync = nc.DataParallel(model, optimizer, name="again", resume="rest")
assert sync.round == 24, sync.round
steps = optimizer.state["step"].item() if rank else len(optimizer.state_dict()["state"])
assert steps == (20 if rank else 4), steps
taken(sync, model, 20)
""",
        PAIR,
    )


LARGE = """
import hashlib
model = nn.Linear(4_100, 4_100)
sync = nc.DiLoCo(model, every=1, codec="int8", name="large")
for step in range(4):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 - 1e-3 * (rank + step + 1))
    sync.step(samples=1)
sync.finish()
print(sync.round, hashlib.blake2b(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def test_a_model_whose_next_state_is_not_kept_aside_is_the_same_on_all_nodes(cluster: Cluster) -> None:
    assert max(MemberSettings().in_place_from, encoding.LATER_FROM) < 4_100 * 4_101
    printed = run(cluster, LARGE)
    assert len(set(printed.values())) == 1
    assert all(text.startswith("4 ") for text in printed.values()), printed
    assert job(cluster, "large").hash_mismatches == 0
