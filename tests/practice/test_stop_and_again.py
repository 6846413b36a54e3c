"""Stop in the middle of a round, and the cell again: losses and parameters are those of a run that nobody stopped, bit
for bit."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, mend, run, shared_cluster, text_of
from tests.conftest import wait_until
from tests.practice.recipes import recipe

pytest.importorskip("torch")

SETUP = """
import json, pathlib, random, time
import numpy as np, torch
from torch import nn
torch.set_num_threads(1)

def note(name, loss):
    with open(f"{name}-{nc.node()}.txt", "a") as file:
        file.write(repr(loss.item() if hasattr(loss, "item") else loss) + chr(10))
    slow = pathlib.Path("slow-from")
    if slow.exists():  # a Stop is on its way, and finds the loop going on also where it comes late
        done = len(open(f"{name}-{nc.node()}.txt").readlines())
        time.sleep(0.1 * (done >= int(slow.read_text())))

def the_end(name, arrays):
    arrays = {k: np.asarray(v).tolist() for k, v in arrays.items()}
    pathlib.Path(f"{name}-{nc.node()}.json").write_text(json.dumps(arrays))

def some_data(count=160):
    draw = np.random.default_rng(5)
    return draw.standard_normal((count, 6), dtype=np.float32), draw.standard_normal((count, 1), dtype=np.float32)
"""
TORCH = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
noise = torch.Generator().manual_seed(nc.rank())
{sync}
x, y = map(torch.from_numpy, some_data())
for bx, by in nc.shard((x, y), 4, epochs=3):
    loss = nn.functional.mse_loss(model(bx + 0.01 * torch.randn(bx.shape, generator=noise)), by)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    note(NAME, loss)
    sync.step(loss=loss, samples=len(bx))
    time.sleep(0.01)
sync.finish()
the_end(NAME, {{k: v.numpy() for k, v in model.state_dict().items()}} | {{"lr": scheduler.get_last_lr()}})
"""
GRADIENTS = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Dropout(0.3), nn.Linear(64, 1))
average = torch.optim.swa_utils.AveragedModel(model)
{sync}
x, y = map(torch.from_numpy, some_data())
for bx, by in nc.shard((x, y), 4, epochs=3):
    loss = nn.functional.mse_loss(model(bx), by)
    loss.backward()
    note(NAME, loss)
    sync.step(loss, samples=len(bx))
    scheduler.step()  # it cannot come before, for sync.step() makes the optimizer's step
    average.update_parameters(model)
    time.sleep(0.01)
sync.finish()
the_end(NAME, {{k: v.numpy() for k, v in average.state_dict().items()}} | {{"lr": scheduler.get_last_lr()}})
"""
MLX = """
import mlx.core as mx, mlx.nn as mnn, mlx.optimizers as optimizers
from mlx.utils import tree_flatten
mx.random.seed(1)
model = mnn.Sequential(mnn.Linear(6, 64), mnn.Tanh(), mnn.Dropout(0.3), mnn.Linear(64, 1))
optimizer = optimizers.AdamW(optimizers.cosine_decay(0.01, 60))
def loss_function(model, x, y):
    return ((model(x) - y) ** 2).mean()
gradients = mnn.value_and_grad(model, loss_function)
{sync}
x, y = map(mx.array, some_data())
for bx, by in nc.shard((x, y), 4, epochs=3):
    loss, grads = gradients(model, bx, by)
    optimizer.update(model, grads)
    mx.eval(model.parameters(), optimizer.state)
    note(NAME, loss.item())
    sync.step(loss=loss, samples=len(bx))
    time.sleep(0.01)
