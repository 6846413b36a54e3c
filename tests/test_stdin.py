"""``input()`` and ``getpass()`` on nodes ask in the notebook, with the node's name."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.protocol.interaction import InputRequested, InputWithdrawn
from notebook_cluster.protocol.views import CellOutput
from tests.cluster import kernel_pid, text_of
from tests.conftest import wait_until
from tests.notebook_kernel import NotebookKernel
from tests.shared_notebook import error_of, lesson


@pytest.fixture(scope="module")
def notebook() -> Iterator[NotebookKernel]:
    with lesson() as kernel:
        yield kernel


def question(notebook: NotebookKernel) -> tuple[str, bool]:
    """(prompt, password) of the next question to the person at the notebook."""
    message: Any = notebook.client.get_stdin_msg(timeout=60)
    return message["content"]["prompt"], message["content"]["password"]


def test_answer_reaches_the_node_that_asked(notebook: NotebookKernel) -> None:
    cell = notebook.start("%%on 1\nprint('hello', input('your name? '))")
    assert question(notebook) == ("local-2: your name? ", False)
    notebook.client.input("Ada")
    shown = notebook.until(cell)
    assert shown.error is None
    assert "hello Ada" in shown.shown


def test_nodes_ask_one_after_the_other_each_with_its_name(notebook: NotebookKernel) -> None:
    cell = notebook.start("%%on_all\nnumber = int(input('number? '))\nprint('got', number)")
    answers = {"local: number? ": "10", "local-2: number? ": "11"}
    for _ in range(2):
        prompt, _ = question(notebook)
        notebook.client.input(answers.pop(prompt))
    assert notebook.until(cell).error is None
    assert notebook.works("%%on_all\nprint(number == 10 + rank)").count("True") == 1  # folded: the same on both


def test_password_is_asked_as_such_and_a_question_without_prompt_has_the_name(notebook: NotebookKernel) -> None:
    cell = notebook.start("%%on 0\nimport getpass\nlength = len(getpass.getpass('key: '))\nprint(length, input())")
    assert question(notebook) == ("local: key: ", True)
    notebook.client.input("secret")
    assert question(notebook) == ("local: ", False)
    notebook.client.input("x")
    shown = notebook.until(cell).shown
    assert "6 x" in shown
    assert "secret" not in shown


def test_end_of_file_is_passed_on(notebook: NotebookKernel) -> None:
    cell = notebook.start("%%on 0\ntry:\n    input('more? ')\nexcept EOFError:\n    print('no more')")
    question(notebook)
    notebook.client.input("\x04")
    assert "no more" in notebook.until(cell).shown


def test_others_are_shown_while_one_asks(notebook: NotebookKernel) -> None:
    cell = notebook.start("%%on_all\nif rank == 0: input('go on? ')\nelse: print('from the other', flush=True)")
    question(notebook)
    notebook.until(cell, "from the other")
    assert not cell.done
    notebook.client.input("yes")
    assert notebook.until(cell).error is None


def test_stop_during_a_question_ends_the_cell(notebook: NotebookKernel) -> None:
    cell = notebook.start("%%on_all\ninput('stop me ')")
    question(notebook)
    os.kill(notebook.pid, signal.SIGINT)
    assert notebook.until(cell).error.name == "KeyboardInterrupt"  # type: ignore[union-attr]
    assert "2" in notebook.works("%%on_all\nprint(1 + 1)")


def test_question_of_a_node_that_dies_is_withdrawn(notebook: NotebookKernel) -> None:
    with Cluster.attach() as cluster:
        pid = kernel_pid(cluster, "local-2")
    cell = notebook.start("%%on 1\ninput('dying ')")
    question(notebook)
    os.kill(pid, signal.SIGKILL)
    error = notebook.until(cell).error
    assert error is not None
    assert "local-2 was lost" in error.value
    notebook.works("%cluster restart local-2 --no-replay")


def test_without_anybody_to_ask_input_raises_and_says_what_to_do(notebook: NotebookKernel) -> None:
    cell = notebook.run("%%on 0\ninput('nobody? ')", allow_stdin=False)
    assert cell.error is not None
    assert "StdinNotImplementedError" in cell.error.value
    assert "%push sends what it needs" in cell.error.value
    notebook.works("handle = None")
    shown = notebook.works("%%on 0 --async -o handle\ninput('nobody? ')")
    assert shown
    assert "StdinNotImplementedError" in error_of(notebook, "handle.wait()")


def test_replay_does_not_ask_again_and_says_what_is_missing(notebook: NotebookKernel) -> None:
    cell = notebook.start("%%on_all\nanswer = input('once? ')")
    for _ in range(2):
        question(notebook)
        notebook.client.input("yes")
    assert notebook.until(cell).error is None
    notebook.works("%cluster restart local-2")
    with Cluster.attach() as cluster:
        texts = [event.text for event in cluster.state().events]
    assert any("it calls input(), which is not asked again; %push sends local-2 what it needs" in t for t in texts)


def test_question_goes_to_another_view_when_the_one_that_was_asked_has_gone(notebook: NotebookKernel) -> None:
    first, second = Cluster.attach(), Cluster.attach()
    try:
        stream = first.execute("print('got', input('who? '))", ("local",), stdin=True, replay=False)
        asked = wait_until(lambda: next_of(stream, InputRequested), 60, "the question")
        other = second.watch(stream.cell, stdin=True)
        second.answer_input(asked.id, "not asked")  # was put to the first view: dropped
        first.close()
        again = wait_until(lambda: next_of(other, InputRequested), 60, "the question to the other view")
        assert again.id == asked.id
        second.answer_input(again.id, "me")
        assert text_of([output for event in rest(other) for output in getattr(event, "outputs", [])]) == "got me\n"
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("how", ["the view leaves", "it watches no more"])
def test_node_gets_end_of_file_when_nobody_is_left_to_answer(notebook: NotebookKernel, how: str) -> None:
    first, second = Cluster.attach(), Cluster.attach()
    try:
        stream = first.execute("input('who? ')", ("local",), stdin=True, replay=False)
        wait_until(lambda: next_of(stream, InputRequested), 60, "the question")
        other = second.watch(stream.cell)
        if how == "the view leaves":
            first.close()
        else:
            stream.close()
        events = rest(other)
        assert events[-1].results["local"].error_name == "EOFError"
        notes = [event.note for event in events if getattr(event, "note", "")]
        assert "local asked 'who?' and no notebook is there to answer: EOFError" in notes
    finally:
        first.close()
        second.close()


def test_question_of_a_node_that_is_restarted_is_withdrawn_and_asked_again(notebook: NotebookKernel) -> None:
    with Cluster.attach() as view:
        # The other node keeps the cell running.
        source = "import time\nif rank == 0: print('got', input('who? '))\nelse:\n    while True: time.sleep(0.01)"
        stream = view.execute(source, stdin=True, replay=False)
        first = wait_until(lambda: next_of(stream, InputRequested), 60, "the question")
        view.restart("local", replay=False)
        assert wait_until(lambda: next_of(stream, InputWithdrawn), 60, "the withdrawal").id == first.id
        again = wait_until(lambda: next_of(stream, InputRequested), 60, "the question of the new kernel")
        view.answer_input(first.id, "nobody waits for this")
        view.answer_input(again.id, "me")
        wait_until(lambda: "got me" in text_of(getattr(next_of(stream, CellOutput), "outputs", [])), 60, "the answer")
        view.interrupt()
        assert rest(stream)[-1].status == "interrupted"


def next_of(stream: Any, kind: type) -> Any:
    """The next event if it is of this kind; others are passed over."""
    event = stream.get(0.02)
    return event if isinstance(event, kind) else None


def rest(stream: Any) -> list[Any]:
    """Every event up to the last one."""
    events: list[Any] = []

    def over() -> bool:
        event = stream.get(0.02)
        if event is not None:
            events.append(event)
        return hasattr(event, "results")

    wait_until(over, 60, "the end of the cell")
    return events
