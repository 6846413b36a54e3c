"""``nc.lightning.SyncCallback`` in Lightning's Trainer, on two nodes."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, mend, run, shared_cluster, text_of
from tests.conftest import wait_until
from tests.practice.loops import ON_NODES, assert_expected, examples, facts_of, trained
from tests.practice.recipes import recipe

pytest.importorskip("lightning")

TRAINERS = """
import hashlib, os, shutil, warnings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader
warnings.filterwarnings("ignore", module="lightning")
class Module(LightningModule):
    def __init__(self, lr=0.1, adam=False):
        super().__init__()
        self.lr, self.adam, self.model = lr, adam, Model()
    def training_step(self, batch, at):
        return self.model(**batch)["loss"]
    def validation_step(self, batch, at):
        self.log("val_loss", self.model(**batch)["loss"])
    def configure_optimizers(self):
        if not self.adam:
            return torch.optim.SGD(self.parameters(), lr=self.lr)
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]
def loader(count=40, **more):
    return DataLoader(Examples(count), batch_size=4, **more)
def validation():
    return DataLoader(Examples(8, seed=2), batch_size=8)
def a_trainer(every=3, callbacks=(), settings={}, **more):
    seen.clear()
    global callback
    callback = nc.lightning.SyncCallback(every, **settings)
    plain = dict(
        max_epochs=2, devices=1, accelerator="cpu", default_root_dir=nc.node(), logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
    )
    return Trainer(**{**plain, **more}, callbacks=[callback, *callbacks])
def said_of(module, trainer, **more):
    say(seen=seen, theta=flat(module), steps=trainer.global_step, round=callback.sync.round, **more)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=2) as cluster:
        run(cluster, ON_NODES + TRAINERS)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """That of all tests: libraries take seconds to load."""
    yield shared
    mend(shared)


FIT = "module = Module(); trainer.fit(module, nc.shard(loader())); said_of(module, trainer)"


def test_each_node_trains_on_its_part_and_the_model_is_that_of_diloco(cluster: Cluster) -> None:
    facts = trained(cluster, "trainer = a_trainer(); " + FIT)
    assert_expected(facts, count=40, every=3, lr=0.1)
    for epoch in (slice(0, 5), slice(5, 10)):
        assert sorted(number for said in facts.values() for number in examples(said["seen"][epoch])) == list(range(40))
    assert {(said["steps"], said["round"]) for said in facts.values()} == {(10, 4)}


def test_max_steps_and_accumulated_gradients_count_steps_of_the_optimizer(cluster: Cluster) -> None:
    facts = trained(
        cluster,
        "trainer = a_trainer(every=2, max_steps=3, accumulate_grad_batches=2, settings={'strategy': nc.LocalSGD})\n"
        "module = Module(); trainer.fit(module, nc.shard(loader(48))); said_of(module, trainer)",
    )
    assert_expected(facts, count=48, every=2, lr=0.1, accumulate=2, momentum=0.0)
    assert {(said["steps"], said["round"], len(said["seen"])) for said in facts.values()} == {(3, 2, 6)}


def test_a_node_that_stops_early_stops_all_in_whatever_epoch_they_are(cluster: Cluster) -> None:
    """Ten batches are an epoch on one node, two on the other. And once more, in the same cell."""
    source = """
class StopsAt(Callback):
    def __init__(self, node, step):
        self.node, self.step = node, step
    def on_train_batch_end(self, trainer, module, *rest):
        trainer.should_stop = trainer.should_stop or rank == self.node and trainer.global_step == self.step
def fit(node, step):
    trainer = a_trainer(callbacks=[StopsAt(node, step)], max_epochs=9)
    module = Module(); trainer.fit(module, nc.shard(DataLoader(Examples(40), batch_size=2 if rank == 0 else 10)))
    return [flat(module), trainer.global_step, trainer.current_epoch, callback.sync.round]
say(fits=[fit(1, 5), fit(0, 8)])
"""
    said = run(cluster, source)
    facts = facts_of(said)
    (first, second), (first_2, second_2) = facts["local"]["fits"], facts["local-2"]["fits"]
    assert first[0] == first_2[0]
    assert second[0] == second_2[0]
    assert [first[1:], first_2[1:]] == [[6, 1, 2], [5, 3, 2]]  # steps, epochs begun, rounds
    assert [second[1:], second_2[1:]] == [[8, 1, 3], [9, 5, 3]]
    for name, other in (("local", "local-2"), ("local-2", "local")):
        assert said[name].count(f"{name!r} stops early; the others stop after their next round, too") == 1
        assert f"{other!r} stops early" not in said[name]