sync.finish()
the_end(NAME, dict(tree_flatten(model.parameters())))
"""
EXTRA = 'extra={"scheduler": scheduler, "noise": noise}'
ADAM = "optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)"
AFTER = """scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
after = {"scheduler": scheduler, "average": average}"""
CASES = {
    "diloco": (TORCH, f"sync = nc.DiLoCo(model, every=5, optimizer=optimizer, {EXTRA}, name=NAME)"),
    "int8": (TORCH, f'sync = nc.DiLoCo(model, every=5, codec="int8", optimizer=optimizer, {EXTRA}, name=NAME)'),
    "sparse": (TORCH, f"sync = nc.SparseLoCo(model, every=5, optimizer=optimizer, {EXTRA}, name=NAME)"),
    "fragments": (TORCH, f"sync = nc.DiLoCo(model, every=6, fragments=2, optimizer=optimizer, {EXTRA}, name=NAME)"),
    "gradients": (GRADIENTS, f"{ADAM}\n{AFTER}\nsync = nc.DataParallel(model, optimizer, extra=after, name=NAME)"),
    "demo": (GRADIENTS, f"{ADAM}\n{AFTER}\nsync = nc.DeMo(model, lr=0.01, k=8, extra=after, name=NAME)"),
    "mlx": (MLX, "sync = nc.DiLoCo(model, every=5, optimizer=optimizer, name=NAME)"),
}


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(nodes=2) as cluster:
        run(cluster, SETUP)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    mend(shared)
    return shared


def losses(cluster: Cluster, name: str) -> dict[str, list[str]]:
    """What each node has noted."""
    found = {}
    for row in cluster.state().nodes:
        file = Path(f"{name}-{row.name}.txt")
        found[row.name] = file.read_text().splitlines() if file.exists() else []
    return found


@pytest.mark.parametrize("case", CASES)
def test_stop_in_the_middle_of_a_round_and_the_cell_again_is_as_if_nobody_had_stopped(
    cluster: Cluster, case: str
) -> None:
    if case == "mlx":
        pytest.importorskip("mlx.core")
    text, sync = CASES[case]
    cell = text.format(sync=sync)
    run(cluster, f"NAME = {case + '-whole'!r}\n" + cell)
    stopped = f"NAME = {case + '-stopped'!r}\n" + cell
    told = []
    for at in (13, 27, 43):
        told.append(stop_at(cluster, stopped, f"{case}-stopped", at))
    run(cluster, stopped)
    whole, again = losses(cluster, f"{case}-whole"), losses(cluster, f"{case}-stopped")
    for name, row in whole.items():
        first = next((at for at, pair in enumerate(zip(row, again[name], strict=False)) if pair[0] != pair[1]), None)
        assert (first, len(again[name])) == (None, 60), (name, first, whole[name], again[name], told)
    for name in whole:
        results = [json.loads(Path(f"{case}-{which}-{name}.json").read_text()) for which in ("whole", "stopped")]
        assert results[0] == results[1]


EPOCHS = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.3), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
sync = nc.DiLoCo(model, every=4, optimizer=optimizer, extra={"scheduler": scheduler}, name=NAME)
x, y = map(torch.from_numpy, some_data())
part, checked = nc.shard((x, y), 4), 0
for epoch in range(3):
    for bx, by in part:
        loss = nn.functional.mse_loss(model(bx), by)
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        note(NAME, loss)
        sync.step(loss=loss, samples=len(bx))
        time.sleep(0.01)
    scheduler.step()
    checked += sum(len(vx) for vx, vy in nc.shard((x[:30], y[:30]), 10))
sync.finish()
print("checked", checked)
the_end(NAME, {k: v.numpy() for k, v in model.state_dict().items()} | {"lr": scheduler.get_last_lr()})
"""


def stop_at(cluster: Cluster, cell: str, name: str, steps: int) -> str:
    """Run ``cell`` and stop it when a node has noted so many steps; what was printed."""
    slow = Path("slow-from")
    slow.write_text(str(steps))
    watcher = Watcher(cluster.execute(cell))
    wait_until(lambda: any(len(row) >= steps for row in losses(cluster, name).values()), what=f"step {steps}")
    cluster.interrupt()
    ended = watcher.wait_end()
    slow.unlink()
    assert ended.status == "interrupted", text_of(watcher.outputs)
    return text_of(watcher.outputs)


