"""What a machine says that it has kept of a cluster, and finding again what was taken over."""

import os
from pathlib import Path

import numpy as np
import pytest

from notebook_cluster.checkpoints import CheckpointError, Contents, Part, save
from notebook_cluster.checkpoints.kept import find_taken, kept_states
from notebook_cluster.protocol.kept import TakenState


def keep(folder: Path, round: int, *, job: str = "model", cluster: str = "digits-1", epoch: object = 1) -> Path:
    """A kept checkpoint of three numbers; where it is."""
    tensors = {"w": np.full(3, round, np.float32)}
    about = {"cluster_id": cluster, "epoch": epoch}
    contents = Contents(job, round, f"{round:032x}", tensors, tensors, [Part("mini", 0, b"x")], about)  # type: ignore[arg-type]
    return save(folder, f"{job}-kept", contents)[0]


def rounds(folder: Path, cluster: str = "") -> dict[str, int]:
    return {state.job: state.round for state in kept_states(folder, cluster)[0]}


def test_the_newest_of_each_job_is_told_with_what_tells_it_apart(tmp_path: Path) -> None:
    keep(tmp_path, 3)
    keep(tmp_path, 4)
    keep(tmp_path, 9, job="text")
    states, damaged = kept_states(tmp_path)
    assert [(s.job, s.name, s.round, s.state_hash) for s in states] == [
        ("model", "model-kept", 4, f"{4:032x}"), ("text", "text-kept", 9, f"{9:032x}"),
    ]  # fmt: skip
    assert {(s.cluster_id, s.epoch) for s in states} == {("digits-1", 1)}
    assert damaged == []
    assert kept_states(tmp_path / "nothing") == ([], [])


def test_a_training_of_before_that_was_kept_once_more_is_not_the_newest(tmp_path: Path) -> None:
    keep(tmp_path, 3, cluster="digits-2", epoch=2)
    keep(tmp_path, 500, cluster="digits-1", epoch=1)
    assert rounds(tmp_path) == {"model": 3}


def test_what_other_clusters_and_people_have_saved_in_the_folder_is_left_out(tmp_path: Path) -> None:
    keep(tmp_path, 3, cluster="text-0123456789abcdef")
    keep(tmp_path, 4, job="digits", cluster="digits-0123456789abcdef")
    keep(tmp_path, 5, job="old", cluster="")
    tensors = {"w": np.ones(3, np.float32)}
    save(tmp_path, "digits", Contents("digits", 9, "aa", tensors, tensors))
    os.symlink(tmp_path / "model-kept", tmp_path / "link-kept")
    assert rounds(tmp_path, "digits") == {"digits": 4}
    assert rounds(tmp_path) == {"model": 3, "digits": 4, "old": 5}


@pytest.mark.parametrize("epoch", ["high", None, 1.5])
def test_an_epoch_that_is_none_counts_as_the_oldest(tmp_path: Path, epoch: object) -> None:
    keep(tmp_path, 3, epoch=epoch)
    assert [state.epoch for state in kept_states(tmp_path)[0]] == [0]


def test_torn_files_are_named_and_the_one_before_is_told(tmp_path: Path) -> None:
    before, torn = keep(tmp_path, 3), keep(tmp_path, 4)
    data = (torn / "global.safetensors").read_bytes()
    (torn / "global.safetensors").write_bytes(data[:-1] + b"?")
    states, damaged = kept_states(tmp_path)
    assert [state.round for state in states] == [3]
    assert [str(torn / "global.safetensors") in line for line in damaged] == [True]
    (before / "manifest.json").write_text("{")
    states, damaged = kept_states(tmp_path)
    assert (states, len(damaged)) == ([], 2)


def test_what_was_taken_over_is_found_by_its_hash_and_nothing_in_its_place(tmp_path: Path) -> None:
    folder = keep(tmp_path, 3)
    keep(tmp_path, 4)
    taken = TakenState(job="model", name="model-kept", round=3, state_hash=f"{3:032x}")
    found = find_taken(tmp_path, taken)
    assert found is not None
    assert found.path == folder
    assert find_taken(tmp_path, TakenState(job="model", name="model-kept", round=3, state_hash="other")) is None
    assert find_taken(tmp_path / "nothing", taken) is None
    (folder / "global.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"global\.safetensors is missing"):
        find_taken(tmp_path, taken)
