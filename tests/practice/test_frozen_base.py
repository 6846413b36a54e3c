"""What is not trained does not travel: nodes with unlike frozen parameters are refused by the first one."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.protocol.runs import FrozenRow, RegisterRefused
from notebook_cluster.rounds.leader.alike import (
    buffers_difference,
    first_frozen,
    first_of_most,
    frozen_difference,
    not_compared,
)
from notebook_cluster.rounds.leader.events_effects import CellBegan
from notebook_cluster.training.models.frozen import frozen_rows, unread
from tests.cluster import Watcher, mend, run, shared_cluster, text_of
from tests.rounds_helpers import Cluster as Rounds
from tests.rounds_helpers import register, sent, told

torch = pytest.importorskip("torch")

NODES = ("local", "local-2", "local-3")
MODEL = """
import torch
torch.set_num_threads(1)
def made(seed=0, hidden=8):
    torch.manual_seed(seed)
    model = torch.nn.Sequential()
    model.add_module("embedding", torch.nn.Linear(6, hidden))
    model.add_module("body", torch.nn.Linear(hidden, hidden))
    model.add_module("head", torch.nn.Linear(hidden, 2))
    model.embedding.requires_grad_(False), model.body.requires_grad_(False)
    return model
def train(model, every=2, **options):
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    sync = nc.DiLoCo(model, every, **{"fresh": True} | options)
    for _ in range(2):
        loss = model(torch.randn(4, 6)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        sync.step(loss, samples=4)
    sync.finish()
    print("trained", sync.round, *sync.members)
"""
COUNTING = """
from notebook_cluster.training.models import torch_frozen
plain, hashed = torch_frozen._pieces, []
def counted(tensor):
    hashed.append(tuple(tensor.shape))
    return plain(tensor)
torch_frozen._pieces = counted
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with shared_cluster(local=3) as cluster:
        run(cluster, MODEL)
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    mend(shared)


def refused(cluster: Cluster, cell: str, nodes: tuple[str, ...]) -> dict[str, str]:
    """Run a cell in which the job refuses these ``nodes`` and no other; node -> what it said."""
    ended, outputs = cluster.run(cell)
    said = {name: text_of(outputs, name) for name in ended.results}
    assert {name for name, result in ended.results.items() if result.error_name == "TrainingError"} == set(nodes), said
    assert all("trained" in said[name] for name in set(said) - set(nodes)), said
    return said


def test_the_node_with_another_base_is_refused_and_the_first_parameter_named(cluster: Cluster) -> None:
    change = "model.body.weight.data[-1, -1] += 1e-6; model.head.weight.data += 1"
    cell = f"model = made()\nif rank == 1:\n    {change}\ntrain(model)"
    said = refused(cluster, cell, ("local-2",))["local-2"]
    assert "frozen parameters differ: 'body.weight' has other values on 'local-2' than on 'local' (rank 0)" in said
    assert "load the same base on every node" in said
    assert "check_frozen=False" in said


def test_of_three_the_one_that_differs_from_the_others_is_refused_be_it_rank_0(cluster: Cluster) -> None:
    said = refused(cluster, "train(made(seed=7 if rank == 0 else 0))", ("local",))
    assert "'body.bias' has other values on 'local' than on 'local-2' (rank 1)" in said["local"]
    assert "trained 1 local-2 local-3" in said["local-2"]


def test_a_base_of_another_dtype_or_with_another_parameter_is_named(cluster: Cluster) -> None:
    said = refused(cluster, "model = made()\nif rank == 2:\n    model.body.bfloat16()\ntrain(model)", ("local-3",))
    assert "'local-3' has 'body.bias' 8 bfloat16, 'local' (rank 0) has 'body.bias' 8 float32" in said["local-3"]
    gate = "model.body.add_module('gate', torch.nn.Linear(1, 1).requires_grad_(False))"
    said = refused(cluster, f"model = made()\nif rank == 2:\n    {gate}\ntrain(model)", ("local-3",))
    assert "'local-3' has 'body.gate.bias' 1 float32, 'local' (rank 0) has no 'body.gate.bias'" in said["local-3"]


def test_with_check_frozen_false_nothing_is_compared(cluster: Cluster) -> None:
    said = run(cluster, "train(made(seed=rank), check_frozen=False)")
    assert all("trained 1 local local-2 local-3" in text for text in said.values())


def test_broadcast_makes_the_bases_equal(cluster: Cluster) -> None:
    cell = """
model = made(seed=rank)
for parameter in model.parameters():
    parameter.data.copy_(nc.broadcast(parameter.data, 0))
train(model)
"""
    assert all("trained 1 local local-2 local-3" in text for text in run(cluster, cell).values())


def test_what_has_not_changed_is_not_hashed_again_and_what_was_written_is(cluster: Cluster) -> None:
    run(cluster, COUNTING + "model = made()")
    steps = {
        "train(model)": 4,
        "train(model, fresh=False)": 0,  # a new sync object, and a later cell
        "sync = nc.DiLoCo(model, 1, name='kept')": 0,
        "sync.step(); sync.finish()": 0,
        "with torch.no_grad():\n    model.body.bias.add_(1)\ntrain(model)": 1,
        "model.embedding.weight.data += 1\ntrain(model)": 1,  # which torch does not count
        "model.load_state_dict(made(seed=3).state_dict())\ntrain(model)": 4,
        "model.embedding.requires_grad_(True); model.body.requires_grad_(True)\ntrain(model)": 0,
    }
    for cell, expected in steps.items():
        said = run(cluster, f"hashed.clear()\n{cell}\nprint('hashed', len(hashed))")
        assert all(f"hashed {expected}\n" in text for text in said.values()), (cell, said)
    run(cluster, "torch_frozen._pieces = plain")


def test_a_job_or_a_checkpoint_that_goes_on_over_another_base_says_so(cluster: Cluster) -> None:
    save = "sync = nc.DiLoCo(made(), 2, name='goes'); sync.checkpoint('over'); sync.finish()"
    run(cluster, f"train(made(), name='goes')\n{save}")
    warning = (
        "was trained over other frozen parameters than the model has now: load those, or start over with fresh=True"
    )
    for options in ("fresh=False", "fresh=False, resume='over'"):
        said = run(cluster, f"train(made(), name='goes', {options})")
        assert not any(warning in text for text in said.values())
        said = run(cluster, f"train(made(seed=5), name='goes', {options})")
        assert all(f"[goes] round {1 if 'resume' in options else 2} {warning}" in text for text in said.values()), said


MIXED = """
import numpy as np
def values(name, shape):
    return np.random.default_rng(len(name)).normal(size=shape).astype("float32")
if rank == 0:
    import mlx.core as mx, mlx.nn as nn
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = nn.Linear(64, 4, bias=False), nn.Linear(4, 2, bias=False)
    model = Model()
    model.base.weight, model.head.weight = mx.array(values("base weights", (4, 64))), mx.array(values("head", (2, 4)))
    model.base.freeze()
else:
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = torch.nn.Linear(64, 4, bias=False), torch.nn.Linear(4, 2, bias=False)
    model = Model()
    model.base.weight.data = torch.from_numpy(values("base weights", (4, 64)))
    model.base.requires_grad_(False)
"""
FINISH = """
sync = nc.DiLoCo(model, 1, name="mixed", fresh=True)
sync.step(samples=1)
sync.finish()
print("trained", *sync.members)
"""


def test_torch_and_mlx_train_on_one_base_and_are_refused_on_two(cluster: Cluster) -> None:
    pytest.importorskip("mlx.core")
    both = ("local", "local-2")
    assert set(run(cluster, MIXED + FINISH, both).values()) == {"trained local local-2\n"}
    cell = MIXED + "if rank:\n    model.base.weight.data[3, 2] += 1\n" + FINISH
    ended, outputs = cluster.run(cell, both)
    assert ended.results["local-2"].error_name == "TrainingError"
    assert "'base.weight' has other values on 'local-2' than on 'local' (rank 0)" in text_of(outputs, "local-2")


def test_a_base_that_mlx_has_quantised_is_no_error(cluster: Cluster) -> None:
    pytest.importorskip("mlx.core")
    cell = MIXED + "if rank == 0:\n    nn.quantize(model, class_predicate=lambda name, _: name == 'base')\n" + FINISH
    said = run(cluster, cell, ("local", "local-2"))
    assert all("trained local local-2\n" in text for text in said.values()), said


# ---- buffers that no round averages ----------------------------------------------------------------------------

FOURIER = """
class Fourier(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("seen", torch.tensor(seed))
        self.register_buffer("cache", torch.randn(3), persistent=False)
        self.norm, self.head = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.norm(torch.sin(x @ self.frequencies)))
"""


def notes_of(cluster: Cluster, cell: str) -> list[str]:
    """What stands below the cell that is for no node; every node trains to the end."""
    watcher = Watcher(cluster.execute(cell))
    ended = watcher.wait_end()
    assert all(result.status == "ok" for result in ended.results.values()), watcher.text()
    return watcher.notes


def test_a_buffer_made_at_random_is_named_once_in_a_cell_and_nobody_is_refused(cluster: Cluster) -> None:
    run(cluster, FOURIER)
    twice = "for name in 'ab':\n    train(Fourier(int(rank == 1)), name=name)\n    train(Fourier(rank % 2), name=name)"
    first, second = notes_of(cluster, twice)
    assert first.startswith(
        "buffers of 'a' differ: 'frequencies' has other values on 'local-2' than on 'local' (rank 0). No round sends "
        "or averages that one, so each node trains another model with its own: make it alike on every node"
    )
    assert second.startswith("buffers of 'b' differ: 'frequencies'")
    assert notes_of(cluster, twice.splitlines()[-1].strip().replace("name=name", "name='b'")) == [second]
    assert notes_of(cluster, "train(Fourier(0))") == []
    assert notes_of(cluster, "train(Fourier(rank), check_frozen=False)") == []


# ---- rows, without a cluster -----------------------------------------------------------------------------------


def torch_rows(model: Any) -> list[FrozenRow]:
    from notebook_cluster.training.models import parameters_of

    return frozen_rows(parameters_of(model).frozen())


def a_model(*frozen: Any) -> Any:
    model = torch.nn.Module()
    model.trained = torch.nn.Parameter(torch.zeros(1))
    for index, tensor in enumerate(frozen):
        model.register_parameter(f"f{index}", torch.nn.Parameter(tensor, requires_grad=False))
    return model


def test_the_hash_is_of_all_values_in_their_order_and_of_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2500, 3000, generator=generator)  # more than a piece
    (row,) = torch_rows(a_model(weight))
    assert row[:3] == ("f0", [2500, 3000], "float32")
    assert torch_rows(a_model(weight.t().contiguous().t())) == [row]
    assert torch_rows(a_model(weight.clone()[:, None, :]))[0][3] == row[3]
    for place in (0, weight.numel() // 2 + 1, weight.numel() - 1):
        other = weight.clone()
        other.view(-1)[place] += 1e-3
        assert torch_rows(a_model(other)) != [row], place


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float64", "int8", "uint8", "bool", "float8_e4m3fn"]
)
def test_every_dtype_and_shape_has_a_hash(dtype: str) -> None:
    tensors = [torch.ones(shape).to(getattr(torch, dtype)) for shape in ((), (0,), (3,), (2, 0, 4), (2, 3, 4))]
    rows = torch_rows(a_model(*tensors))
    assert [row[1] for row in rows] == [[], [0], [3], [2, 0, 4], [2, 3, 4]]
    assert all(row[2] == dtype and row[3] for row in rows)


