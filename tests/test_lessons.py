"""The six lessons run; each check says that an exercise is open, and with its answer that it is right.

Those in which nobody dies share a kernel and a cluster, that of the first: starting nodes takes longer than a lesson.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.ipc_kernels import run_notebook
from tests.test_examples import EXAMPLES, assert_plain, text_of

LESSONS = {lesson.name[0]: lesson for lesson in sorted((EXAMPLES / "lessons").glob("*.ipynb"))}
DIES = "4"
ENOUGH = {"1": "the model of all reads", "3": "every 50:", "5": "every 5: together"}
"""What a lesson's training says, before a percentage."""


def test_there_are_six() -> None:
    assert list(LESSONS) == ["1", "2", "3", "4", "5", "6"]


def cells_of(number: str, first: bool) -> list[Any]:
    """The cells of a lesson, ids with its number, and behind them each exercise with its answer and its check."""
    notebook = nbformat.read(LESSONS[number], as_version=4)
    answers, cells = notebook.metadata["answers"], {cell.id: cell for cell in notebook.cells}
    assert sorted(answers) == ["exercise-1", "exercise-2", "exercise-3"]
    assert cells["start"].source == f"%cluster start lesson-{number} --fake 3"
    made = [cell for cell in notebook.cells if first or cell.id not in ("load", "start")]
    for name, answer in answers.items():
        given, check = copy.deepcopy(cells[name]), copy.deepcopy(cells[name.replace("exercise", "check")])
        given.id, given.source, check.id = f"{name}-answered", answer, f"{check.id}-answered"
        made += [given, check]
    for cell in made:
        cell.id = f"lesson-{number}-{cell.id}"
    return made


@pytest.mark.timeout(400)
@pytest.mark.parametrize("numbers", [[number for number in LESSONS if number != DIES], [DIES]], ids="-".join)
def test_lessons_run_and_their_answers_are_right(
    jupyter_dirs: Path, no_processes_left: str, numbers: Sequence[str]
) -> None:
    cells = [cell for number in numbers for cell in cells_of(number, number == numbers[0])]
    notebook = nbformat.v4.new_notebook(cells=[*cells, nbformat.v4.new_code_cell("%cluster stop")])
    run_notebook(notebook, jupyter_dirs, timeout=240)
    assert_plain(notebook)
    for number in numbers:
        for exercise in range(1, 4):
            check = f"lesson-{number}-check-{exercise}"
            assert text_of(notebook, check).splitlines()[-1].startswith("not yet"), check
            assert text_of(notebook, f"{check}-answered").splitlines()[-1] == "right", check
        code = [cell.id for cell in cells if cell.cell_type == "code" and f"lesson-{number}-" in cell.id]
        said = "\n".join(text_of(notebook, cell) for cell in code)
        if words := ENOUGH.get(number):
            assert int(said.split(words)[1].split("%")[0].split()[-1]) >= 75, said
        assert "0 rounds in which machines disagreed" in said or number != DIES
