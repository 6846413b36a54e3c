"""``nc.transformers.SyncCallback`` in the Trainer of Hugging Face, on two nodes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import Watcher, mend, run, shared_cluster, text_of
from tests.conftest import wait_until
from tests.practice.loops import ON_NODES, assert_expected, examples, facts_of, trained
from tests.practice.recipes import recipe

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TRAINERS = """
import glob, os, shutil
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
def a_trainer(every=3, callbacks=(), data=None, count=40, strategy=None, settings={}, **more):
    seen.clear()
    plain = dict(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=2, logging_steps=1, save_strategy="no",
        report_to=[], use_cpu=True, learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0,
        disable_tqdm=True, optim="sgd",
    )
    global callback
    callback = nc.transformers.SyncCallback(every, strategy=strategy, **settings)
    return Trainer(
        model=Model(), args=TrainingArguments(**{**plain, **more}), eval_dataset=Examples(8, seed=2),
        train_dataset=nc.transformers.shard(Examples(count)) if data is None else data,
        callbacks=[callback, *callbacks],
    )
def said_of(trainer, **more):
    say(seen=seen, theta=flat(trainer.model), steps=trainer.state.global_step, round=callback.sync.round, **more)
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


def test_each_node_trains_on_its_part_and_the_model_is_that_of_diloco(cluster: Cluster) -> None:
    facts = trained(
        cluster,
        "trainer = a_trainer(lr_scheduler_type='linear', learning_rate=0.0); result = trainer.train()\n"
        "rates = [row['learning_rate'] for row in trainer.state.log_history if 'learning_rate' in row]\n"
        "trainer = a_trainer(); trainer.train(); said_of(trainer, planned=trainer.state.max_steps)",
    )
    assert_expected(facts, count=40, every=3, lr=0.1)
    seen = {name: [examples(said["seen"][:5]), examples(said["seen"][5:])] for name, said in facts.items()}
    for epoch in (0, 1):
        assert sorted(seen["local"][epoch] + seen["local-2"][epoch]) == list(range(40))
    assert set(seen["local"][0]) != set(seen["local"][1])
    assert {(said["steps"], said["planned"], said["round"]) for said in facts.values()} == {(10, 10, 4)}


@pytest.mark.parametrize(("strategy", "momentum"), [("LocalSGD", 0.0), ("DiLoCo", 0.9)])
def test_max_steps_and_accumulated_gradients_count_steps_of_the_optimizer(
    cluster: Cluster, strategy: str, momentum: float
) -> None:
    facts = trained(
        cluster,
        f"trainer = a_trainer(every=2, strategy=nc.{strategy}, max_steps=3, gradient_accumulation_steps=2)\n"
        "trainer.train(); said_of(trainer)",
    )
    assert_expected(facts, count=40, every=2, lr=0.1, accumulate=2, momentum=momentum)
    assert {(said["steps"], said["round"], len(said["seen"])) for said in facts.values()} == {
        (3, 2, 5)
    }  # 5 batches an epoch


def test_the_schedule_of_the_learning_rate_ends_with_the_part_of_the_node(cluster: Cluster) -> None:
    facts = trained(
        cluster,
        "trainer = a_trainer(lr_scheduler_type='linear', num_train_epochs=1); trainer.train()\n"
        "said_of(trainer, rates=[row['learning_rate'] for row in trainer.state.log_history if 'grad_norm' in row])",
    )
    assert facts["local"]["rates"] == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02])


def test_a_node_with_fewer_batches_waits_and_all_end_with_one_model(cluster: Cluster) -> None:
    facts = trained(
        cluster,
        "trainer = a_trainer(data=torch.utils.data.Subset(Examples(40), range(24) if rank == 0 else range(24, 36)))\n"
        "trainer.train(); said_of(trainer)",
    )
    assert {name: said["steps"] for name, said in facts.items()} == {"local": 12, "local-2": 6}
    assert_expected(facts, count=40, every=3, lr=0.1)


def test_a_node_that_stops_early_says_so_and_stops_all_after_their_next_round(cluster: Cluster) -> None:
    source = """
class StopsAt(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = rank == 1 and state.global_step == 4 or control.should_training_stop
trainer = a_trainer(callbacks=[StopsAt()]); trainer.train(); said_of(trainer)
"""
    said = run(cluster, source)
    facts = facts_of(said)
    assert facts["local"]["theta"] == facts["local-2"]["theta"]
    assert {name: said["steps"] for name, said in facts.items()} == {"local": 6, "local-2": 4}
    assert_expected(facts, count=40, every=3, lr=0.1)
    assert "'local-2' stops early; the others stop after their next round, too" in said["local-2"]
    assert "stops early" not in said["local"]


