"""Checkpoints on disk: whole or not there, verified, pruned, and the previous one survives every failure."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from notebook_cluster import checkpoints
from notebook_cluster.checkpoints import CheckpointError, Contents, Part, find_latest, find_newest, load, names, save
from notebook_cluster.checkpoints.reading import kept_below

STEPS = ["folder", "global", "node desk", "manifest", "rename"]


def contents(round: int, fill: float = 1.0) -> Contents:
    tensors = {"fc.weight": np.full((3, 2), fill, np.float32), "fc.bias": np.arange(3, dtype=np.float32)}
    return Contents(
        job="model",
        round=round,
        state_hash="ab" * 16,
        parameters=tensors,
        momentum={name: value * np.float32(0.5) for name, value in tensors.items()},
        parts=[Part("mini", 0, b"state of mini"), Part("desk", 1, b"state of desk"), Part("gone", 2, None)],
        settings={"every": "100 steps", "momentum": 0.9},
    )


def of_training(cluster_id: str, round: int) -> Contents:
    """What a machine keeps of the training of this cluster."""
    return dataclasses.replace(contents(round), settings={"cluster_id": cluster_id, "epoch": 1})


def test_short_runs_do_not_replace_what_was_kept_of_a_long_one(tmp_path: Path) -> None:
    for cluster_id, rounds in {"forgotten": [3, 4], "night": [900, 901, 902], "lunch": [5], "now": [1, 2, 3]}.items():
        for round in rounds:
            save(tmp_path, "model-kept", of_training(cluster_id, round))
    rounds = sorted(int(folder.name.split("-")[1]) for folder in (tmp_path / "model-kept").glob("round-*"))
    assert rounds == [2, 3, 5, 902]
    assert find_latest(tmp_path, "model-kept").round == 3  # type: ignore[union-attr]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    folder, manifest_hash = save(tmp_path, "digits", contents(12))
    found = find_latest(tmp_path, "digits")
    assert found is not None
    assert (found.path, found.round, found.manifest_hash, found.warnings) == (folder, 12, manifest_hash, ())
    assert folder == tmp_path / "digits" / "round-000012"
    loaded = load(folder)
    expected = contents(12)
    for name in expected.parameters:
        np.testing.assert_array_equal(loaded.parameters[name], expected.parameters[name])
        np.testing.assert_array_equal(loaded.momentum[name], expected.momentum[name])
    assert loaded.manifest.settings == {"every": "100 steps", "momentum": 0.9}
    assert loaded.manifest.state_hash == "ab" * 16
    assert loaded.manifest.versions["numpy"] == np.__version__


def test_nothing_saved_is_none(tmp_path: Path) -> None:
    assert find_latest(tmp_path, "digits") is None


def test_a_node_takes_its_own_part_by_name_then_by_rank(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, "digits", contents(1))
    loaded = load(folder)
    assert loaded.part("desk", 0) == b"state of desk"
    assert loaded.part("new", 0) == b"state of mini"
    assert loaded.part("new", 0, used=frozenset({"mini"})) is None
    assert loaded.part("new", 7) is None
    assert loaded.part("gone", 2) is None


def test_the_last_two_are_kept_in_the_order_of_saving(tmp_path: Path) -> None:
    for round in (50, 60, 3):
        save(tmp_path, "digits", contents(round))
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == ["round-000003", "round-000060"]
    found = find_latest(tmp_path, "digits")
    assert found is not None
    assert found.round == 3


def test_a_round_saved_again_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    first, _ = save(tmp_path, "digits", contents(5, fill=1.0))
    second, _ = save(tmp_path, "digits", contents(5, fill=2.0))
    assert first.exists()
    assert second.name == "round-000005-2"
    found = find_latest(tmp_path, "digits")
    assert found is not None
    assert load(found.path).parameters["fc.weight"][0, 0] == 2.0


@pytest.mark.parametrize("step", STEPS)
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, step: str) -> None:
    save(tmp_path, "digits", contents(1))

    def full(now: str) -> None:
        if now == step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        CheckpointError, match=r"'digits' not written .*No space left.*round-000001 is still the newest"
    ):
        save(tmp_path, "digits", contents(2), full)
    found = find_latest(tmp_path, "digits")
    assert found is not None
    assert found.round == 1
    assert [path.name for path in (tmp_path / "digits").iterdir()] == ["round-000001"]


@pytest.mark.parametrize("step", STEPS + ["prune"])
def test_a_kill_leaves_a_whole_checkpoint_and_the_next_save_cleans_up(tmp_path: Path, step: str) -> None:
    save(tmp_path, "digits", contents(1))
    program = (
        "import os, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from test_checkpoints import contents; from notebook_cluster.checkpoints import save\n"
        "def kill(now):\n"
        "    if now == sys.argv[3]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "save(Path(sys.argv[2]), 'digits', contents(2), kill)\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path), step]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    found = find_latest(tmp_path, "digits")
    assert found is not None
    assert found.round == (2 if step == "prune" else 1)
    save(tmp_path, "digits", contents(3))
    assert not list((tmp_path / "digits").glob(".writing-*"))


@pytest.mark.skipif(sys.platform == "win32", reason="needs RLIMIT_FSIZE")
def test_a_file_that_cannot_grow_is_an_error_that_names_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, "digits", contents(1))
    program = (
        "import resource, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from test_checkpoints import contents; from notebook_cluster.checkpoints import save, CheckpointError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        "try: save(Path(sys.argv[2]), 'digits', contents(2))\n"
        "except CheckpointError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    output = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert "checkpoint 'digits' not written" in output.stdout, output.stderr
    found = find_latest(tmp_path, "digits")
    assert found is not None
    assert found.round == 1


@pytest.mark.parametrize("file", ["global.safetensors", "node-1-desk.safetensors", "manifest.json"])
def test_a_damaged_file_falls_back_to_the_one_before_and_says_so(tmp_path: Path, file: str) -> None:
    save(tmp_path, "digits", contents(1))
    folder, _ = save(tmp_path, "digits", contents(2))
    data = bytearray((folder / file).read_bytes())
    data[-1] ^= 1
    (folder / file).write_bytes(data)
    found = find_latest(tmp_path, "digits")
    assert found is not None
    assert found.round == 1
    assert len(found.warnings) == 1
    assert str(folder / file) in found.warnings[0]


def test_a_manifest_whose_text_is_damaged_is_passed_over_and_named(tmp_path: Path) -> None:
    save(tmp_path, "digits", contents(1))
    manifest = save(tmp_path, "digits", contents(2))[0] / "manifest.json"
    data = bytearray(manifest.read_bytes())
    data[data.index(b'": "') + 4] ^= 0x80
    manifest.write_bytes(data)
    found = find_latest(tmp_path, "digits")
    assert found is not None
    assert found.round == 1
    assert f"{manifest} is not readable" in found.warnings[0]


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_with_none_left_the_error_names_the_file(tmp_path: Path, damage: str) -> None:
    folder, _ = save(tmp_path, "digits", contents(1))
    if damage == "missing":
        (folder / "global.safetensors").unlink()
    else:
        (folder / "global.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no whole checkpoint 'digits': .*global\.safetensors"):
        find_latest(tmp_path, "digits")


def test_a_manifest_that_points_outside_is_refused(tmp_path: Path) -> None:
    folder, _ = save(tmp_path, "digits", contents(1))
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace("node-1-desk.safetensors", "../../secret.safetensors"))
    with pytest.raises(CheckpointError, match="secret"):
        find_latest(tmp_path, "digits")


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not usable"):
        save(tmp_path, "../digits", contents(1))


def test_the_room_imports_no_torch() -> None:
    program = "import sys, notebook_cluster.checkpoints; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"
    assert checkpoints.__doc__ is not None


def test_the_folder_of_all_checkpoints_is_closed_for_others_also_one_that_is_there(tmp_path: Path) -> None:
    for there in (False, True):
        folder = tmp_path / str(there) / "checkpoints"
        if there:
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        save(folder, "digits", contents(1))
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_linked_folder_of_checkpoints_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    (tmp_path / "checkpoints").symlink_to(shared)
    save(tmp_path / "checkpoints", "digits", contents(1))
    assert shared.stat().st_mode & 0o777 == 0o755


# ---- what was kept in the folders of other clusters ------------------------------------------------------------


def place(work: Path, cluster: str) -> Path:
    return work / cluster / "checkpoints"


def test_the_newest_kept_checkpoint_of_all_clusters_is_found_whatever_its_round(tmp_path: Path) -> None:
    own = place(tmp_path, "second")
    save(own, "model-kept", contents(70))
    save(place(tmp_path, "first-b4960602"), "model-kept", contents(51))
    newest, _ = save(place(tmp_path, "third"), "model-kept", contents(17))
    found = find_newest(own, "model-kept", tmp_path)
    assert found is not None
    assert found.path == newest
    assert [kept.folder for kept in kept_below(tmp_path)] == [newest]
    assert find_newest(own, "model-kept", None) == find_latest(own, "model-kept")


def test_a_damaged_one_is_passed_over_for_that_of_another_cluster(tmp_path: Path) -> None:
    whole, _ = save(place(tmp_path, "first"), "model-kept", contents(51))
    damaged, _ = save(place(tmp_path, "second"), "model-kept", contents(52))
    (damaged / "global.safetensors").write_bytes(b"spoilt")
    found = find_newest(place(tmp_path, "second"), "model-kept", tmp_path)
    assert found is not None
    assert found.path == whole
    (whole / "global.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint 'model-kept'"):
        find_newest(place(tmp_path, "second"), "model-kept", tmp_path)


def test_what_others_saved_themselves_is_not_looked_for(tmp_path: Path) -> None:
    save(place(tmp_path, "first"), "digits", contents(51))
    save(place(tmp_path, "first"), "text-kept", contents(3))
    own = place(tmp_path, "second")
    save(own, "mine", contents(1))
    assert find_newest(own, "digits", tmp_path) is None
    assert names(own, tmp_path) == ["mine", "text-kept"]


@pytest.mark.parametrize("linked", ["cluster", "checkpoints", "home", "round"])
def test_nothing_is_found_behind_a_link(tmp_path: Path, linked: str) -> None:
    """Whoever may write into one cluster's folder must not make another cluster read elsewhere."""
    work, outside = tmp_path / "work", tmp_path / "outside" / "checkpoints"
    folder, _ = save(outside, "model-kept", contents(51))
    target = {"cluster": outside.parent, "checkpoints": outside, "home": folder.parent, "round": folder}[linked]
    place_of = {
        "cluster": work / "first",
        "checkpoints": work / "first" / "checkpoints",
        "home": work / "first" / "checkpoints" / "model-kept",
        "round": work / "first" / "checkpoints" / "model-kept" / "round-000051",
    }[linked]
    place_of.parent.mkdir(parents=True)
    place_of.symlink_to(target)
    assert find_newest(place(work, "second"), "model-kept", work) is None
    assert kept_below(work) == []
