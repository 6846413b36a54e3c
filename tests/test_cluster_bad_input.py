"""What people get wrong in training cells, on a real cluster: one line that names it and the way out; nothing hangs."""

from collections.abc import Iterator

import pytest

from notebook_cluster.client import Cluster
from tests.cluster import run, running_cluster, text_of
from tests.conftest import shared_folders
from tests.training_cells import SETUP, commits, counted, job

NODES = ["local", "local-2", "local-3"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    """Three nodes for all tests of this file, each of which trains a job of its own name."""
    with shared_folders() as root, running_cluster(local=3, directory=str(root)) as cluster:
        run(cluster, SETUP)
        yield cluster


def test_a_node_with_another_shape_is_named_and_the_others_train(shared: Cluster) -> None:
    ended, outputs = shared.run("""
sync = nc.DiLoCo(make_model(100 + (rank == 1)), every=2, name="shapes")
for _ in range(4):
    sync.step()
print("trained", sync.round)
""")
    assert ended.results["local-2"].error_name == "TrainingError"
    assert ended.results["local-2"].error_value == (
        "model of 'local-2' has 'weight' 101 float32, 'local' (rank 0) has 'weight' 100 float32: "
        "use the same model on every node"
    )
    for name in ("local", "local-3"):
        assert ended.results[name].status == "ok"
        assert "trained 2" in text_of(outputs, name)
    assert counted(commits(shared, "shapes")[-1]) == ["local", "local-3"]


def test_settings_that_differ_between_nodes_are_named(shared: Cluster) -> None:
    ended, _ = shared.run('nc.DiLoCo(make_model(10), every=10 + 10 * (rank == 2), name="settings")')
    assert ended.results["local-3"].error_value == (
        "'local-3' has every=20 steps, 'local' (rank 0) has every=10 steps: use the same on every node"
    )


def test_work_that_is_not_a_number_is_left_out_and_its_node_named(shared: Cluster) -> None:
    said = run(
        shared,
        """
model = make_model(1000)
sync = nc.DiLoCo(model, every=2, name="nan")
for step in range(6):
    work(model, step)
    if rank == 1 and step == 3:
        with torch.no_grad():
            model.weight[7] = float("nan")
    sync.step()
sync.finish()
print(sync.round, state_hash(model.weight.detach().numpy(), sync._replica.momentum))
""",
    )
    assert [counted(record) for record in commits(shared, "nan")] == [NODES, ["local", "local-3"], NODES]
    line = "the work of 'local-2' for round 2 holds NaN or infinity: lower its learning rate"
    assert any(line in event.text for event in shared.state().events)
    assert line in said["local-2"]
    assert all(f"3 {job(shared, 'nan').state_hash}\n" in text for text in said.values())


def test_work_wildly_out_of_scale_is_left_out_and_its_node_named(shared: Cluster) -> None:
    said = run(
        shared,
        """
model = make_model(1000)
sync = nc.DiLoCo(model, every=2, name="scale")
for step in range(4):
    work(model, step)
    if rank == 2 and step == 1:
        with torch.no_grad():
            model.weight *= 1e9
    sync.step()
sync.finish()
print("largest", model.weight.detach().abs().max().item(), flush=True)
""",
    )
    assert [counted(record) for record in commits(shared, "scale")] == [["local", "local-2"], NODES]
    assert "out of scale" in said["local-3"]
    assert all(float(text.partition("largest ")[2].split()[0]) < 100 for text in said.values())


def test_a_node_that_makes_no_sync_object_is_not_waited_for_in_vain(shared: Cluster) -> None:
    said = run(
        shared,
        """
if rank != 1:
    model = make_model(10)
    sync = nc.LocalSGD(model, every=1, name="absent")
    for step in range(3):
        sync.step()
    sync.finish()
    print(sync.round, *sync.members)
""",
    )
    assert said["local"] == said["local-3"] == "3 local local-3\n"
    assert said["local-2"] == ""


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("nc.DiLoCo(make_model(3), every=0)", "ValueError", ["every=0", "every=100"]),
        ("nc.DiLoCo(make_model(3), every=2.5)", "ValueError", ["every=2.5", "every=100"]),
        ("nc.DiLoCo(make_model(3), codec='zip')", "ValueError", ["codec='zip'", "'int8'"]),
        ("nc.DiLoCo(make_model(3), outer_lr=-1)", "ValueError", ["outer_lr=-1", "above 0"]),
        ("nc.DiLoCo(make_model(3), name='a/b')", "ValueError", ["job name 'a/b' is not usable"]),
        ("nc.DiLoCo([1, 2])", "TypeError", ["list", "torch.nn.Module"]),
        ("nc.DiLoCo(nn.Flatten())", "ValueError", ["Flatten has no trainable parameter"]),
        ("nc.DiLoCo(make_model(3), every=5, name='v').step(samples=-1)", "ValueError", ["samples=-1", "len(x)"]),
        ("nc.DiLoCo(make_model(3), every=5, name='w').step(loss='high')", "ValueError", ["loss='high'", "one number"]),
        ("nc.DiLoCo(make_model(3), name='x').checkpoint('a b')", "ValueError", ["checkpoint name 'a b' is not usable"]),
        ("nc.DiLoCo(make_model(3), name='y', resume='a b')", "ValueError", ["'a b' is not the name of a checkpoint"]),
    ],
)  # fmt: skip
def test_a_bad_argument_is_one_line_on_every_node(shared: Cluster, source: str, error: str, words: list[str]) -> None:
    ended, _ = shared.run(source)
    for name in NODES:
        result = ended.results[name]
        assert result.error_name == error
        assert "\n" not in result.error_value
        for word in words:
            assert word in result.error_value


def test_a_model_that_grows_during_training_is_named(shared: Cluster) -> None:
    ended, _ = shared.run("""
model = make_model(10)
sync = nc.DiLoCo(model, every=1, name="grows")
model.more = nn.Parameter(torch.zeros(3))
sync.step()
""")
    for result in ended.results.values():
        assert result.error_name == "ValueError"
        assert "'more'" in result.error_value
        assert "\n" not in result.error_value
