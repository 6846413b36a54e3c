"""What a notebook shows of real nodes: folded text, marked words, displays that change, each below its node's name."""

import re
from collections.abc import Iterator

import pytest

from tests.notebook_kernel import Cell, NotebookKernel
from tests.shared_notebook import lesson

SHOW_FIGURES = """%%on_all
from IPython.display import HTML, display, update_display
figure = display(HTML(f"<b>before {rank}</b>"), display_id="figure")
if rank:
    update_display(HTML(f"<b>after {rank}</b>"), display_id="figure")
"""


def html_of(cell: Cell) -> dict[str, str]:
    """Display id -> its HTML, in the order in which they came."""
    return {key: bundle.get("text/html", "") for key, bundle in cell.bundles.items()}


@pytest.fixture(scope="module")
def notebook() -> Iterator[NotebookKernel]:
    with lesson(3) as kernel:
        yield kernel


def test_text_of_most_nodes_is_one_block_and_words_that_differ_are_marked(notebook: NotebookKernel) -> None:
    cell = notebook.run("%%on_all\nprint('read', 90 if rank == 2 else 100, 'rows')")
    assert cell.shown == "[2 of 3 nodes: local, local-2]\nread 100 rows\n[local-3 · rank 2]\nread 90 rows"
    assert re.findall("<mark[^>]*>(.*?)</mark>", "".join(html_of(cell).values())) == ["90"]


def test_the_same_traceback_is_shown_once(notebook: NotebookKernel) -> None:
    cell = notebook.run("%%on_all\nrows = []\nrows[3]")
    assert cell.error is not None
    assert "all 3 nodes: IndexError: list index out of range" in cell.error.value
    assert cell.shown.startswith("[all 3 nodes]\n")
    assert cell.shown.count("----> 2 rows[3]") == 1


def test_the_same_warning_is_shown_once_and_names_the_cell(notebook: NotebookKernel) -> None:
    cell = notebook.run("%%on_all\nimport warnings\nwarnings.warn('rows are missing')")
    head, said, line = cell.shown.splitlines()
    assert head == "[all 3 nodes]"
    assert re.fullmatch(r"Cell In\[\d+\]:2: UserWarning: rows are missing", said)
    assert line == "  warnings.warn('rows are missing')"


def test_a_line_that_is_written_over_is_shown_as_it_was_last(notebook: NotebookKernel) -> None:
    shown = notebook.works("%%on_all\nfor step in range(50): print(f'\\rnode {rank} step {step}', end='')\nprint()")
    assert [line for line in shown.splitlines() if "step" in line] == [f"node {rank} step 49" for rank in range(3)]


def test_nodes_with_the_same_display_id_change_their_own_display_also_from_a_later_cell(
    notebook: NotebookKernel,
) -> None:
    cell = notebook.run(SHOW_FIGURES)
    assert cell.error is None
    figures = {key: html for key, html in html_of(cell).items() if "<b>" in html}
    said = {key: re.findall("<b>(.*?)</b>", html) for key, html in figures.items()}
    assert sorted(said.values()) == [["after 1"], ["after 2"], ["before 0"]]
    later = notebook.run("%%on 0\nfigure.update(HTML('<b>later</b>'))")
    assert later.error is None
    changed = {key for key, html in html_of(later).items() if "<b>later</b>" in html}
    assert changed == {key for key, words in said.items() if words == ["before 0"]}


def test_clear_output_empties_what_its_own_node_showed(notebook: NotebookKernel) -> None:
    shown = notebook.works(
        "%%on_all\nfrom IPython.display import clear_output\nprint('old', rank)\n"
        "if rank == 1:\n    clear_output()\n    print('new')"
    )
    assert [line for line in shown.splitlines() if not line.startswith("[")] == ["old 0", "new", "old 2"]


def test_a_table_of_each_node_stands_behind_its_name(notebook: NotebookKernel) -> None:
    cell = notebook.run("%%on_all\nimport pandas\npandas.DataFrame({'rows': [rank + 40]})")
    assert cell.error is None
    page = re.sub("<[^>]*>", " ", " ".join(html_of(cell).values())).split()
    words = [word for word in page if word in ("local", "local-2", "local-3", "40", "41", "42")]
    assert sorted(zip(words[::2], words[1::2], strict=True)) == [("local", "40"), ("local-2", "41"), ("local-3", "42")]
    assert "".join(html_of(cell).values()).count("<table") == 3