def test_a_node_with_less_data_waits_for_the_others(cluster: Cluster) -> None:
    source = "data = torch.utils.data.Subset(Examples(40), range(24) if rank == 0 else range(24, 36))\n"
    source += "module = Module(); trainer = a_trainer(); trainer.fit(module, DataLoader(data, batch_size=4))\n"
    facts = trained(cluster, source + "said_of(module, trainer)")
    assert {name: said["steps"] for name, said in facts.items()} == {"local": 12, "local-2": 6}
    assert_expected(facts, count=40, every=3, lr=0.1)


def test_validation_is_of_the_global_model_so_early_stopping_and_the_best_checkpoint_are_those_of_all(
    cluster: Cluster,
) -> None:
    facts = trained(
        cluster,
        """
class Keeps(Callback):
    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            losses.append(trainer.callback_metrics["val_loss"].item())
losses = []
best = ModelCheckpoint(os.path.join(nc.node(), "best"), monitor="val_loss")
trainer = a_trainer(
    every=2, callbacks=[EarlyStopping("val_loss", patience=2), best, Keeps()], max_epochs=20, val_check_interval=3,
    enable_checkpointing=True, settings={"name": "validated"},
)
module = Module(lr=0.5); trainer.fit(module, nc.shard(loader()), validation())
saved = Module(); saved.load_state_dict(torch.load(best.best_model_path, weights_only=False)["state_dict"])
saved.eval()
(batch,) = validation()
again = saved.model(**batch)["loss"].item()
said_of(module, trainer, losses=losses, again=again, score=best.best_model_score.item(), best=flat(saved))
""",
    )
    local, other = facts["local"], facts["local-2"]
    assert local["losses"] == other["losses"]
    assert local["steps"] == other["steps"] < 100
    assert local["again"] == pytest.approx(min(local["losses"]), rel=1e-6)
    assert local["score"] == min(local["losses"]) != local["losses"][-1]
    assert local["best"] == other["best"]
    wanted = {(node, "loss") for node in ("local", "local-2", "")}  # the last is that of the global model
    wait_until(lambda: wanted <= {(row.node, row.name) for row in cluster.series() if row.job == "validated"})
    (measured,) = [row for row in cluster.series() if (row.node, row.name, row.job) == ("", "loss", "validated")]
    assert measured.value == pytest.approx(local["losses"])


RESUMED = """
class Interrupt(Callback):
    def on_train_batch_end(self, trainer, module, *rest):
        if trainer.global_step == 6:
            raise KeyboardInterrupt
def a_long_one(every=2, callbacks=()):
    keep = ModelCheckpoint(os.path.join(nc.node(), "kept"), every_n_train_steps=5, save_last=True, save_top_k=-1)
    return a_trainer(every, callbacks=[keep, *callbacks], enable_checkpointing=True, max_epochs=2)
def data():
    return DataLoader(torch.utils.data.Subset(Examples(40), range(rank, 40, 2)), batch_size=4)
"""


@pytest.mark.parametrize("every", [5, 2])
def test_a_stopped_training_goes_on_from_the_trainers_checkpoint(cluster: Cluster, every: int) -> None:
    run(cluster, RESUMED + "shutil.rmtree(os.path.join(nc.node(), 'kept'), ignore_errors=True)")
    whole = trained(
        cluster,
        f"module = Module(0.01, adam=True); trainer = a_long_one({every}); trainer.fit(module, data())\n"
        "said_of(module, trainer)",
    )
    run(cluster, "shutil.rmtree(os.path.join(nc.node(), 'kept'))")
    module = "module = Module(0.01, adam=True)\n"
    ended, outputs = cluster.run(module + f"trainer = a_long_one({every}, [Interrupt()]); trainer.fit(module, data())")
    assert ended.status == "interrupted", text_of(outputs)
    assert "SystemExit" not in text_of(outputs)
    resumed = trained(
        cluster,
        module + f"trainer = a_long_one({every}); trainer.fit(module, data(), ckpt_path='last')\n"
        "saved = torch.load(os.path.join(nc.node(), 'kept', 'last.ckpt'), weights_only=False)['state_dict']\n"
        "digest = hashlib.sha256(b''.join(value.numpy().tobytes() for value in saved.values())).hexdigest()\n"
        "said_of(module, trainer, saved=digest)",
    )
    assert {(said["steps"], len(said["seen"])) for said in resumed.values()} == {(10, 5)}
    assert resumed["local"]["saved"] == resumed["local-2"]["saved"]
    if every == 5:  # a checkpoint in the middle of a round has the global model after the last one
        assert resumed["local"]["theta"] == whole["local"]["theta"]


