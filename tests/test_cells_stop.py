"""Stop in a notebook whose kernel gets SIGINT from its parent, as from a Jupyter server; and what a SIGINT means."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from notebook_cluster.magics.execution import waiting
from notebook_cluster.magics.execution.waiting import Press, StopCounter, is_at_rest
from notebook_cluster.protocol.cell_mark import CellMark, CellMarkWriter
from tests.cluster import Watcher, node
from tests.conftest import wait_until
from tests.notebook_kernel import Cell
from tests.shared_notebook import SharedNotebook, shared_notebook


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    with shared_notebook("--local 2") as started:
        yield started


def stopped(notebook: SharedNotebook, source: str, until: str = "begun") -> Cell:
    """Run ``source`` on all nodes, press Stop when both have printed ``until``; returns the cell after its end."""
    cell = notebook.start(f"%%on_all --no-replay\nimport time\nprint('begun', flush=True)\n{source}")
    notebook.kernel.until(cell, f"[all 2 nodes]\n{until}")
    notebook.kernel.manager.interrupt_kernel()
    return notebook.kernel.until(cell)


@pytest.mark.parametrize("body", ["while True: sum(range(1000))", "time.sleep(600)", "nc.recv(1 - rank)"])
def test_stop_ends_the_cell_with_what_it_had_shown(notebook: SharedNotebook, body: str) -> None:
    cell = stopped(notebook, body)
    assert cell.error is not None
    assert cell.error.name == "KeyboardInterrupt"
    assert cell.error.value.endswith(" was stopped")
    assert "begun" in cell.shown
    assert "[all 2 nodes]\nOut: 2" in notebook.works("%%on_all --no-replay\n1 + 1")


TRAINS = """
import sys, threading, torch
sync = nc.DiLoCo(torch.nn.Linear(2, 1), every=2, name="stopped")
def watch(main=threading.get_ident()):
    looks = []
    while len(looks) < 20 or len(set(looks[-20:])) > 1:
        time.sleep(0.01)
        frame = sys._current_frames()[main]
        looks.append((id(frame), frame.f_lasti))
    print("rests", flush=True)
def train():
    for step in range(10**9):
        if step == 3 and rank == 0:
            time.sleep(600)
        if step == 2:
            threading.Thread(target=watch, daemon=True).start()
        sync.step()
