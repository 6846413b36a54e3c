"""A notebook that papermill runs in a batch job of Slurm: the two ways of docs/engines.md, word for word."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.command import COMMAND
from tests.conftest import shared_folders, wait_until
from tests.engines.running import Slurm, ask, no_slurm, slurm

pytest.importorskip("papermill")
pytestmark = pytest.mark.skipif(bool(no_slurm()), reason=no_slurm() or "there is one")

PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
LOOK = "%%on_all\nimport os\nprint(nc.node(), rank, world_size, os.environ['SLURM_JOB_ID'])"


@pytest.fixture(scope="module")
def engine() -> Iterator[Slurm]:
    with shared_folders() as root, pytest.MonkeyPatch.context() as patch, slurm() as running:
        (root / "work").mkdir()
        patch.chdir(root / "work")
        patch.setenv("TMPDIR", str(root / "work"))  # for the folders that the script's shells make
        # As one who has activated the environment.
        patch.setenv("PATH", str(Path(COMMAND).parent), prepend=":")
        yield running


def blocks() -> dict[str, list[str]]:
    """Kind -> what is to be typed, in the order of the page."""
    section = PAGE.read_text().partition("\n## A notebook as a batch job\n")[2].partition("\n## ")[0]
    found = re.findall(r"^```(\w+)\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return {kind: [text.strip() + "\n" for one, text in found if one == kind] for kind in ("bash", "python")}


def batch(engine: Slurm, script: str, *cells: str) -> str:
    """Write the notebook and the script, and have Slurm run that; the number of its job."""
    book: Any = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("hosts = 1", metadata={"tags": ["parameters"]}),
            *(nbformat.v4.new_code_cell(cell) for cell in cells),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(book, "notebook.ipynb")
    Path("out.ipynb").unlink(missing_ok=True)
    Path("job.sh").write_text(script)
    job = ask("sbatch", "--parsable", "--output=job.log", "job.sh").strip()
    assert job.isdigit()
    return job


def printed(cell: str) -> str:
    """What the cell with this source has printed, once all jobs are over."""
    (found,) = [one for one in nbformat.read("out.ipynb", as_version=4).cells if one.source == cell]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in found.outputs)


def wait_for_the_end(engine: Slurm) -> None:
    wait_until(lambda: not engine.jobs(), 120, lambda: f"no job: {engine.jobs()}, {Path('job.log').read_text()}")


def test_a_job_asks_slurm_for_hosts_and_gives_them_back(engine: Slurm) -> None:
    python = blocks()["python"]
    job = batch(engine, blocks()["bash"][0], python[0], python[1], LOOK, "%cluster stop")
    wait_for_the_end(engine)
    said = re.findall(r"^(n\d) \d 2 (\d+)$", printed(LOOK), flags=re.MULTILINE)
    assert len({node for node, _ in said}) == 2, Path("job.log").read_text()
    assert job not in {number for _, number in said}
    assert len({number for _, number in said}) == 2


def test_a_job_that_is_cancelled_leaves_no_host(engine: Slurm) -> None:
    python = blocks()["python"]
    job = batch(
        engine, blocks()["bash"][0], python[0], python[1], "%%on_all\nprint('begun')\nimport time; time.sleep(600)"
    )
    # The job, and two hosts.
    wait_until(lambda: list(engine.jobs().values()) == ["RUNNING"] * 3, 60, lambda: f"hosts: {engine.jobs()}")
    ask("scancel", job)
    wait_for_the_end(engine)


def test_the_nodes_of_one_allocation_are_a_cluster(engine: Slurm) -> None:
    python = blocks()["python"]
    job = batch(engine, blocks()["bash"][1], python[2], python[3], LOOK, python[4])
    wait_for_the_end(engine)
    said = re.findall(r"^(\w+) \d 3 (\d+)$", printed(LOOK), flags=re.MULTILINE)
    assert {number for _, number in said} == {job}, Path("job.log").read_text()
    assert len({node for node, _ in said} & {"n1", "n2", "n3"}) == 2
    assert "local" in {node for node, _ in said}
    assert not list(Path().glob("code-*"))