def test_a_stop_before_the_callback_is_set_up_is_a_stop(cluster: Cluster) -> None:
    source = """
    class Early(Callback):
        def setup(self, trainer, module, stage):
            raise KeyboardInterrupt
    trainer = a_trainer()
    trainer.callbacks.insert(0, Early())
    trainer.fit(Module(), nc.shard(loader()))
    """
    ended, outputs = cluster.run(textwrap.dedent(source))
    assert {result.status for result in ended.results.values()} == {"interrupted"}, text_of(outputs)
    assert "TypeError" not in text_of(outputs)
    assert "SystemExit" not in text_of(outputs)


def test_a_stop_is_a_stop_and_the_next_one_too(cluster: Cluster) -> None:
    for _ in range(2):
        source = "trainer = a_trainer(max_epochs=-1); module = Module(); print('in', flush=True)\n"
        watcher = Watcher(cluster.execute(source + "trainer.fit(module, nc.shard(loader()))"))
        for name in ("local", "local-2"):
            watcher.wait_for("in", name)
        cluster.interrupt()
        ended = watcher.wait_end(30)
        assert ended.status == "interrupted", watcher.text()
        assert {result.status for result in ended.results.values()} == {"interrupted"}, watcher.text()
        assert "SystemExit" not in watcher.text()
    assert_expected(trained(cluster, "trainer = a_trainer(); " + FIT), count=40, every=3, lr=0.1)


def refused(cluster: Cluster, source: str) -> list[str]:
    """What the nodes raise in ``source``: all of them a ValueError, in one line."""
    ended, outputs = cluster.run(source)
    assert {result.error_name for result in ended.results.values()} == {"ValueError"}, text_of(outputs)
    assert not any("\n" in result.error_value for result in ended.results.values())
    return [result.error_value for result in ended.results.values()]


def test_data_that_nobody_divided_and_folders_of_all_are_named(cluster: Cluster) -> None:
    for text in refused(cluster, "trainer = a_trainer(); trainer.fit(Module(), loader())"):
        assert "'local' and 'local-2' were given the same data" in text
        assert "pass nc.shard(loader) to fit(), or check_data=False" in text
    source = "trainer = a_trainer(default_root_dir='here', enable_checkpointing=True); trainer.fit(Module(), loader())"
    for text in refused(cluster, source):
        assert "'here'" in text
        assert "pass default_root_dir=nc.node() to the Trainer" in text
    assert not Path("here").exists()
    source = """
folder = f"best-{nc.node()}"
trainer = a_trainer(enable_checkpointing=True, callbacks=[ModelCheckpoint(dirpath=folder)], max_steps=1)
module = Module(); trainer.fit(module, nc.shard(loader())); said_of(module, trainer, kept=os.listdir(folder))
"""
    assert all(said["kept"] for said in trained(cluster, source).values())


def test_the_recipe_runs(cluster: Cluster) -> None:
    run(cluster, "model, train_loader, val_loader = Module(), loader(800), validation(); seen.clear()")
    cell = recipe("Lightning").removeprefix("%%on_all\n").replace("Trainer(\n", "Trainer(\n    accelerator='cpu',\n")
    facts = trained(cluster, cell + "\nsay(theta=flat(model), steps=trainer.global_step)")
    assert {said["steps"] for said in facts.values()} == {200}
    for name in ("local", "local-2"):
        assert list(Path(name).glob("**/checkpoints/*.ckpt"))