train()
"""
OTHERS = re.compile(r"notebook_cluster|threading\.py|IPython|ipykernel|site-packages")


@pytest.mark.parametrize(
    ("body", "until", "lines"),
    [
        (TRAINS, "begun\nrests", ["train()", "sync.step()", "time.sleep(600)"]),
        ("def receive():\n    nc.recv(1 - rank)\nreceive()", "begun", ["receive()", "nc.recv(1 - rank)"]),
        ("import threading\nthreading.Event().wait()", "begun", ["threading.Event().wait()"]),
    ],
)
def test_traceback_of_a_stop_has_the_lines_of_the_cell_only(
    notebook: SharedNotebook, body: str, until: str, lines: list[str]
) -> None:
    cell = stopped(notebook, body, until)
    shown = cell.shown[cell.shown.index("Traceback") :]
    assert [line for line in lines if line not in shown] == []
    assert OTHERS.findall(shown) == []
    assert "KeyboardInterrupt" in shown


def test_error_in_a_step_keeps_the_line_of_the_cell_and_the_message(notebook: SharedNotebook) -> None:
    make = "import torch\nsync = nc.DiLoCo(torch.nn.Linear(2, 1), every=1, name='wrong')"
    cell = notebook.kernel.run(f"%%on_all --no-replay\n{make}\nsync.step(loss='much')")
    assert cell.error is not None
    assert "sync.step(loss='much')" in cell.shown
    assert "ValueError: loss='much': pass one number" in cell.shown.rpartition("sync.step(loss='much')")[2]


def test_stop_cancels_what_waits_behind_another_cell_and_leaves_that_one_alone(notebook: SharedNotebook) -> None:
    gate = notebook.work / "open"
    with notebook.attach() as view:
        before = view.execute(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)")
        cell = notebook.start("%%on_all --no-replay\nprint('never')")
        notebook.kernel.until(cell, f"waiting for cell {before.cell}")
        notebook.kernel.manager.interrupt_kernel()
        assert notebook.kernel.until(cell).error is not None
        assert "never\n" not in cell.shown
        state = view.state().cell
        assert state is not None
        assert (state.id, state.status) == (before.cell, "running")
        gate.touch()
        assert Watcher(before).wait_end().status == "ok"


def test_stop_right_after_the_start_is_not_lost(notebook: SharedNotebook) -> None:
    for _ in range(3):
        cell = notebook.start("%%on_all --no-replay\nwhile True: pass")
        wait_until(lambda: is_busy(notebook), 60, "the kernel to be busy")
        notebook.kernel.manager.interrupt_kernel()
        error = notebook.kernel.until(cell).error
        assert error is not None
        assert error.name == "KeyboardInterrupt"


def test_a_second_stop_kills_what_is_still_busy_and_brings_it_back(notebook: SharedNotebook) -> None:
    notebook.works("%%on_all\nbefore = rank + 7")
    catches = "while True:\n    try:\n        if rank == 0: break\n        time.sleep(0.01)\n"
    catches += "    except KeyboardInterrupt: print('not now', flush=True)"
    cell = notebook.start(f"%%on_all --no-replay\nimport time\nprint('begun', flush=True)\n{catches}")
    notebook.kernel.until(cell, "begun")
    wait_until(lambda: busy_nodes(notebook) == ["local-2"], 60, "local-2 alone to be busy")
    notebook.kernel.manager.interrupt_kernel()
    notebook.kernel.until(cell, "still busy: local-2")
    assert "not now" in cell.shown
    notebook.kernel.manager.interrupt_kernel()
    error = notebook.kernel.until(cell).error
    assert error is not None
    assert error.name == "KeyboardInterrupt"
    with notebook.attach() as view:
        wait_until(lambda: node(view.state(), "local-2").condition == "ok", 60, "local-2 to be back under its name")
    assert "Out: 8" in notebook.works("%%on local-2\nbefore  # from a cell of the kernel that was killed")


def busy_nodes(notebook: SharedNotebook) -> list[str]:
    """Nodes that run a cell."""
    with notebook.attach() as view:
        return [node.name for node in view.state().nodes if node.busy]


def is_busy(notebook: SharedNotebook) -> bool:
    """The cell runs on the nodes, or is about to."""
    with notebook.attach() as view:
        cell = view.state().cell
    return cell is not None and cell.status in ("queued", "running")


# ---- what a SIGINT means


def test_without_a_kernel_sigint_is_stop_at_once() -> None:
    assert Press(SimpleNamespace()).meaning() == "stop"


def test_a_request_to_end_that_has_arrived_is_what_it_means() -> None:
    kernel = SimpleNamespace(_shutdown_message={"content": {"restart": True}})
    assert Press(SimpleNamespace(kernel=kernel)).meaning() == "restart"
    kernel._shutdown_message["content"]["restart"] = False
    assert Press(SimpleNamespace(kernel=kernel)).meaning() == "shutdown"


def test_while_the_sender_is_busy_a_request_to_end_may_still_come(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        monkeypatch.setattr(os, "getppid", lambda: sender.pid)
        wait_until(lambda: is_at_rest(sender.pid) is False, 60, "the sender to be busy")
        kernel = SimpleNamespace(_shutdown_message=None)
        press = Press(SimpleNamespace(kernel=kernel))
        assert [press.meaning() for _ in range(10)] == [""] * 10
        kernel._shutdown_message = {"content": {"restart": True}}
        assert press.meaning() == "restart"
    finally:
        sender.kill()
        sender.wait(10)


def test_a_sender_that_gets_no_processor_time_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with too much to do: else the restart of a notebook's kernel would stop what runs on the nodes."""
    sender = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        monkeypatch.setattr(os, "getppid", lambda: sender.pid)
        wait_until(lambda: is_at_rest(sender.pid) is False, 60, "the sender to be busy")
        sender.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(sender.pid).status() == psutil.STATUS_STOPPED, 60, "the sender to stop")
        now = [100.0]
        monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0]))
        press = Press(SimpleNamespace(kernel=SimpleNamespace(_shutdown_message=None)))
        now[0] += 4
        assert [press.meaning() for _ in range(10)] == [""] * 10
        sender.send_signal(signal.SIGCONT)
        wait_until(lambda: press.meaning() == "stop", 60, "it to have had its time")
        assert now == [104.0]
    finally:
        sender.kill()
        sender.wait(10)


def test_a_sender_that_rests_has_nothing_more_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)  # fmt: skip
    try:
        assert sender.stdout is not None
        sender.stdout.readline()
        monkeypatch.setattr(os, "getppid", lambda: sender.pid)
        wait_until(lambda: is_at_rest(sender.pid), 60, "the sender to rest")
        press = Press(SimpleNamespace(kernel=SimpleNamespace(_shutdown_message=None)))
        assert press.meaning() == ""  # one look is not enough
        wait_until(lambda: press.meaning() == "stop", 60, "the press to be Stop")
    finally:
        sender.kill()
        sender.communicate()


def test_of_a_process_that_is_not_there_nothing_is_known() -> None:
    assert is_at_rest(1 << 30) is None


def test_a_press_wakes_who_waits() -> None:
    woken: list[float] = []
    with StopCounter() as stops:
        stops.on_press = lambda: woken.append(time.monotonic())
        os.kill(os.getpid(), 2)
        wait_until(lambda: stops.count == 1 and woken, 60, "the handler")


# ---- which cell a kernel is in


def test_a_kernel_says_which_cell_it_is_in_and_nonsense_is_none(tmp_path: Path) -> None:
    seen = CellMark(tmp_path / "mark")
    assert seen.cell() == 0
    kernel = CellMarkWriter(str(seen.path))
    kernel.set(12_345)
    assert seen.cell() == 12_345
    kernel.set(0)
    assert seen.cell() == 0
    seen.path.write_bytes(b"-7")
    assert seen.cell() == 0
    assert seen.path.stat().st_mode & 0o777 == 0o600
    seen.close()
    seen.close()
    assert not seen.path.exists()
    assert seen.cell() == 0
    CellMarkWriter(str(seen.path)).set(1)  # the agent is gone
    assert not seen.path.exists()
