"""What a cluster of a version without a journal has left on disk is read: its run log, the last view of it, its curves
and a checkpoint.

``written_before/`` is what that version wrote: two nodes trained for four rounds a model with a submodule called
``_orig_mod``, a name that it left out of checkpoints, measured the global model, and saved ``kept``; then the
coordinator was killed.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import convert
from safetensors.numpy import load_file
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.client import read_run
from notebook_cluster.coordinator.startup import StartProgress, lock
from notebook_cluster.journal.curves import pack, read_series, unpack
from notebook_cluster.journal.events import Event
from notebook_cluster.journal.kept_runs import import_old, last_run
from notebook_cluster.journal.reading import has_crashed, read_rounds, recover
from notebook_cluster.journal.records import Record
from notebook_cluster.journal.store import curves_path, journal_path
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.widgets import render_html, render_text
from notebook_cluster.widgets.report import render_report
from tests.cluster import read_events
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


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder of the cluster that was killed."""
    return shutil.copytree(LEFT / "run", tmp_path / "run")


def test_a_run_log_gives_nodes_cells_and_the_state_of_each_job(left: Path) -> None:
    assert import_old(left)
    assert has_crashed(journal_path(left))
    found = recover(journal_path(left))
    nodes = {name: (node.condition, node.incarnation, node.settled) for name, node in found.state.nodes.items()}
    assert nodes == dict.fromkeys(NODES, ("ok", 1, True))
    assert {number: (cell.status, cell.nodes) for number, cell in found.state.cells.items()} == {
        1: ("ok", dict.fromkeys(NODES, "ok"))
    }
    again = rounds.LeaderRestarted(tuple(found.rounds), tuple((name, 1) for name in NODES), 1.0, 10**6, 0, ())
    (job,) = rounds.apply(rounds.new_state(), again)[0].jobs.values()
    assert (job.name, job.round, job.state_hash, job.members) == ("net", 4, STATE_HASH, NODES)
    assert (job.run, job.stopped, job.settings.patience) == (1, "", 5.0)


def test_the_last_view_and_the_curves_are_shown(left: Path) -> None:
    run = last_run(left)
    assert run is not None
    curves = {(one.node, one.job, one.run, one.name): one for one in run.series()}
    assert len(curves["local", "", 0, "loss"].value) == len(curves["local-2", "", 0, "loss"].value) == 8
    assert curves["", "net", 0, "loss"].value == [0.25]
    assert [one.round for one in run.history().rounds] == [1, 2, 3, 4]
    text = render_text(run.state(), run.series())
    assert "cluster old" in text
    assert "global loss 0.2500" in text
    assert "<path" in render_html(run.state(), run.series(), ended=run.ended)


def test_the_settings_of_its_jobs_are_found_in_its_journal(left: Path) -> None:
    run = read_run(left)
    assert [(job.name, job.settings["codec"], job.settings["every"]) for job in run.view.jobs] == [
        ("net", "float32", "2 steps")
    ]
    assert "outer learning rate" in render_report(run.state(), run.series(), run.history(), ended=run.ended)


def test_an_old_run_is_read_once_and_nothing_of_it_is_lost(left: Path) -> None:
    before = {path.name: path.read_bytes() for path in left.iterdir()}
    assert import_old(left)
    assert not import_old(left)
    assert {path.name: path.read_bytes() for path in left.glob("*.imported")} == {
        f"{name}.imported": data for name, data in before.items()
    }
    lines = [json.loads(line) for line in before["run.jsonl"].splitlines()]
    noted = read_rounds(journal_path(left))
    assert [one.record for one in noted] == [convert(line["round"], Record) for line in lines if "round" in line]
    assert [one.time for one in noted] == pytest.approx([line["time"] for line in lines if "round" in line], abs=0.01)
    assert read_events(journal_path(left)) == [convert(line["event"], Event) for line in lines if "event" in line]
    assert all(path.stat().st_mode & 0o077 == 0 for path in left.glob("*.journal"))


def test_an_old_run_that_still_goes_on_is_left_alone(left: Path) -> None:
    held = lock(left, "old", StartProgress())
    assert not import_old(left)
    assert last_run(left) is None
    assert import_old(left, locked=True)
    os.close(held)


@pytest.mark.parametrize("end", [b'{"time": 3', b"\0\0\0\0", b"\0\0\0\n", b'{"time": 3, "round": {"kind": "se\n'])
def test_a_torn_end_of_an_old_run_log_costs_nothing_else(tmp_path: Path, end: bytes) -> None:
    whole = b'{"time": 1, "received": {"key": 1}}\n{"time": 2, "received": {"key": 2}}\n'
    (tmp_path / "run.jsonl").write_bytes(whole + end)
    assert import_old(tmp_path)
    assert not has_crashed(journal_path(tmp_path))
    assert recover(journal_path(tmp_path)).received == {"key": 2}


def test_a_broken_line_in_the_middle_of_an_old_run_log_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"time": 1}\nnonsense\n{"time": 2}\n')
    for _ in range(2):
        with pytest.raises(ValueError, match=r"run\.jsonl line 2 is not readable .*--fresh"):
            import_old(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.jsonl"]


def test_an_old_series_file_cut_by_a_crash_gives_what_is_whole(left: Path) -> None:
    whole = (left / "series.jsonl").read_bytes()
    (left / "series.jsonl").write_bytes(b"\xff\n[1]\n" + whole + b'[["desk","","loss",[1],[1.0]')
    import_old(left)
    assert pack(list(read_series(curves_path(left)))) == pack(
        [one for line in whole.splitlines() for one in unpack(line)]
    )


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
