"""Who keeps a cell waiting: nodes that fail, finish, die or come back while others wait, and ``--timeout``."""

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from notebook_cluster.client import ClusterError
from notebook_cluster.coordinator.cells.starting import Starting
from notebook_cluster.journal.events import CellNodeEnded
from notebook_cluster.journal.state import Cell, Node
from tests.cluster import Watcher, kill, node
from tests.conftest import wait_until
from tests.shared_notebook import SharedNotebook, shared_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    with shared_notebook("--local 3") as started:
        yield started


@pytest.fixture(autouse=True)
def nothing_runs_on(notebook: SharedNotebook) -> Iterator[None]:
    """A test that fails must not keep the next ones waiting."""
    yield
    with notebook.attach() as view:
        state = view.state()
        if state.queued or (state.cell is not None and state.cell.status == "running"):
            view.interrupt()


HOLD = "\nimport os, time\nwhile not os.path.exists({path!r}): time.sleep(0.01)\n"


def held(notebook: SharedNotebook, name: str) -> str:
    """Source that waits in a node until ``let_go`` is called with ``name``."""
    path = notebook.work / name
    path.unlink(missing_ok=True)
    return HOLD.format(path=str(path))


def let_go(notebook: SharedNotebook, name: str) -> None:
    (notebook.work / name).touch()


def test_a_node_that_raises_is_named_while_others_compute_and_ends_those_that_wait(notebook: SharedNotebook) -> None:
    hold = held(notebook, "raise").replace("\n", "\n    ").rstrip() + "\n"
    cell = notebook.start(f"%%on_all\nif rank == 1: raise ValueError('no data')\nif rank == 0:{hold}nc.barrier()")
    # local-3 waits in the barrier and ends at once; local computes on, so the cell goes on.
    notebook.kernel.until(cell, "local-2 raised ValueError: no data; still running: local")
    assert not cell.done
    let_go(notebook, "raise")
    notebook.kernel.until(cell)
    assert cell.error is not None
    lines = cell.error.value.splitlines()
    assert lines[0].endswith("failed on 3 of 3 nodes")
    assert lines[1] == "  local-2 · rank 1: ValueError: no data"
    assert lines[2] == "  local, local-3: PeerLost: local-2 raised ValueError: no data"


def test_a_node_that_finished_is_named_and_those_that_wait_for_it_end(notebook: SharedNotebook) -> None:
    error = notebook.fails("%%on_all\nif rank != 1: nc.barrier()")
    # One of the two may hear first that the other has stopped for the same reason.
    assert "PeerLost: local-2 finished the cell without this barrier" in error
    assert error.count("local-2 finished the cell without this barrier") == (1 if "local, local-3: " in error else 2)


def test_a_node_that_is_late_is_named(notebook: SharedNotebook) -> None:
    hold = held(notebook, "late").replace("\n", "\n    ").rstrip() + "\n"
    cell = notebook.start(f"%%on_all\nif rank == 1:{hold}nc.barrier()")
    notebook.kernel.until(cell, "local, local-3 wait in barrier for local-2, which still computes")
    let_go(notebook, "late")
    assert notebook.kernel.until(cell).error is None


def test_a_node_that_dies_is_told_with_its_last_words_and_ends_those_that_wait(notebook: SharedNotebook) -> None:
    error = notebook.fails(
        "%%on_all --no-replay\nimport os\n"
        "if rank == 1:\n    os.system('echo out of luck >&2')\n    os._exit(3)\n"
        "nc.all_reduce(1.0)"
    )
    assert "  local-2 was lost: exit code 3; %cluster restart local-2 brings it back\n" in error
    assert "\n    | out of luck\n" in error
    assert "local, local-3: PeerLost: local-2 was lost: exit code 3" in error
    assert "local-2" in notebook.works("%cluster restart local-2")
    assert "[all 3 nodes]\nOut: 3" in notebook.works("%%on_all\nworld_size")


def test_a_node_that_restarts_in_mid_cell_runs_the_cell_again(notebook: SharedNotebook) -> None:
    hold = held(notebook, "restart")
    with notebook.attach() as view:
        watcher = Watcher(view.execute(f"print('began', flush=True){hold}print('ended')"))
        watcher.wait_for("began", "local-2")
        view.restart("local-2", replay=False)
        wait_until(lambda: watcher.text("local-2").count("began") == 2, 60, "local-2 to begin again")
        let_go(notebook, "restart")
        ended = watcher.wait_end()
        assert {name: result.status for name, result in ended.results.items()} == dict.fromkeys(
            ("local", "local-2", "local-3"), "ok"
        )
        assert watcher.text("local-2").count("ended") == 1


def test_a_node_that_is_added_in_mid_cell_runs_the_cell_too(notebook: SharedNotebook) -> None:
    hold = held(notebook, "added")
    with notebook.attach() as view:
        watcher = Watcher(view.execute(f"print('began', flush=True){hold}print('ended')", replay=False))
        watcher.wait_for("began", "local")
        assert view.add("local", 1) == ["local-4"]
        watcher.wait_for("began", "local-4")
        let_go(notebook, "added")
        assert watcher.wait_end().results["local-4"].status == "ok"
        view.remove("local-4")