def test_epochs_in_a_loop_of_ones_own_go_on_and_what_is_not_training_is_done_again(cluster: Cluster) -> None:
    run(cluster, "NAME = 'epochs-whole'\n" + EPOCHS)
    cell = "NAME = 'epochs-stopped'\n" + EPOCHS
    stop_at(cluster, cell, "epochs-stopped", 27)  # in the second of three epochs
    printed = run(cluster, cell)
    assert losses(cluster, "epochs-whole") == losses(cluster, "epochs-stopped")
    for name, text in printed.items():
        assert "checked 45" in text  # 15 of 30 after each epoch: the first one's again
        results = [json.loads(Path(f"epochs-{which}-{name}.json").read_text()) for which in ("whole", "stopped")]
        assert results[0] == results[1]


def test_a_node_that_waits_in_its_round_before_another_loop_keeps_nobody_from_coming_there(cluster: Cluster) -> None:
    """The Stop finds one node in the wait of a round and the other a step before it. When the cell is run again, the
    first settles that round as the loop over the validation set begins, and the other needs to know where the first is
    in the loop that comes after."""
    run(cluster, "NAME = 'owes-whole'\n" + EPOCHS)
    cell = "NAME = 'owes'\n" + EPOCHS
    waits = """
        lines = lambda node: len(open(f"{NAME}-{node}.txt").readlines())
        if nc.rank() and lines("local-2") == 27:
            while lines("local") < 28: time.sleep(0.01)
            time.sleep(0.7)
        sync.step(loss"""
    watcher = Watcher(cluster.execute(cell.replace("\n        sync.step(loss", waits)))
    wait_until(lambda: len(losses(cluster, "owes")["local"]) >= 28, what="the first step of the round's end")
    cluster.interrupt()
    assert watcher.wait_end().status == "interrupted", text_of(watcher.outputs)
    run(cluster, cell)
    assert losses(cluster, "owes-whole") == losses(cluster, "owes")


FIXED = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr={rate})
sync = nc.DiLoCo(model, every=5, optimizer={optimizers}, name=NAME{more})
x, y = map(torch.from_numpy, some_data())
for step in range(sync.global_step, 30):
    at = 4 * (step % 20) + 80 * nc.rank()
    loss = nn.functional.mse_loss(model(x[at:at + 4]), y[at:at + 4])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    note(NAME, loss)
    sync.step(loss=loss, samples=4)
    time.sleep({pause})
