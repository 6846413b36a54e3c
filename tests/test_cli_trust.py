"""``notebook-cluster trust`` as people type it."""

from pathlib import Path

import pytest

from notebook_cluster.security import (
    Trusted,
    agent_directory,
    fingerprint,
    load_identity,
    new_identity,
    trusted_coordinators,
    trusted_peers,
)
from tests.command import run_command


def entry(name: str, owner: str, address: str = "") -> Trusted:
    return Trusted(name, new_identity().public_key, owner, address, 1.7e9)


def agent(directory: Path) -> Path:
    """``directory`` as the data folder of an agent that was shared once."""
    load_identity(directory)
    return directory


def test_nobody_is_trusted_at_first(jupyter_dirs: Path) -> None:
    listed = run_command("trust", "list")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert listed.stdout.startswith("nobody is trusted")


def test_both_directions_are_listed(jupyter_dirs: Path) -> None:
    mini = entry("mini", "anna@mini", "192.0.2.7:4711")
    trusted_peers().add(mini)
    teacher = entry("lesson", "teacher@laptop")
    trusted_coordinators(agent(agent_directory("desk"))).add(teacher)
    elsewhere = entry("other", "bob@tower")
    trusted_coordinators(agent(jupyter_dirs / "elsewhere")).add(elsewhere)

    listed = run_command("trust", "list", "--data-dir", str(jupyter_dirs / "elsewhere"))
    assert (listed.returncode, listed.stderr) == (0, "")
    row = next(line for line in listed.stdout.splitlines() if "anna@mini" in line)
    assert all(word in row for word in ("your notebooks may use it", "mini", fingerprint(mini.key), "192.0.2.7:4711"))
    row = next(line for line in listed.stdout.splitlines() if "teacher@laptop" in line)
    assert all(word in row for word in ("may run code on desk", "lesson", fingerprint(teacher.key), "2023-11-1"))
    assert "bob@tower" in listed.stdout
    assert "bob@tower" not in run_command("trust", "list").stdout


@pytest.mark.parametrize("what", ["lesson", "teacher@laptop", "fingerprint"])
def test_trust_is_taken_back_by_name_owner_or_fingerprint(jupyter_dirs: Path, what: str) -> None:
    directory = agent(agent_directory("desk"))
    teacher, other = entry("lesson", "teacher@laptop"), entry("course", "bob@tower")
    for one in (teacher, other):
        trusted_coordinators(directory).add(one)
    done = run_command("trust", "remove", fingerprint(teacher.key) if what == "fingerprint" else what)
    assert (done.returncode, done.stderr) == (0, "")
    assert "removed: lesson of teacher@laptop" in done.stdout
    assert "in force at once" in done.stdout
    assert trusted_coordinators(directory).entries() == [other]


def test_removing_somebody_unknown_names_those_who_are_trusted(jupyter_dirs: Path) -> None:
    trusted_peers().add(entry("mini", "anna@mini"))
    done = run_command("trust", "remove", "mimi")
    assert done.returncode == 1
    assert done.stderr == (
        "notebook-cluster: nobody with name, owner or fingerprint 'mimi' is trusted: trusted are mini\n"
    )


def test_a_folder_that_is_no_agents_is_refused_and_left_alone(jupyter_dirs: Path) -> None:
    folder = jupyter_dirs / "photos"
    folder.mkdir()
    folder.chmod(0o755)
    done = run_command("trust", "list", "--data-dir", str(folder))
    assert done.returncode == 1
    assert "holds no agent" in done.stderr
    assert folder.stat().st_mode & 0o777 == 0o755


def test_a_damaged_store_is_named(jupyter_dirs: Path) -> None:
    store = trusted_peers()
    store.add(entry("mini", "anna@mini"))
    store.path.write_text("[{]")
    done = run_command("trust", "list")
    assert done.returncode == 1
    assert str(store.path) in done.stderr
    assert len(done.stderr.splitlines()) == 1