def test_a_killed_node_that_computes_alone_ends_the_cell_for_the_others_in_time(notebook: SharedNotebook) -> None:
    with notebook.attach() as view:
        _, outputs = view.run("import os; print(os.getpid())", ("local-3",), replay=False)
        pid = int(outputs[0].content["text"])
        watcher = Watcher(view.execute("print('in', flush=True)\nnc.barrier() if rank else None\nnc.barrier()"))
        watcher.wait_for("in", "local-3")
        kill(pid)
        ended = watcher.wait_end(20)
        assert ended.results["local-3"].status == "lost"
        assert "SIGKILL" in ended.results["local-3"].reason
        view.restart("local-3")
        wait_until(lambda: node(view.state(), "local-3").condition == "ok", 60, "local-3 to be back")


# ---- --timeout


def test_timeout_interrupts_the_cell_and_names_who_was_late(notebook: SharedNotebook) -> None:
    error = notebook.fails("%%on_all --timeout 0.5\nimport time\nif rank == 1: time.sleep(600)")
    assert error.startswith("TimeoutError: cell ")
    assert error.endswith(" ran longer than --timeout 0.5 s; still busy: local-2")
    assert "[all 3 nodes]\nOut: 4" in notebook.works("%%on_all\n2 + 2")


def test_a_cell_that_ends_in_time_is_left_alone(notebook: SharedNotebook) -> None:
    assert "[all 3 nodes]\nOut: 4" in notebook.works("%%on_all --timeout 60\n2 + 2")


def test_a_queued_cell_times_out_and_the_running_one_goes_on(notebook: SharedNotebook) -> None:
    hold = held(notebook, "queue")
    with notebook.attach() as view:
        watcher = Watcher(view.execute(f"print('began', flush=True){hold}"))
        watcher.wait_for("began", "local")
        number = watcher.stream.cell
        error = notebook.fails("%%on_all --timeout 0.3\n1")
        assert error.endswith(f"did not start within --timeout 0.3 s: cell {number} runs")
        let_go(notebook, "queue")
        assert watcher.wait_end().status == "ok"


@pytest.mark.parametrize("seconds", ["0", "-3", "soon", "nan", "inf"])
def test_a_timeout_that_is_no_positive_number_is_refused(notebook: SharedNotebook, seconds: str) -> None:
    error = notebook.fails(f"%%on_all --timeout {seconds}\n1")
    assert error.startswith("UsageError: ")
    assert "--timeout" in error
    assert "\n" not in error


def starting_again(notebook: SharedNotebook, name: str) -> threading.Thread:
    """Restart a node from another view; returns when its old kernel is gone and the new one is not up yet."""

    def restart() -> None:
        with notebook.attach() as view, contextlib.suppress(ClusterError):
            view.restart(name)

    thread = threading.Thread(target=restart)
    with notebook.attach() as view:
        thread.start()
        wait_until(
            lambda: node(view.state(), name).condition == "starting",
            60,
            f"{name} to start",
        )
    return thread


def test_a_cell_for_a_node_that_starts_waits_for_it_and_says_so(notebook: SharedNotebook) -> None:
    notebook.works("%%on local-2\nseen = 'before'")
    thread = starting_again(notebook, "local-2")
    shown = notebook.works("%%on local-2,local\nprint(globals().get('seen'), world_size)")
    thread.join(30)
    assert "[cluster lesson]\nwaiting for local-2, which starts\n" in shown
    # It has what the cells before left behind.
    assert "[local-2 · rank 1]\nbefore 3" in shown
    assert "[local · rank 0]\nNone 3" in shown


def test_a_node_that_does_not_come_up_is_named_by_the_cell_that_waited_for_it(notebook: SharedNotebook) -> None:
    with notebook.attach() as view:
        agent = psutil.Process(view.connection.file.pid).children()[0]
    before = {kernel.pid for kernel in agent.children()}
    thread = starting_again(notebook, "local-3")
    cell = notebook.start("%%on local-3\n1")
    notebook.kernel.until(cell, "waiting for local-3, which starts")
    (started,) = wait_until(lambda: [kernel for kernel in agent.children() if kernel.pid not in before], 60, "a kernel")
    started.kill()
    notebook.kernel.until(cell)
    thread.join(30)
    assert cell.error is not None
    assert "did not run" in cell.error.value
    assert "local-3 did not run it: it is dead (killed by SIGKILL" in cell.error.value
    assert "%cluster restart local-3" in cell.error.value
    notebook.works("%cluster restart local-3")


def test_stop_ends_the_wait_for_a_node_that_starts(notebook: SharedNotebook) -> None:
    thread = starting_again(notebook, "local-2")
    cell = notebook.start("%%on local-2\nprint('never')")
    notebook.kernel.until(cell, "waiting for local-2, which starts")
    notebook.kernel.manager.interrupt_kernel()
    notebook.kernel.until(cell)
    thread.join(30)
    assert cell.error is not None
    assert "never" not in cell.shown
    assert notebook.works("%%on local-2\n5") == "[local-2 · rank 1]\nOut: 5"


def test_a_node_that_starts_for_ever_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notebook_cluster.coordinator.cells.starting.PATIENCE_S", -1.0)
    cell = Cell(7, "1", ("desk",), True, {}, ())
    recorded: list[CellNodeEnded] = []
    core: Any = SimpleNamespace(
        state=SimpleNamespace(nodes={"desk": Node("desk", "peer", "cpu", 0)}), record=recorded.append
    )
    notices: Any = None
    replay: Any = SimpleNamespace(names=list)
    starting = Starting(core, notices, replay, lambda: None)
    assert not starting.waits(cell)
    starting.leave_out(cell)
    assert [(event.node, event.status) for event in recorded] == [("desk", "cancelled")]
    assert "it has not started within" in recorded[0].reason
    assert "%cluster logs desk" in recorded[0].reason
