"""The project keeps the promises it makes to people who read, install or import it."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from notebook_cluster.protocol import VERSION

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "notebook_cluster"
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "example_notebooks").glob("*.ipynb"))


def imported_by(statement: str) -> set[str]:
    """Top-level modules in a new interpreter after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not imported_by("import notebook_cluster") & {"torch", "zmq", "numpy", "mlx", "plotly", "jupyter_client"}


@pytest.mark.parametrize("process", ["agent.service", "agent.__main__", "coordinator.service", "coordinator.__main__"])
def test_agent_and_coordinator_do_not_import_a_training_library(process: str) -> None:
    assert not imported_by(f"import notebook_cluster.{process}") & {"torch", "mlx", "plotly", "ipywidgets"}


def test_a_node_starts_without_torch_and_numpy() -> None:
    assert not imported_by("import notebook_cluster.node") & {"torch", "numpy", "mlx"}


def test_the_version_is_the_same_everywhere() -> None:
    assert version("notebook-cluster") == VERSION


def test_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        wanted = set(re.findall(r"^\s*make ([a-z]+)", document.read_text(), re.MULTILINE))
        assert wanted <= targets, f"{document.name} names {wanted - targets}, which the Makefile does not have"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_local_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_only_subcommands_that_exist(document: Path) -> None:
    from notebook_cluster.magics.grammar import COMMANDS

    named = set(re.findall(r"%cluster ([a-z]+(?:-[a-z]+)*)", document.read_text()))
    assert named <= set(COMMANDS)


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: path.name)
def test_each_room_says_its_purpose_what_it_imports_and_who_calls_it(room: Path) -> None:
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    assert "May import" in text
    assert "Called by" in text


def test_all_rooms_of_the_layer_contract_are_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract, *_ = project["tool"]["importlinter"]["contracts"]
    named = {name for layer in contract["layers"] for name in re.findall(r"notebook_cluster\.(\w+)", layer)}
    assert named == {room.name for room in ROOMS}


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["test"], *extras["lab"], *extras["mlx"]]
    names = {re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted}  # type: ignore[index]
    assert names <= pinned


def test_sources_have_no_leftovers() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK|breakpoint\(\)|pdb\.set_trace)\b")
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "example_notebooks").glob("*.py")]
    found = [str(path.relative_to(ROOT)) for path in sources if words.search(path.read_text())]
    assert not found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_saved_clean_and_end_their_cluster_or_say_how(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    # In the quickstart the reader goes on with it.
    ended = "".join(code[-1]["source"]) == "%cluster stop"
    assert ended or "`%cluster stop`" in "".join(cells[-1]["source"])


def test_the_reference_is_as_the_magics_and_the_command_line_are() -> None:
    from docs.reference import PAGE, page

    assert PAGE.read_text() == page(), "python -m docs.reference writes it anew"