sync.finish()
print("steps", sync.global_step, "samples", sync.samples, "rate", optimizer.param_groups[0]["lr"])
print("adam", {{int(state["step"]) for state in optimizer.state.values()}})
the_end(NAME, {{k: v.numpy() for k, v in model.state_dict().items()}})
"""


def told(cluster: Cluster) -> str:
    """What people were told so far."""
    return "\n".join(event.text for event in cluster.state().events)


def fixed(name: str, rate: float = 0.01, more: str = "", optimizers: str = "optimizer", pause: float = 0.01) -> str:
    return f"NAME = {name!r}\n" + FIXED.format(rate=rate, more=more, optimizers=optimizers, pause=pause)


def test_a_loop_over_steps_goes_on_at_global_step(cluster: Cluster) -> None:
    run(cluster, fixed("fixed-whole"))
    stop_at(cluster, fixed("fixed-stopped"), "fixed-stopped", 12)
    printed = run(cluster, fixed("fixed-stopped"))
    assert losses(cluster, "fixed-whole") == losses(cluster, "fixed-stopped")
    for text in printed.values():
        assert "steps 30 samples 120" in text
        assert "adam {30}" in text


def test_what_the_cell_sets_anew_counts_and_is_said(cluster: Cluster) -> None:
    stop_at(cluster, fixed("edited"), "edited", 12)
    printed = run(cluster, fixed("edited", rate=0.001))
    for text in printed.values():
        assert "rate 0.001" in text
        assert "adam {30}" in text
    assert "set anew by this cell: optimizer lr" in told(cluster)


def test_fresh_starts_over_after_a_stop(cluster: Cluster) -> None:
    stop_at(cluster, fixed("fresh"), "fresh", 12)
    printed = run(cluster, fixed("fresh", more=", fresh=True"))
    for text in printed.values():
        assert "steps 30" in text
        assert "adam {30}" in text
    assert all(len(row) > 40 for row in losses(cluster, "fresh").values())


def test_an_optimizer_that_was_not_registered_begins_anew_and_that_is_said(cluster: Cluster) -> None:
    stop_at(cluster, fixed("left-out", optimizers="None"), "left-out", 12)
    printed = run(cluster, fixed("left-out", optimizers="None"))
    for text in printed.values():
        assert "steps 30" in text
        assert "adam {30}" not in text
    assert "begin anew: optimizer= and extra= let them go on" in told(cluster)


def test_a_step_that_takes_long_is_not_waited_for_and_what_is_lost_is_said(cluster: Cluster) -> None:
    slow = fixed("slow").replace("    sync.step(", "    time.sleep(60 if step == 7 else 0)\n    sync.step(")
    watcher = Watcher(cluster.execute(slow))
    wait_until(lambda: all(len(row) >= 8 for row in losses(cluster, "slow").values()), what="the slow step")
    cluster.interrupt()
    assert watcher.wait_end().status == "interrupted"
    run(cluster, fixed("slow"))
    assert "goes on at round 1" in told(cluster)
    assert "in the middle of a step: 2 steps" in told(cluster)


def test_two_optimizers_go_on(cluster: Cluster) -> None:
    cell = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
first = torch.optim.Adam(model[0].parameters(), lr=0.01)
second = torch.optim.SGD(model[2].parameters(), lr=0.01, momentum=0.9)
sync = nc.DiLoCo(model, every=5, optimizer=[first, second], name=NAME)
x, y = map(torch.from_numpy, some_data())
for step in range(sync.global_step, 30):
    loss = nn.functional.mse_loss(model(x[step:step + 4]), y[step:step + 4])
    for optimizer in (first, second): optimizer.zero_grad()
    loss.backward()
    for optimizer in (first, second): optimizer.step()
    note(NAME, loss)
    sync.step(loss=loss, samples=4)
    time.sleep(0.01)
"""
    run(cluster, "NAME = 'two-whole'\n" + cell)
    stop_at(cluster, "NAME = 'two-stopped'\n" + cell, "two-stopped", 12)
    run(cluster, "NAME = 'two-stopped'\n" + cell)
    assert losses(cluster, "two-whole") == losses(cluster, "two-stopped")


def test_code_that_catches_the_stop_on_all_nodes_may_finish(cluster: Cluster) -> None:
    caught = fixed("caught").replace("for step in", "try:\n  for step in").replace("\n    ", "\n      ")
    caught = caught.replace("\nsync.finish()", "\nexcept KeyboardInterrupt:\n    print('caught')\nsync.finish()")
    watcher = Watcher(cluster.execute(caught))
    wait_until(lambda: any(len(row) >= 12 for row in losses(cluster, "caught").values()), what="step 12")
    cluster.interrupt()
    watcher.wait_end()
    assert watcher.text().count("caught") == 2
    texts = [Path(f"caught-{row.name}.json").read_text() for row in cluster.state().nodes]
    assert texts[0] == texts[1]