@pytest.mark.parametrize("when", ["steps", "epoch"])
def test_evaluation_is_of_the_global_model_so_early_stopping_and_the_best_model_are_those_of_all(
    cluster: Cluster, when: str
) -> None:
    facts = trained(
        cluster,
        f"when = {when!r}"
        """
shutil.rmtree(os.path.join("best", nc.node()), ignore_errors=True)
trainer = a_trainer(
    every=2, output_dir="best", callbacks=[EarlyStoppingCallback(2)], num_train_epochs=20, learning_rate=0.5,
    eval_strategy=when, eval_steps=3, save_strategy=when, save_steps=3, load_best_model_at_end=True,
)
trainer.train()
losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
said_of(trainer, losses=losses, again=trainer.evaluate()["eval_loss"])
""",
    )
    local, other = facts["local"], facts["local-2"]
    assert local["losses"] == other["losses"]
    assert local["steps"] == other["steps"] < 100
    assert local["again"] == other["again"] == min(local["losses"])
    assert local["losses"][-1] != min(local["losses"])


def test_metrics_are_shown_the_losses_as_logged_and_the_evaluation_of_the_global_model(cluster: Cluster) -> None:
    facts = trained(
        cluster,
        "trainer = a_trainer(every=5, settings={'name': 'shown'}, eval_strategy='steps', eval_steps=5, max_steps=5)\n"
        "trainer.train(); said_of(trainer, loss=trainer.evaluate()['eval_loss'])",
    )
    wanted = {(node, "loss") for node in ("local", "local-2", "")}  # the last is that of the global model
    wait_until(lambda: wanted <= {(row.node, row.name) for row in cluster.series() if row.job == "shown"})
    curves = {(row.node, row.name): row for row in cluster.series() if row.job == "shown"}
    assert curves["local", "loss"].step == curves["local-2", "loss"].step == [1, 2, 3, 4, 5]
    assert curves["", "loss"].value == [pytest.approx(facts["local"]["loss"])]
    assert {"learning_rate", "grad_norm"} <= {row.name for row in cluster.series() if row.node == "local"}


RESUMED = """
def a_long_one(**more):
    return a_trainer(
        every=2, optim="adamw_torch", learning_rate=0.01, lr_scheduler_type="cosine", output_dir="kept", save_steps=4,
        save_strategy="steps", save_total_limit=2, num_train_epochs=2, **more,
    )
class Interrupt(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise KeyboardInterrupt
def files_of(pattern):
    import hashlib
    paths = sorted(glob.glob(pattern))
    return {os.path.basename(path): hashlib.sha256(open(path, "rb").read()).hexdigest() for path in paths}
"""


def test_a_stopped_training_goes_on_from_the_trainers_checkpoint_as_if_nothing_had_been(cluster: Cluster) -> None:
    run(cluster, RESUMED)
    whole = trained(cluster, "trainer = a_long_one(); trainer.train(); said_of(trainer)")
    run(cluster, "shutil.rmtree(os.path.join('kept', nc.node()))")
    ended, outputs = cluster.run("trainer = a_long_one(callbacks=[Interrupt()]); trainer.train()")
    assert ended.status == "interrupted", text_of(outputs)
    source = """
trainer = a_long_one(); trainer.train(resume_from_checkpoint=True)
trainer.save_model(os.path.join("end", nc.node()))
ends = files_of(os.path.join("end", nc.node(), "*.safetensors"))
said_of(trainer, ends=ends, there=sorted(os.listdir(trainer.args.output_dir)),
        momentum=files_of(os.path.join(trainer.args.output_dir, "checkpoint-8", "outer_momentum.safetensors")))
"""
    resumed = trained(cluster, source)
    assert {len(said["seen"]) for said in resumed.values()} == {6}
    assert resumed["local"]["theta"] == whole["local"]["theta"]
    assert resumed["local"]["ends"] == resumed["local-2"]["ends"] != {}
    assert resumed["local"]["momentum"] == resumed["local-2"]["momentum"] != {}
    assert resumed["local"]["there"] == ["checkpoint-10", "checkpoint-8"]


def test_nodes_that_resume_from_unlike_steps_are_named(cluster: Cluster) -> None:
    run(cluster, RESUMED + "trainer = a_long_one(); trainer.train()")
    source = """
trainer = a_long_one()
trainer.train(resume_from_checkpoint=os.path.join("kept", nc.node(), f"checkpoint-{(8, 10)[rank]}"))
"""
    for text in refused(cluster, source, "ValueError"):
        assert "'local' from step 8, 'local-2' from step 10: resume from the same step on all" in text