def test_mlx_and_torch_hash_alike_also_in_bfloat16() -> None:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as nn

    from notebook_cluster.training.models import parameters_of

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self, array: Any) -> None:
            super().__init__()
            self.trained, self.f0 = mx.zeros((1,)), array
            self.freeze(keys="f0")

    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    array = mx.array(values.numpy())
    for kind in ("float32", "bfloat16", "float16"):
        of_mlx = frozen_rows(parameters_of(Model(array.astype(getattr(mx, kind)))).frozen())
        assert of_mlx == torch_rows(a_model(values.to(getattr(torch, kind))))
    assert frozen_rows(parameters_of(Model(array.T)).frozen()) == torch_rows(a_model(values.t()))


def test_a_tensor_without_values_is_named_and_differs_from_none() -> None:
    rows = torch_rows(a_model(torch.ones(2, device="meta"), torch.ones(2), torch.ones(3, device="meta")))
    assert [bool(row[3]) for row in rows] == [False, True, False]
    assert unread(rows) == "'f0' and 1 more"
    there = torch_rows(a_model(torch.ones(2), torch.ones(2), torch.ones(3)))
    assert first_frozen(register(frozen=rows), register(frozen=there)) is None
    assert torch_rows(a_model()) == []
    assert unread([]) == ""