SLOW = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sync = nc.DiLoCo(model, every=5, optimizer=optimizer, name=NAME)
x, y = map(torch.from_numpy, some_data())
for step in range(sync.global_step, 20):
    at = 4 * (step % 20) + 80 * nc.rank()
    loss = nn.functional.mse_loss(model(x[at:at + 4]), y[at:at + 4])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    note(NAME, loss)
    if PAUSES and nc.rank() == 1: time.sleep(0.4)
    sync.step(loss=loss, samples=4)
sync.finish()
the_end(NAME, {k: v.numpy() for k, v in model.state_dict().items()})
"""


def test_a_stop_while_a_fast_node_waits_for_a_slow_one(cluster: Cluster) -> None:
    run(cluster, "NAME, PAUSES = 'slow-whole', False\n" + SLOW)
    watcher = Watcher(cluster.execute("NAME, PAUSES = 'slow-stopped', True\n" + SLOW))
    wait_until(lambda: sorted(map(len, losses(cluster, "slow-stopped").values())) == [7, 10], what="a node that waits")
    cluster.interrupt()
    assert watcher.wait_end().status == "interrupted"
    run(cluster, "NAME, PAUSES = 'slow-stopped', False\n" + SLOW)
    assert losses(cluster, "slow-whole") == losses(cluster, "slow-stopped")
    for row in cluster.state().nodes:
        texts = [Path(f"slow-{which}-{row.name}.json").read_text() for which in ("whole", "stopped")]
        assert texts[0] == texts[1]


def test_the_recipe(cluster: Cluster) -> None:
    ready = "inputs, targets = map(torch.from_numpy, some_data())\n"
    cell = recipe("Stop, and run the cell again")
    noted = cell.replace("    sync.step(", "    note(NAME, loss)\n    time.sleep(0.01)\n    sync.step(")
    named = noted.replace("every=10,", "every=10, name=NAME,")
    run(cluster, f"NAME = 'recipe-whole'\n{ready}{named}")
    stopped = f"NAME = 'recipe-stopped'\n{ready}{named}"
    stop_at(cluster, stopped, "recipe-stopped", 25)
    run(cluster, stopped)
    assert losses(cluster, "recipe-whole") == losses(cluster, "recipe-stopped")


def test_the_recipe_of_a_checkpoint(cluster: Cluster) -> None:
    import torch

    import notebook_cluster

    ready = "inputs, targets = map(torch.from_numpy, some_data())\n"
    run(cluster, f"{ready}{recipe('Stop, and run the cell again')}\nsync.checkpoint('digits')")
    folder = max(Path.cwd().rglob("digits/round-*")).parent.parent
    scope = {"nc": notebook_cluster, "torch": torch}
    cell = recipe("A checkpoint in plain PyTorch")
    exec(cell.replace('directory="checkpoints"', f"directory={str(folder)!r}"), scope)
    printed = run(cluster, "print(model[0].weight.sum().item())")
    assert {float(text) for text in printed.values()} == {scope["model"][0].weight.sum().item()}


MADE = """
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.3), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
x, y = map(torch.from_numpy, some_data())
"""
SYNC = "sync = nc.DiLoCo(model, every=5, optimizer=optimizer, name=NAME, fresh={fresh})\n"
LOOP = """
for bx, by in nc.shard((x, y), 4, epochs=2):
    loss = nn.functional.mse_loss(model(bx), by)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    note(NAME, loss)
    sync.step(loss=loss, samples=len(bx))
    time.sleep(0.01)
