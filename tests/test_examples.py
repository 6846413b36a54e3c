"""The example notebooks run as they are, and ``make demo``'s driver says the truth about its run."""

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.conftest import wait_until
from tests.engines.running import no_slurm, slurm
from tests.ipc_kernels import run_notebook

EXAMPLES = Path(__file__).parents[1] / "example_notebooks"
HIDDEN = "import demo_slurm; demo_slurm.PROGRAMS = ('no-slurm',); import sys; sys.exit(demo_slurm.main())"
"""The demo where a program is missing: /usr/sbin is looked into whatever PATH says."""


def run(name: str, folder: Path, *, instead: tuple[str, str] | None = None, again: Sequence[str] = ()) -> Any:
    """The notebook, executed by nbclient in ``folder``; ``instead``: words of it, and others in their place; ``again``:
    ids of cells that are run once more at its end, as ``ID-again``."""
    source = (EXAMPLES / name).read_text()
    if instead is not None:
        assert source.count(instead[0]) == 1
        source = source.replace(*instead)
    notebook = nbformat.reads(source, as_version=4)
    for cell in [copy.deepcopy(cell) for cell in notebook.cells if cell.id in again]:
        cell.id = f"{cell.id}-again"
        notebook.cells.append(cell)
    run_notebook(notebook, folder, timeout=240)
    return notebook


def text_of(notebook: Any, cell: str) -> str:
    """Everything that the cell with this id printed or displayed, as plain text."""
    (found,) = [one for one in notebook.cells if one.id == cell]
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in found.outputs]
    return "\n".join(texts)