def test_buffers_are_compared_that_belong_to_the_model_and_are_in_no_round() -> None:
    from notebook_cluster.training.models import parameters_of

    model = a_model()
    model.norm = torch.nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.ones(2, 2, dtype=torch.bool))
    model.register_buffer("scale", torch.tensor(2.0))
    model.register_buffer("step", torch.tensor(7))
    model.register_buffer("cache", torch.zeros(4), persistent=False)
    model.register_buffer("nothing", None)
    rows = frozen_rows(parameters_of(model).buffers_to_compare())
    assert [row[:3] for row in rows] == [("mask", [2, 2], "bool"), ("scale", [], "float32")]
    assert all(row[3] for row in rows)
    assert frozen_rows(parameters_of(torch.compile(model)).buffers_to_compare()) == rows
    model.scale += 1
    assert [row[0] for row in frozen_rows(parameters_of(model).buffers_to_compare()) if row not in rows] == ["scale"]


def test_of_an_mlx_module_what_it_hides_from_its_parameters_is_compared() -> None:
    mx = pytest.importorskip("mlx.core")
    import mlx.nn as nn

    from notebook_cluster.training.models import parameters_of

    class Inner(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight, self._frequencies, self._seen = mx.zeros((1,)), mx.ones((3,)), mx.array(4)

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts, self._scale, self._word = [Inner(), Inner()], mx.array(1.5), "none"

    rows = frozen_rows(parameters_of(Model()).buffers_to_compare())
    assert [row[:3] for row in rows] == [
        ("_scale", [], "float32"),
        ("parts.0._frequencies", [3], "float32"),
        ("parts.1._frequencies", [3], "float32"),
    ]


def test_a_model_of_very_many_tensors_has_one_row_for_each_module() -> None:
    def rows(value: float) -> list[FrozenRow]:
        model = a_model()
        model.layers = torch.nn.ModuleList(
            a_model(torch.ones(1), torch.ones(1)).requires_grad_(False) for _ in range(6)
        )
        model.layers[4].f1.data += value
        from notebook_cluster.training.models import parameters_of

        return frozen_rows(parameters_of(model).frozen(), most=7)

    assert [row[:3] for row in rows(0)] == [(f"layers.{index}", [3], "tensors") for index in range(6)]
    assert first_frozen(register(frozen=rows(0)), register(frozen=rows(1))) == "layers.4"
    assert len(json.dumps(rows(0))) < 600


# ---- what is compared, without a cluster -----------------------------------------------------------------------

W: FrozenRow = ("w", [2], "float32", "1")
OTHER: FrozenRow = ("w", [2], "float32", "2")


def test_the_half_that_agrees_is_the_reference() -> None:
    one, two = register(frozen=[W]), register(frozen=[OTHER])
    assert first_of_most([one, two]) == 0
    assert first_of_most([two, one, one]) == 1
    assert first_of_most([one, two, two, one]) == 0
    assert first_of_most([one, register(frozen=None), two]) == 0
    assert first_of_most([two, register(frozen=[OTHER], schema_hash="another"), one, one]) == 2


def test_between_frameworks_what_is_called_alike_is_compared_and_the_rest_told() -> None:
    torch_node = register(framework="torch", frozen=[W, ("only.torch", [1], "float32", "3")])
    same = register(framework="mlx", frozen=[W])
    assert frozen_difference(same, torch_node, "'mini'", "'local'") == ""
    assert "of 'mini' (mlx) and 'local' (torch) 1 were compared, 1 have other names" in not_compared(
        same, torch_node, "'mini'", "'local'"
    )
    differing = register(framework="mlx", frozen=[OTHER])
    assert "'w' has other values on 'mini' than on 'local'" in frozen_difference(
        differing, torch_node, "'mini'", "'local'"
    )
    quantised = register(framework="mlx", frozen=[("w", [1], "uint32", "9")])
    assert frozen_difference(quantised, torch_node, "'mini'", "'local'") == ""
    assert not_compared(same, register(framework="torch", frozen=[W]), "a", "b") == ""
    assert not_compared(torch_node, torch_node, "a", "b") == ""


def test_of_a_buffer_that_differs_a_line_is_told_for_each_node_and_cell() -> None:
    cluster = Rounds("abc")
    cluster.say("a", register("h0", other_buffers=[W]))
    cluster.say("b", register("h0", other_buffers=[OTHER]))
    effects = cluster.say("c", register("h0", other_buffers=None))
    assert sent(cluster.effects, RegisterRefused) == {}
    (line,) = told(cluster.effects, "warning")
    assert line.startswith("buffers of 'model' differ: 'w' has other values on 'b' than on 'a' (rank 0). ")
    assert [effect.in_cell for effect in effects if getattr(effect, "text", "") == line] == [True]
    cluster.say("b", register("h0", other_buffers=[OTHER, ("x" * 5000, [1] * 999, "float32", "1")], run=2))
    assert len(told(cluster.effects, "warning")) == 1
    cluster.feed(CellBegan(2, ("a", "b")))
    for name, rows in (("a", [W]), ("b", [W, ("x" * 5000, [1] * 999, "float32", "1")])):
        cluster.say(name, register("h0", other_buffers=rows, cell=2))
    first, second = told(cluster.effects, "warning")
    assert first == line
    assert "'b' has 'xxx" in second
    assert "'a' (rank 0) has no 'xxx" in second
    assert len(second) < 1000


def test_between_frameworks_buffers_with_one_name_are_compared() -> None:
    theirs = register(framework="torch", other_buffers=[W, ("mask", [1], "bool", "3")])
    assert buffers_difference(register(framework="mlx", other_buffers=[W]), theirs, "b", "a") == ""
    assert "'w' has other values" in buffers_difference(
        register(framework="mlx", other_buffers=[OTHER]), theirs, "b", "a"
    )