sync.finish()
the_end(NAME, {k: v.numpy() for k, v in model.state_dict().items()})
"""


def ends(cluster: Cluster, *names: str) -> list[set[str]]:
    """What each node had in the end under each of these names."""
    return [{Path(f"{name}-{row.name}.json").read_text() for name in names} for row in cluster.state().nodes]


def test_a_sync_object_of_an_earlier_cell_goes_on(cluster: Cluster) -> None:
    for name in ("earlier-whole", "earlier-stopped"):
        run(cluster, f"NAME = {name!r}\n{MADE}{SYNC.format(fresh=False)}")
        if name.endswith("stopped"):
            for at in (13, 27):
                stop_at(cluster, LOOP, name, at)
        run(cluster, LOOP)
    assert losses(cluster, "earlier-whole") == losses(cluster, "earlier-stopped")
    assert all(len(texts) == 1 for texts in ends(cluster, "earlier-whole", "earlier-stopped"))
    assert told(cluster).count("'earlier-stopped' goes on where it was stopped") == 2


def test_two_sync_objects_of_one_cell_go_on_together(cluster: Cluster) -> None:
    cell = f"""{MADE}
other = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 1))
second = torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9)
one = nc.DiLoCo(model, every=5, optimizer=optimizer, name=NAME)
two = nc.LocalSGD(other, every=3, optimizer=second, name=NAME + "-two")
for bx, by in nc.shard((x, y), 4, epochs=2):
    for sync, net, stepped in ((one, model, optimizer), (two, other, second)):
        loss = nn.functional.mse_loss(net(bx), by)
        stepped.zero_grad(); loss.backward(); stepped.step()
        note(NAME, loss)
        sync.step(loss=loss, samples=len(bx))
        time.sleep(0.01)
one.finish(); two.finish()
the_end(NAME, {{k: v.numpy() for net in (model, other) for k, v in net.state_dict().items()}})
"""
    run(cluster, f"NAME = 'gan-whole'\n{cell}")
    stop_at(cluster, f"NAME = 'gan-stopped'\n{cell}", "gan-stopped", 27)
    run(cluster, f"NAME = 'gan-stopped'\n{cell}")
    assert losses(cluster, "gan-whole") == losses(cluster, "gan-stopped")
    assert all(len(texts) == 1 for texts in ends(cluster, "gan-whole", "gan-stopped"))


def test_the_rates_of_an_optimizer_of_an_earlier_cell_go_on(cluster: Cluster) -> None:
    cell = """
rates = torch.optim.lr_scheduler
scheduler = rates.SequentialLR(
    optimizer, [rates.LinearLR(optimizer, 0.1, total_iters=8), rates.CosineAnnealingLR(optimizer, 40)], [8]
)
sync = nc.DiLoCo(model, every=5, optimizer=optimizer, extra={"scheduler": scheduler}, name=NAME)
for bx, by in nc.shard((x, y), 4, epochs=2):
    loss = nn.functional.mse_loss(model(bx), by)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    scheduler.step()
    note(NAME, scheduler.get_last_lr()[0])
    sync.step(loss=loss, samples=len(bx))
    time.sleep(0.01)
