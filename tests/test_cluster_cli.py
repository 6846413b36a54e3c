"""``notebook-cluster status|detach|stop`` in a terminal, against a cluster that a notebook uses."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import list_clusters
from notebook_cluster.client.start import NEWS_S
from notebook_cluster.security import runtime_directory
from tests.cluster import kill
from tests.command import run_command
from tests.conftest import marked_processes, wait_until
from tests.notebook_kernel import NotebookKernel

WAIT = "%%on_all\nimport time\nprint('begun', flush=True)\nwhile True: time.sleep(0.01)"


def command(*arguments: str) -> str:
    """Run ``notebook-cluster`` with ``arguments``, which must work; what it printed."""
    done = run_command(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def notebook(jupyter_dirs: Path, no_processes_left: str) -> Iterator[NotebookKernel]:
    """A notebook kernel with a running cluster ``lesson`` of two nodes."""
    kernel = NotebookKernel(jupyter_dirs)
    kernel.works("%load_ext notebook_cluster")
    kernel.works("%cluster start --local 2 --no-panel")
    yield kernel
    kernel.close()


def test_status_shows_the_nodes_of_one_cluster_or_of_all(notebook: NotebookKernel) -> None:
    for shown in (command("status"), command("status", "lesson")):
        assert shown.startswith("cluster lesson")
        assert {"local", "local-2"} <= set(shown.split())


def test_status_is_json_for_scripts_without_the_code_that_lets_machines_in(notebook: NotebookKernel) -> None:
    notebook.works("%cluster invite")
    (found,) = json.loads(command("status", "--json"))
    assert (found["name"], [node["name"] for node in found["nodes"]]) == ("lesson", ["local", "local-2"])
    assert {"jobs", "peers", "launches", "cell", "started"} <= found.keys()
    assert (found["invitation"], found["launches"]) == ("", [])
    assert command("status").count("--code") == 1
    notebook.works("%cluster invite --close")


def test_skip_ends_the_replay_of_a_cell(notebook: NotebookKernel) -> None:
    nothing = run_command("skip", "lesson", "local-2")
    assert nothing.stderr == "notebook-cluster: node 'local-2' replays no cell now: nothing to skip\n"
    notebook.works("%%on_all\nimport os, time\nwhile os.path.exists('hold'): time.sleep(0.01)")
    notebook.works("open('hold', 'w').close()")
    restart = notebook.start("%cluster restart local-2")
    wait_until(lambda: "replaying cell 1 of 1, " in command("status", "lesson"), 60, "the replay to be shown")
    assert command("skip", "lesson", "local-2") == (
        "cell 1 is skipped on local-2: %cluster restart local-2 --all-cells runs it again\n"
    )
    assert notebook.until(restart).error is None
    assert "without cell 1, which was skipped" in restart.shown
    assert "without cell 1, which was skipped" in command("status", "lesson")


def test_detach_frees_the_cell_that_waits_and_the_nodes_go_on(notebook: NotebookKernel) -> None:
    waiting = notebook.until(notebook.start(WAIT), "begun")
    assert "%cluster attach lesson" in command("detach", "lesson")
    assert notebook.until(waiting).error is None
    assert "detached: cell 1 goes on" in waiting.shown
    assert "running" in command("status", "lesson")
    command("stop", "lesson")


def test_stop_ends_every_process_and_the_cell_that_waits(notebook: NotebookKernel, no_processes_left: str) -> None:
    waiting = notebook.until(notebook.start(WAIT), "begun")
    assert command("stop", "lesson") == "cluster lesson is over\n"
    assert list_clusters() == []
    assert notebook.until(waiting).error is not None
    for told in ("cluster 'lesson' has ended: stopped (%cluster start begins a new one)", "no cluster is running"):
        after = notebook.run("%%on_all\n1")
        assert after.error is not None
        assert told in after.error.value
    wait_until(lambda: list(marked_processes(no_processes_left)) == [notebook.pid], 60, "the cluster's processes")


def test_a_coordinator_that_was_killed_is_named_with_what_brings_it_back(notebook: NotebookKernel) -> None:
    notebook.works("%%on_all\n1")
    (file,) = list_clusters()
    kill(file.pid)
    line = "the coordinator of cluster 'lesson' was killed: %cluster start lesson in a notebook brings it back, or "
    assert command("status").startswith(line)
    assert json.loads(command("status", "--json")) == []
    folder = runtime_directory() / "clusters" / "lesson"
    written = {path: path.stat().st_mtime for path in folder.glob("run.journal*")}
    for path, moment in written.items():
        os.utime(path, (moment, moment - NEWS_S))
    assert command("status").startswith("no cluster runs")
    for path, moment in written.items():
        os.utime(path, (moment, moment))
    for arguments in (("status", "lesson"), ("stop", "lesson")):
        refused = run_command(*arguments)
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"notebook-cluster: {line}")
    notebook.works("%cluster start --no-panel")
    command("stop", "lesson")
    assert command("status").startswith("no cluster runs")