def assert_plain(notebook: Any) -> None:
    """No errors, and no output that needs a running widget to be seen."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert not {kind for kind in kinds if "widget" in kind or "javascript" in kind}


def number_after(text: str, words: str) -> float:
    """The number that follows ``words``."""
    return float(text.split(words, 1)[1].split()[0].strip(",;"))


@pytest.mark.timeout(400)
def test_demo_trains_on_three_nodes_found_over_mdns(no_processes_left: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--output", str(tmp_path), "--runs", "1"],
        capture_output=True, text=True, timeout=360, env=os.environ.copy(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["nodes"] == 3
    assert summary["found_by"] == "mdns"
    assert {"mini", "desk"} < set(summary["peers"])
    assert summary["hash_mismatches"] == 0
    assert summary["rounds"] >= 30
    assert summary["test_accuracy"] >= 0.95
    assert summary["together"] == summary["test_accuracy"] >= summary["alone"] + 0.05
    assert summary["alone"] == summary["single_node_accuracy"] > 0.6
    assert 0 < summary["bytes_sent_per_node"] < summary["bytes_data_parallel"] / 30
    assert summary["seconds_on_20_mbit"] == pytest.approx(3 * summary["bytes_sent_per_node"] * 8 / 20e6, abs=0.1)
    assert summary["seconds_data_parallel"] == pytest.approx(3 * summary["bytes_data_parallel"] * 8 / 20e6, abs=0.1)
    assert "found mini over mDNS" in done.stdout
    assert_plain(nbformat.read(tmp_path / "01_quickstart.ipynb", as_version=4))
    page = (tmp_path / "01_quickstart.html").read_text()
    assert page.index("Test accuracy, on pictures of all three scanners") < page.index("One model, three machines")
    assert 'class="nbc-chart"' in page[: page.index("One model, three machines")]


@pytest.mark.timeout(400)
def test_demo_fails_with_a_reason_when_an_agent_cannot_start(no_processes_left: str, tmp_path: Path) -> None:
    broken = "import demo; demo.AGENTS = ('mini', 'no good name'); import sys; sys.exit(demo.main())"
    done = subprocess.run(
        [sys.executable, "-c", broken, "--output", str(tmp_path)],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(EXAMPLES)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "demo failed: agent no good name ended with exit code" in done.stdout
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.timeout(400)
def test_quickstart_runs_alone_on_one_machine(jupyter_dirs: Path, no_processes_left: str) -> None:
    # One training of each kind in place of three.
    notebook = run("01_quickstart.ipynb", jupyter_dirs, instead=("RUNS = 3", "RUNS = 1"), again=["alone", "chart"])
    assert_plain(notebook)
    assert text_of(notebook, "hello").count("of 3 and computes on") == 3
    trained = text_of(notebook, "together")
    assert trained.startswith("[all 3 nodes]")
    assert trained.count("test accuracy") == 1
    assert number_after(trained, "test accuracy ") >= 0.95 > number_after(text_of(notebook, "alone"), "test accuracy ")
    assert "all machines: 0.9" in text_of(notebook, "chart")
    assert "3 nodes, 30 rounds, 0 rounds in which nodes disagreed" in text_of(notebook, "traffic")
    assert "is gone; the others are at round" in text_of(notebook, "back")
    # one more where the node that came back has steps left when the others have ended theirs
    assert re.search(r"round 9[01] of 90, 0 rounds in which nodes disagreed", text_of(notebook, "back"))
    assert "one-0: test accuracy" in text_of(notebook, "alone-again")
    assert "after 30 rounds" in text_of(notebook, "alone-again")
    said = [text_of(notebook, cell).split("one machine: ")[1].split("\n")[0] for cell in ("chart", "chart-again")]
    assert said[0] == said[1]  # a second run trains the same model anew
    assert "quickstart · ready" in text_of(notebook, "status")  # it is the reader who stops the cluster


@pytest.mark.timeout(400)
def test_text_notebook_learns_on_four_nodes(jupyter_dirs: Path, no_processes_left: str) -> None:
    # One epoch is enough to be below the bound, and each takes 20 seconds of processor time.
    notebook = run("02_text.ipynb", jupyter_dirs, instead=("epochs=2", "epochs=1"))
    assert_plain(notebook)
    trained = text_of(notebook, "train")
    assert trained.startswith("[all 4 nodes]")
    assert trained.count("test loss") == 1
    assert number_after(trained, "test loss ") < 2.4
    assert "    def " in text_of(notebook, "sample")


def test_cells_notebook_shows_what_a_cell_on_several_nodes_looks_like(
    jupyter_dirs: Path, no_processes_left: str
) -> None:
    notebook = run("03_cells.ipynb", jupyter_dirs)
    assert text_of(notebook, "text") == "[all 3 nodes]\n3 nodes read the data"
    labels = ("[local · rank 0]", "[local-2 · rank 1]", "[local-3 · rank 2]")
    for cell in ("differing", "plot", "bar"):
        assert [text_of(notebook, cell).count(label) for label in labels] == [1, 1, 1], cell
    assert text_of(notebook, "bar").count("100%") == 3
    (plot,) = [cell for cell in notebook.cells if cell.id == "plot"]
    pictures = [output.data["text/html"] for output in plot.outputs if "svg+xml" in output.data.get("text/html", "")]
    assert len(set(pictures)) == 3
    assert "3 differ: curve, losses, share" in text_of(notebook, "vars")
    (failing,) = [cell for cell in notebook.cells if cell.id == "error"]
    assert failing.outputs[-1].ename == "RemoteError"
    assert "local-2 · rank 1: ValueError: local-2 has no data" in failing.outputs[-1].evalue
    assert "has ended" in text_of(notebook, "stop")
    assert len(nbformat.writes(notebook)) < 60_000


@pytest.mark.timeout(600)
def test_the_finetuned_adapter_of_three_nodes_is_better_than_the_base_and_any_single_node(
    jupyter_dirs: Path, no_processes_left: str
) -> None:
    pytest.importorskip("peft")
    sizes = "LAYERS, WIDTH, BATCH, BASE_STEPS, STEPS, RATE = "
    smaller = (f"{sizes}6, 256, 8, 240, 120", f"{sizes}2, 64, 16, 200, 160")  # five million parameters take minutes
    notebook = run("05_finetune.ipynb", jupyter_dirs, instead=smaller)
    assert_plain(notebook)
    base = number_after(text_of(notebook, "base"), "held-out documentation: ")
    together = number_after(text_of(notebook, "together"), "held-out documentation: ")
    best = number_after(text_of(notebook, "alone"), "the best single node: ")
    assert together <= 0.9 * base
    assert together <= best
    waited = r"(\[cluster finetune\]\n(\S+ waits in .* for .*\n)+)?"  # on a busy machine
    assert re.match(waited + r"\[all 3 nodes\]\n", text_of(notebook, "together"))
    assert number_after(text_of(notebook, "traffic"), "a round of the adapter: ") < 0.2
    assert "held-out loss as before: True" in text_of(notebook, "save")


@pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "there is one")
@pytest.mark.timeout(400)
def test_slurm_notebook_trains_grows_shrinks_and_leaves_no_job(jupyter_dirs: Path, no_processes_left: str) -> None:
    with slurm() as engine:
        notebook = run("06_slurm.ipynb", jupyter_dirs)
        assert_plain(notebook)
        assert text_of(notebook, "wait").strip() == "here: n1, n2"
        assert "2 running" in text_of(notebook, "status")
        assert text_of(notebook, "hello").count("rank 0 of 2, computes on") == 1
        assert number_after(text_of(notebook, "train"), "test accuracy ") >= 0.9
        assert "checkpoints/digits/round-" in text_of(notebook, "checkpoint")
        assert "accuracy 0.9" in text_of(notebook, "again")
        assert "on 3 nodes" in text_of(notebook, "again")
        assert text_of(notebook, "shrink") == "given back: n3\n"
        assert "n3" not in text_of(notebook, "status-again").partition("slurm ")[0]
        assert "has ended" in text_of(notebook, "stop")
        wait_until(lambda: not engine.jobs(), what=lambda: f"no job: {engine.jobs()}")


@pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "there is one")
@pytest.mark.timeout(400)
def test_slurm_demo_trains_on_three_nodes_and_leaves_nothing(no_processes_left: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo_slurm.py"), "--output", str(tmp_path), "--epochs", "1"],
        capture_output=True, text=True, timeout=360, env=os.environ.copy(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["nodes"] == 3
    assert summary["peers"] == ["n1", "n2", "n3"]
    assert summary["found_by"] == "slurm"
    assert summary["hash_mismatches"] == 0
    assert summary["rounds"] > 10
    assert summary["test_loss"] < 2.4
    assert 0 < summary["bytes_sent_per_node"] < summary["bytes_data_parallel"] / 30
    assert "nothing is left in the queue" in done.stdout
    assert_plain(nbformat.read(tmp_path / "02_text.ipynb", as_version=4))


def test_slurm_demo_says_how_slurm_is_installed_where_it_is_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, "--output", str(tmp_path)],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(EXAMPLES)}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "demo failed: it needs Slurm (no-slurm not found): `make engines`" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tutorial", ["lesson", "two-pcs", "mac-and-gpu"])
def test_a_tutorial_runs_as_it_stands(jupyter_dirs: Path, no_processes_left: str, tutorial: str) -> None:
    text = (EXAMPLES.parent / "docs" / "tutorials" / f"{tutorial}.md").read_text()
    cells = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    run_notebook(notebook, jupyter_dirs, timeout=240)
    assert_plain(notebook)
    said = "\n".join(text_of(notebook, cell.id) for cell in notebook.cells)
    if tutorial == "lesson":
        alone = [float(share) for share in re.findall(r"alone reads (\d+)% of the test", said)]
        assert (len(alone), max(alone) < 50) == (3, True)
        assert number_after(said.replace("%", " "), "together we read ") >= 85
        assert (jupyter_dirs / "lesson.html").exists()
    else:
        assert float(re.findall(r"([\d.]+) of the test after", said)[0]) >= 0.85
    assert "has ended" in said


def test_overnight_notebook_finds_the_whole_night_again(jupyter_dirs: Path, no_processes_left: str) -> None:
    notebook = run("06_overnight.ipynb", jupyter_dirs)
    assert_plain(notebook)
    assert "cluster night is led from box" in text_of(notebook, "close")
    shown = text_of(notebook, "morning")
    assert "attached to cluster 'night'" in shown
    rounds = [int(line.removeprefix("round ")) for line in shown.splitlines() if line.startswith("round ")]
    assert sorted(set(rounds)) == list(range(1, 41))
    assert number_after(shown, "accuracy ") > 0.8
    assert "led from box: it goes on without this machine" in text_of(notebook, "status")
    assert "cluster 'night' is led from this machine now" in text_of(notebook, "hand-over-local")