"""
    for name in ("rates-whole", "rates-stopped"):
        run(cluster, f"NAME = {name!r}\n{MADE}")
        if name.endswith("stopped"):
            stop_at(cluster, cell, name, 15)
        run(cluster, cell)
    assert losses(cluster, "rates-whole") == losses(cluster, "rates-stopped")


def test_an_error_before_the_first_step_loses_nothing(cluster: Cluster) -> None:
    cell = MADE + SYNC.format(fresh=False) + LOOP
    run(cluster, f"NAME = 'typo-whole'\n{cell}")
    stop_at(cluster, f"NAME = 'typo'\n{cell}", "typo", 13)
    wrong = cell.replace("for bx, by in", "no_such_name\nfor bx, by in")
    assert cluster.run(f"NAME = 'typo'\n{wrong}")[0].status == "error"
    run(cluster, f"NAME = 'typo'\n{cell}")
    assert losses(cluster, "typo-whole") == losses(cluster, "typo")


def test_a_run_that_was_finished_after_a_caught_stop_is_over(cluster: Cluster) -> None:
    cell = MADE + SYNC.format(fresh=False) + LOOP
    caught = cell.replace("\nfor bx", "\ntry:\n  for bx").replace("\n    ", "\n      ")
    caught = caught.replace("\nsync.finish()", "\nexcept KeyboardInterrupt:\n    pass\nsync.finish()")
    watcher = Watcher(cluster.execute(f"NAME = 'over'\n{caught}"))
    wait_until(lambda: any(len(row) >= 13 for row in losses(cluster, "over").values()), what="step 13")
    cluster.interrupt()
    watcher.wait_end()
    before = {name: len(row) for name, row in losses(cluster, "over").items()}
    run(cluster, f"NAME = 'over'\n{cell}")
    assert {name: len(row) - before[name] for name, row in losses(cluster, "over").items()} == dict.fromkeys(before, 40)


def test_other_data_begin_anew_and_that_is_said(cluster: Cluster) -> None:
    cell = MADE + SYNC.format(fresh=False) + LOOP
    stop_at(cluster, f"NAME = 'other-data'\n{cell}", "other-data", 13)
    watcher = Watcher(cluster.execute(f"NAME = 'other-data'\n{cell.replace('(x, y), 4', '(x[:120], y[:120]), 4')}"))
    assert watcher.wait_end().status == "ok"
    assert "a loop over 160 elements that was stopped did not go on" in watcher.text()


def test_nodes_that_are_in_different_epochs_go_on(cluster: Cluster) -> None:
    """The one with the larger batches has read through its part more often."""
    cell = MADE + SYNC.format(fresh=False) + LOOP.replace("4, epochs=2", "2 + 6 * rank, epochs=3")
    cell = cell.replace("note(NAME, loss)", "note(NAME, loss); seen = globals().get('seen', 0) + len(bx)")
    run(cluster, f"NAME, seen = 'uneven-whole', 0\n{cell}")
    stop_at(cluster, f"NAME = 'uneven-stopped'\n{cell}", "uneven-stopped", 17)
    run(cluster, f"NAME = 'uneven-stopped'\n{cell}")
    assert losses(cluster, "uneven-whole") == losses(cluster, "uneven-stopped")


def test_a_module_in_extra_keeps_parameters_of_one_element() -> None:
    import torch

    from notebook_cluster.training.loop.stopped_run import RegisteredObjects, StoppedRun

    trained = torch.nn.Linear(6, 1)
    objects = RegisteredObjects([], {"ema": trained})
    torch.nn.init.constant_(trained.bias, 7.0)
    states, settings = objects.keep()
    stopped = StoppedRun("", 1, "", 1, 1.0, None, None, (object, 1), 0, False, states, settings, {}, None)
    again = torch.nn.Linear(6, 1)
    names, edited, warnings = RegisteredObjects([], {"ema": again}).go_on(stopped)
    assert (names, edited, warnings) == (["ema"], [], [])
    assert again.bias.item() == 7.0


def test_a_later_turn_of_a_loop_over_settings_is_stopped_between_two_steps(cluster: Cluster) -> None:
    """The sync objects of the turns before, which are finished, have taken other numbers of steps."""
    turn = (SYNC.format(fresh="turn < 2") + LOOP).replace("epochs=2", "epochs=1 + turn").replace("\n", "\n    ")
    cell = f"{MADE}\nfor turn in range(3):\n    {turn}"
    stop_at(cluster, f"NAME = 'turns'\n{cell}", "turns", 75)
    run(cluster, f"NAME = 'turns'\n{MADE}{SYNC.format(fresh=False)}")
    assert "'turns' goes on where it was stopped" in told(cluster)


def test_an_error_before_the_loop_does_not_speak_of_other_data(cluster: Cluster) -> None:
    cell = MADE + SYNC.format(fresh=False) + LOOP
    stop_at(cluster, f"NAME = 'quiet'\n{cell}", "quiet", 13)
    ended, outputs = cluster.run(f"NAME = 'quiet'\n{MADE}{SYNC.format(fresh=False)}no_such_name")
    assert ended.status == "error"
    assert "did not go on" not in text_of(outputs)
