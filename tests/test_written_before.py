"""What a cluster of the version before this one has left on disk is read: its run log, the last view of it, its curves
and a checkpoint.

``written_before/`` is what that version wrote: two nodes trained for four rounds a model with a submodule called
``_orig_mod``, a name that it left out of checkpoints, measured the global model, and saved ``kept``; then the
coordinator was killed.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.coordinator.remains import last_run
from notebook_cluster.coordinator.runlog import has_crashed, read_log
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.widgets import render_html, render_text
from tests.cluster_in_process import Cluster, Node

LEFT = Path(__file__).parent / "written_before"
NODES = ("local", "local-2")
STATE_HASH = "71c95df2abe9ec20e28d647b7573f576"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(3, 4)
        self.module = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.module(self._orig_mod(x))
        return y


def test_a_run_log_gives_nodes_cells_and_the_state_of_each_job() -> None:
    assert has_crashed(LEFT / "run" / "run.jsonl")
    found = read_log(LEFT / "run" / "run.jsonl")
    nodes = {name: (node.condition, node.incarnation, node.settled) for name, node in found.state.nodes.items()}
    assert nodes == dict.fromkeys(NODES, ("ok", 1, True))
    assert {number: (cell.status, cell.nodes) for number, cell in found.state.cells.items()} == {
        1: ("ok", dict.fromkeys(NODES, "ok"))
    }
    again = rounds.Recovered(tuple(found.rounds), tuple((name, 1) for name in NODES), 1.0, 10**6, 0, ())
    (job,) = rounds.apply(rounds.new_state(), again)[0].jobs.values()
    assert (job.name, job.round, job.state_hash, job.members) == ("net", 4, STATE_HASH, NODES)
    assert (job.run, job.stopped, job.settings.patience) == (1, "", 5.0)


def test_the_last_view_and_the_curves_are_shown() -> None:
    run = last_run(LEFT / "run")
    assert run is not None
    curves = {(one.node, one.job, one.run, one.name): one for one in run.series()}
    assert len(curves["local", "", 0, "loss"].value) == len(curves["local-2", "", 0, "loss"].value) == 8
    assert curves["", "net", 0, "loss"].value == [0.25]
    assert [one.round for one in run.history().rounds] == [1, 2, 3, 4]
    text = render_text(run.state(), run.series())
    assert "cluster old" in text
    assert "global loss 0.2500" in text
    assert "<path" in render_html(run.state(), run.series(), ended=run.ended)


def test_a_checkpoint_whose_names_were_shortened_goes_on_with_its_optimizer(tmp_path: Path) -> None:
    saved = load_file(LEFT / "kept" / "round-000004" / "global.safetensors")
    assert not any("_orig_mod" in name for name in saved)
    shutil.copytree(LEFT / "kept", tmp_path / "kept")

    def resumed(node: Node) -> dict[str, torch.Tensor]:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        sync = nc.DiLoCo(model, every=2, name="net", optimizer=optimizer, resume="kept")
        assert sync.round == 4
        assert {float(state["step"]) for state in optimizer.state.values()} == {8.0}
        began = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            sync.step()
        sync.finish()
        assert sync.round == 5
        return began

    with Cluster(list(NODES), tmp_path) as cluster:
        results = cluster.run(resumed)
    for began in results.values():
        assert len(began) == 4
        for name, tensor in began.items():
            np.testing.assert_array_equal(tensor.numpy(), saved[name.replace("_orig_mod.", "")])
