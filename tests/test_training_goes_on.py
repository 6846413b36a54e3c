"""A sync object that goes on with what is held says what goes on and what begins anew."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from notebook_cluster import training as nc
from tests.cluster_in_process import Cluster, Node, stepped  # noqa: F401
from tests.test_training import batch, build, loss_of, train

pytestmark = pytest.mark.usefixtures("stepped")

STEPS = 6
ANEW = "the optimizer, the scheduler and the data begin anew"


def said(cluster: Cluster) -> set[str]:
    """Lines about going on, of all nodes; each once, and those of before are forgotten."""
    lines = {text for _, text in cluster.told if text.startswith("training ")}
    cluster.told.clear()
    return lines


def averaged(make: Any, **options: Any) -> Callable[[Node], None]:
    """A cell with its own optimizer."""

    def cell(node: Node) -> None:
        model = build(seed=node.rank())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        sync = make(model, every=2, name="digits", **options)
        for step in range(STEPS):
            sync.step(train(model, optimizer, batch(step)))
        sync.finish()

    return cell


def every_step(make: Callable[[Any], Any]) -> Callable[[Node], None]:
    """A cell whose sync object makes the steps."""

    def cell(node: Node) -> None:
        model = build(seed=node.rank())
        sync = make(model)
        for step in range(STEPS):
            loss = loss_of(model, batch(step))
            loss.backward()
            sync.step(loss.item())
        sync.finish()

    return cell


def parallel(model: Any, **options: Any) -> Any:
    return nc.DataParallel(model, torch.optim.Adam(model.parameters(), lr=0.01), name="digits", **options)


CASES = {
    "DiLoCo": (averaged(nc.DiLoCo), 3, f"parameters and outer momentum go on; {ANEW}"),
    "DiLoCo without momentum": (averaged(nc.DiLoCo, outer_momentum=0), 3, f"parameters go on; {ANEW}"),
    "DiLoCo int8": (
        averaged(nc.DiLoCo, codec="int8"),
        3,
        f"parameters and outer momentum go on; the error feedback, {ANEW}",
    ),
    "LocalSGD": (averaged(nc.LocalSGD), 3, f"parameters go on; {ANEW}"),
    "SparseLoCo": (averaged(nc.SparseLoCo), 3, f"parameters go on; the error feedback, {ANEW}"),
    "DataParallel": (every_step(parallel), 6, f"parameters go on; {ANEW}"),
    "server": (every_step(lambda model: parallel(model, mode="server")), 6, f"parameters go on; {ANEW}"),
    "DeMo": (
        every_step(lambda model: nc.DeMo(model, name="digits")),
        6,
        "parameters and each node's momentum go on; the data begin anew",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_cell_run_again_says_what_goes_on_and_what_begins_anew(tmp_path: Path, name: str) -> None:
    cell, number, text = CASES[name]
    with Cluster(["a", "b"], tmp_path) as cluster:
        assert set(cluster.run(cell).values()) == {None}
        assert said(cluster) == set()
        assert set(cluster.run(cell).values()) == {None}
        assert said(cluster) == {f"training 'digits' goes on at round {number}: {text} (fresh=True starts over)"}


def test_fresh_says_nothing(tmp_path: Path) -> None:
    with Cluster(["a", "b"], tmp_path) as cluster:
        for _ in range(2):
            assert set(cluster.run(averaged(nc.DiLoCo, fresh=True)).values()) == {None}
        assert said(cluster) == set()


def test_what_was_not_made_anew_is_not_said_to_begin_anew(tmp_path: Path) -> None:
    """The model was made in an earlier cell, and its optimizer perhaps too."""
    kept: dict[str, Any] = {}

    def cell(node: Node, given: bool) -> None:
        if node.name not in kept:
            model = build(seed=node.rank())
            kept[node.name] = model, torch.optim.Adam(model.parameters(), lr=0.01)
        model, optimizer = kept[node.name]
        sync = nc.DiLoCo(model, every=2, name="digits", **({"optimizer": optimizer} if given else {}))
        for step in range(STEPS):
            sync.step(train(model, optimizer, batch(step)))
        sync.finish()

    with Cluster(["a", "b"], tmp_path) as cluster:
        for given in (True, True, False):
            assert set(cluster.run(lambda node, given=given: cell(node, given)).values()) == {None}  # type: ignore[misc]
        assert said(cluster) == {
            "training 'digits' goes on at round 3: parameters, outer momentum and the optimizer go on; the data begin "
            "anew (fresh=True starts over)",
            "training 'digits' goes on at round 6: parameters and outer momentum go on; the data begin anew, as do an "
            "optimizer and a scheduler that this cell makes (fresh=True starts over)",
        }


def test_the_object_of_an_earlier_cell_goes_on_without_a_word(tmp_path: Path) -> None:
    kept: dict[str, Any] = {}

    def cell(node: Node) -> None:
        if node.name not in kept:
            model = build(seed=node.rank())
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            kept[node.name] = model, optimizer, nc.DiLoCo(model, every=2, name="digits")
        model, optimizer, sync = kept[node.name]
        for step in range(STEPS):
            sync.step(train(model, optimizer, batch(step)))

    with Cluster(["a", "b"], tmp_path) as cluster:
        for _ in range(2):
            assert set(cluster.run(cell).values()) == {None}
        assert said(cluster) == set()


@pytest.mark.parametrize("given", [True, False])
def test_a_checkpoint_says_whether_the_optimizer_goes_on(tmp_path: Path, given: bool) -> None:
    def cell(node: Node, **options: Any) -> None:
        model = build(seed=node.rank())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        more = {"optimizer": optimizer} if given else {}
        sync = nc.DiLoCo(model, every=2, name="digits", **more, **options)
        for step in range(STEPS):
            sync.step(train(model, optimizer, batch(step)))
        sync.checkpoint("kept")
        sync.finish()

    with Cluster(["a", "b"], tmp_path) as cluster:
        assert set(cluster.run(cell).values()) == {None}
    with Cluster(["a", "b"], tmp_path) as cluster:
        assert set(cluster.run(lambda node: cell(node, resume="kept")).values()) == {None}
        assert said(cluster) == {
            "training 'digits' goes on at round 3 of checkpoint 'kept': "
            + (
                "parameters, outer momentum and the optimizer's state go on; the scheduler and the data begin anew"
                if given
                else f"parameters and outer momentum go on; {ANEW}"
            )
        }


def test_a_model_of_mlx_has_no_scheduler_beside_its_optimizer(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    from tests.mlx_models import adapted, on_this_thread

    def cell(node: Node) -> None:
        sync = nc.DiLoCo(adapted(node).model, every=1, name="digits")
        sync.step()
        sync.finish()

    with Cluster(["m0", "m1"], tmp_path) as cluster:
        for _ in range(2):
            assert set(cluster.run(on_this_thread(cell)).values()) == {None}
        assert said(cluster) == {
            "training 'digits' goes on at round 1: parameters go on; outer momentum, the optimizer and the data begin "
            "anew (fresh=True starts over)"
        }
