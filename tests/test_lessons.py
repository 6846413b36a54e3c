"""The six lessons run as they are; each check says that an exercise is open, and with its answer that it is right."""

import copy
from pathlib import Path

import nbformat
import pytest

from tests.ipc_kernels import run_notebook
from tests.test_examples import EXAMPLES, assert_plain, text_of

LESSONS = sorted((EXAMPLES / "lessons").glob("*.ipynb"))
ENOUGH = {"1": "the model of all reads", "3": "every 50:", "5": "every 5: together"}
"""What a lesson's training says, before a percentage."""


def test_there_are_six() -> None:
    assert [lesson.name[0] for lesson in LESSONS] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_runs_and_its_answers_are_right(jupyter_dirs: Path, no_processes_left: str, lesson: Path) -> None:
    notebook = nbformat.read(lesson, as_version=4)
    answers, cells = notebook.metadata["answers"], {cell.id: cell for cell in notebook.cells}
    assert sorted(answers) == sorted(name for name in cells if name.startswith("exercise-") and "text" not in name)
    assert len(answers) == 3
    for name, answer in answers.items():
        given, check = copy.deepcopy(cells[name]), copy.deepcopy(cells[name.replace("exercise", "check")])
        given.id, given.source, check.id = f"{name}-answered", answer, f"{check.id}-answered"
        notebook.cells += [given, check]
    notebook.cells.append(nbformat.v4.new_code_cell("%cluster stop"))
    run_notebook(notebook, jupyter_dirs, timeout=240)
    assert_plain(notebook)
    for name in answers:
        check = name.replace("exercise", "check")
        assert text_of(notebook, check).splitlines()[-1].startswith("not yet"), check
        assert text_of(notebook, f"{check}-answered").splitlines()[-1] == "right", check
    said = "\n".join(text_of(notebook, cell.id) for cell in notebook.cells if cell.cell_type == "code")
    if words := ENOUGH.get(lesson.name[0]):
        assert int(said.split(words)[1].split("%")[0].split()[-1]) >= 75, said
    assert "0 rounds in which machines disagreed" in said or lesson.name[0] != "4"