def refused(cluster: Cluster, source: str, error: str) -> list[str]:
    """What the nodes raise in ``source``: all of them ``error``, in one line."""
    ended, outputs = cluster.run(source)
    assert {result.error_name for result in ended.results.values()} == {error}, text_of(outputs)
    assert not any("\n" in result.error_value for result in ended.results.values())
    return [result.error_value for result in ended.results.values()]


def test_data_that_nobody_divided_is_named(cluster: Cluster) -> None:
    for text in refused(cluster, "trainer = a_trainer(data=Examples(40)); trainer.train()", "ValueError"):
        assert "'local' and 'local-2' were given the same data" in text
        assert "pass train_dataset=nc.transformers.shard(dataset), or check_data=False" in text
    ran = run(
        cluster, "trainer = a_trainer(data=Examples(40), settings={'check_data': False}, max_steps=1); trainer.train()"
    )
    assert set(ran) == {"local", "local-2"}


def test_looking_at_the_data_changes_no_random_number(cluster: Cluster) -> None:
    source = """
import random, numpy
class Noisy(Examples):
    def __getitem__(self, at):
        item = super().__getitem__(at)
        return {**item, "x": item["x"] + torch.randn(8) + random.random() + numpy.random.rand()}
draws = []
for look in (True, False):
    torch.manual_seed(5); random.seed(5); numpy.random.seed(5)
    if look:
        from notebook_cluster.integrations.same_data import digest_of
        assert digest_of(Noisy(4)) != digest_of(Examples(4)) == digest_of(Examples(4)) != digest_of(Examples(5))
    draws.append([torch.rand(1).item(), random.random(), numpy.random.rand()])
say(draws=draws)
"""
    for said in facts_of(run(cluster, source)).values():
        assert said["draws"][0] == said["draws"][1]


def test_streams_are_divided_by_element(cluster: Cluster) -> None:
    source = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        examples = Examples(40)
        return (examples[at] for at in range(40))
trainer = a_trainer(data=nc.transformers.shard(Stream()), max_steps=5); trainer.train(); said_of(trainer)
"""
    facts = trained(cluster, source)
    assert examples(facts["local"]["seen"]) == list(range(0, 40, 2))
    assert examples(facts["local-2"]["seen"]) == list(range(1, 40, 2))
    assert_expected(facts, count=40, every=3, lr=0.1)
    for text in refused(cluster, "trainer = a_trainer(data=Stream(), max_steps=5); trainer.train()", "ValueError"):
        assert "no length: pass train_dataset=nc.transformers.shard(dataset)" in text


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("strategy=nc.DataParallel", "TypeError", "strategy=DataParallel: use nc.DiLoCo, nc.LocalSGD or nc.SparseLoCo"),
        ("codecs='int8'", "TypeError", "codecs= is no setting of DiLoCo: it has name,"),
        ("every=0", "ValueError", "every=0: use a whole number of steps from 1"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named_when_the_callback_is_made(
    cluster: Cluster, source: str, error: str, text: str
) -> None:
    arguments = source if source.startswith("every") else f"every=5, {source}"
    for said in refused(cluster, f"nc.transformers.SyncCallback({arguments})", error):
        assert text in said


def test_a_stop_in_the_middle_ends_the_cell_and_the_next_one_trains(cluster: Cluster) -> None:
    watcher = Watcher(cluster.execute("trainer = a_trainer(num_train_epochs=100000); trainer.train()"))
    for name in ("local", "local-2"):
        watcher.wait_for("'loss'", name)
    cluster.interrupt()
    assert watcher.wait_end(30).status == "interrupted"
    facts = trained(cluster, "trainer = a_trainer(max_steps=4); trainer.train(); said_of(trainer)")
    assert_expected(facts, count=40, every=3, lr=0.1)


def test_the_recipe_runs(cluster: Cluster) -> None:
    cell = recipe("Transformers: Trainer").removeprefix("%%on_all\n")
    run(cluster, "model, train_set, eval_set = Model(), Examples(3200), Examples(8, seed=2); seen.clear()")
    facts = trained(cluster, cell + "\nsay(theta=flat(model), steps=trainer.state.global_step)")
    assert {said["steps"] for said in facts.values()} == {400}
    for name in ("local", "local-2"):
        folder = Path("runs", name, "checkpoint-400")
        assert json.loads((folder / "trainer_state.json").read_text())["global_step"] == 400
        assert (folder / "outer_momentum.safetensors").is_file()
