"""``%cluster class`` in a notebook: one code for machines that dial and machines that are found, files out and back."""

import concurrent.futures
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, ClusterError
from notebook_cluster.client.collecting import collect_files
from notebook_cluster.protocol import transfers as t
from notebook_cluster.protocol.state import NodeView
from notebook_cluster.widgets import render_text
from tests.cluster import kernel_pid
from tests.conftest import wait_until
from tests.shared_notebook import SharedNotebook, shared_notebook
from tests.strangers import Stranger

CODE = "maple-river-7"
SHEET = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
ANSWER = "%%on_all\nopen('answer.txt', 'w').write(nc.node() + ' says 42')\n_ = 0"


class Class:
    """The teacher's notebook and cluster, and pupils' machines with names."""

    def __init__(self, notebook: SharedNotebook, cluster: Cluster) -> None:
        self.notebook, self.cluster = notebook, cluster
        self.pupils: dict[str, Stranger] = {}

    @property
    def door(self) -> str:
        """Where the code is accepted, as machines on this one reach it."""
        return f"127.0.0.1:{self.cluster.invite().addresses[0].rpartition(':')[2]}"

    def join(self, name: str, *options: str) -> None:
        self.pupils[name] = Stranger(self.notebook.root, name, *options)

    def wait_in(self, *names: str) -> None:
        def are_in() -> bool:
            rows = {row.name: row.condition for row in self.cluster.state().nodes}
            return all(rows.get(name) == "ok" for name in names)

        wait_until(are_in, 90, lambda: f"{names} to be in: {self.cluster.state()}")

    def folder(self, name: str) -> Path:
        return next((self.pupils[name].home / "agent" / "work").iterdir())

    def page(self) -> str:
        return self.notebook.works("%cluster class start")


@pytest.fixture(scope="module")
def lesson() -> Iterator[Class]:
    """Eva dials, Tom is found; both have the code of the board."""
    with shared_notebook("--local 1") as notebook:
        shown = notebook.works(f"%cluster class start --code {CODE} --minutes 45")
        assert "class 'lesson' is open for 45 minutes" in shown
        assert CODE not in shown, "what is saved with the notebook has no code"
        with notebook.attach() as cluster:
            room = Class(notebook, cluster)
            try:
                room.join("eva", "--dial", room.door, "--code", CODE)
                room.join("tom", "--code", CODE)
                room.wait_in("eva", "tom")
                yield room
            finally:
                for pupil in room.pupils.values():
                    pupil.end()


def test_a_small_file_is_handed_out_also_to_who_comes_later_and_replaces_nothing(lesson: Class) -> None:
    sheet = lesson.notebook.work / "sheet.ipynb"
    sheet.write_text(json.dumps(SHEET))
    shown = lesson.notebook.works("%cluster class hand-out sheet.ipynb")
    assert "sheet.ipynb is in the working folder now" in shown
    assert "[local · rank 0]\nsheet.ipynb is there already" in shown
    assert json.loads((lesson.folder("eva") / "sheet.ipynb").read_text()) == SHEET
    (lesson.folder("eva") / "sheet.ipynb").write_text("my own work")
    sheet.write_text(json.dumps({**SHEET, "metadata": {"second": True}}))
    shown = lesson.notebook.works("%cluster class hand-out sheet.ipynb --to eva")
    assert "sheet.ipynb is another one here already, and stays as it is" in shown
    assert (lesson.folder("eva") / "sheet.ipynb").read_text() == "my own work"
    lesson.join("ida", "--dial", lesson.door, "--code", CODE)
    lesson.wait_in("ida")
    assert json.loads((lesson.folder("ida") / "sheet.ipynb").read_text()) == SHEET
    lesson.notebook.works("%cluster remove ida")
    lesson.pupils.pop("ida").end()


def test_a_folder_is_handed_out_wherever_cells_have_gone(lesson: Class) -> None:
    parts = lesson.notebook.work / "exercise"
    (parts / "data").mkdir(parents=True)
    (parts / "read me.txt").write_text("begin here")
    (parts / "data" / "a.csv").write_text("1,2\n")
    lesson.notebook.works("%%on_all\nimport os, tempfile\nbefore = os.getcwd()\nos.chdir(tempfile.gettempdir())")
    lesson.notebook.works("%cluster class hand-out exercise --to tom")
    lesson.notebook.works("%%on_all\nos.chdir(before)")
    assert (lesson.folder("tom") / "exercise" / "read me.txt").read_text() == "begin here"
    assert (lesson.folder("tom") / "exercise" / "data" / "a.csv").read_text() == "1,2\n"


def test_files_are_collected_from_all_also_where_a_kernel_is_busy_or_dead(lesson: Class) -> None:
    lesson.notebook.works(ANSWER)
    pid = kernel_pid(lesson.cluster, "eva")
    running = lesson.cluster.execute("import time; time.sleep(600)", ["tom"])
    os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: "dead" in {row.condition for row in lesson.cluster.state().nodes}, 60, "eva's kernel to be missed"
    )
    try:
        shown = lesson.notebook.works("%cluster class collect answer.txt")
        assert "collected answer.txt from 2 (2 files" in shown
        collected = lesson.notebook.work / "collected"
        assert (collected / "eva" / "answer.txt").read_text() == "eva says 42"
        assert (collected / "tom" / "answer.txt").read_text() == "tom says 42"
        assert not (collected / "local").exists(), "the notebook's own folder is not collected into itself"
    finally:
        lesson.cluster.interrupt(cell=running.cell)
        lesson.notebook.works("%cluster restart eva")


def test_what_was_collected_before_and_differs_stays(lesson: Class) -> None:
    (lesson.folder("eva") / "essay.txt").write_text("first")
    (lesson.folder("eva") / "notes").mkdir()
    (lesson.folder("eva") / "notes" / "one.md").write_text("1")
    (lesson.folder("eva") / "notes" / "two.md").write_text("")
    into = lesson.notebook.work / "handed in"
    assert "not from tom: there is no essay.txt on tom" in lesson.notebook.works(
        "%cluster class collect essay.txt --into 'handed in'"
    )
    lesson.notebook.works("%cluster class collect essay.txt --into 'handed in'")
    assert [path.name for path in (into / "eva").iterdir()] == ["essay.txt"]
    (lesson.folder("eva") / "essay.txt").write_text("second")
    shown = lesson.notebook.works("%cluster class collect essay.txt --into 'handed in' --to eva")
    assert "what was there before and differs stays beside it" in shown
    kept = next(path for path in (into / "eva").iterdir() if path.name != "essay.txt")
    assert (kept.read_text(), (into / "eva" / "essay.txt").read_text()) == ("first", "second")
    lesson.notebook.works("%cluster class collect notes/*.md --into 'handed in'")
    assert (into / "eva" / "notes" / "two.md").read_text() == ""
    lesson.notebook.works("%cluster class collect ./notes --into again")
    assert (lesson.notebook.work / "again" / "eva" / "notes" / "one.md").read_text() == "1"


def test_a_large_file_comes_whole_and_one_that_changes_all_the_time_is_named(lesson: Class) -> None:
    data = os.urandom(3_000_001)
    (lesson.folder("eva") / "large.bin").write_bytes(data)
    (place,) = lesson.cluster.collect_files("large.bin", lesson.notebook.work / "big", ["eva"])
    assert (place.error, place.size) == ("", len(data))
    assert place.files[0].read_bytes() == data
    log = lesson.folder("eva") / "grows.log"
    log.write_bytes(data)

    def grow(done: int, total: int) -> None:
        with log.open("ab") as file:
            file.write(b"x")

    (place,) = lesson.cluster.collect_files("grows.log", lesson.notebook.work / "big", ["eva"], on_progress=grow)
    assert place.error == "grows.log changes on eva all the time: collect it when it is written"
    assert [path.name for path in (lesson.notebook.work / "big" / "eva").iterdir()] == ["large.bin"]


def test_a_variable_is_collected_by_name(lesson: Class) -> None:
    lesson.notebook.works("%%on_all\nguess = len(nc.node())")
    assert "pulled guess from" in lesson.notebook.works("%cluster class collect guess")
    assert lesson.notebook.value("guess['eva'], guess['tom']") == "(3, 3)"


def test_nothing_outside_the_working_folder_is_given(lesson: Class) -> None:
    folder = lesson.folder("eva")
    (folder / "link").symlink_to("/etc/hostname")
    (folder / "up").symlink_to("..")
    (folder / "circle").symlink_to("circle")
    for pattern in ("link", "up", "up/*", "circle", "nothing*"):
        (place,) = lesson.cluster.collect_files(pattern, lesson.notebook.work / "out", ["eva"])
        assert place.error == f"there is no {pattern} on eva"
        assert not place.files
    for pattern in ("../x", "/etc/hostname", "a//b", "", "C:x", "a\\b"):
        with pytest.raises(ClusterError, match="must be relative and stay inside"):
            lesson.cluster.collect_files(pattern, lesson.notebook.work / "out", ["eva"])
    assert not (lesson.notebook.work / "out").exists() or not list((lesson.notebook.work / "out").rglob("*.*"))


def test_the_page_says_who_is_in_who_hangs_and_why(lesson: Class) -> None:
    assert lesson.cluster.invite().code == CODE
    lesson.join("max", "--code", "another-code-9")
    wait_until(lambda: "max" in {peer.name for peer in lesson.cluster.state().peers}, 60, "max to be found")
    cell = lesson.notebook.kernel.run("%%on_all\nif nc.node() == 'tom': undefined_name")
    assert cell.error is not None
    try:
        wait_until(lambda: lesson.cluster.state().cell.errors, 30, "the error")  # type: ignore[union-attr]
        wait_until(lambda: "3 are in" in render_text(lesson.cluster.state(), as_class=True), 60, "all to be in")
        shown = render_text(lesson.cluster.state(), as_class=True)
        assert "NameError: name 'undefined_name' is not defined" in shown
        assert "it shares with another code than this one" in shown
    finally:
        lesson.pupils.pop("max").end()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("class", "%cluster class needs start"),
        (
            "class strat",
            "%cluster class has no 'strat' (did you mean 'start'?). There are: start, hand-out, collect, close",
        ),
        ("class hand-out", "write %cluster class hand-out FILE|DIR"),
        ("class hand-out a b", "write %cluster class hand-out FILE|DIR"),
        ("class close now", "write %cluster class close"),
        ("class collect x.txt --code maple-river-7", "%cluster class collect takes no --code"),
        ("class collect guess --into there", "--into goes with ./guess"),
        ("class start a/b", "cluster name 'a/b' is not usable"),
        ("class start --minutes 0", "--minutes takes a number of minutes above 0"),
        ("class hand-out nothing.txt", "there is no file or folder 'nothing.txt'"),
        ("class collect nothing.txt", "nothing.txt came from nobody: there is no nothing.txt on eva"),
        ("class collect x.txt --to nobody", "nobody"),
    ],
)
def test_what_does_not_fit_is_said(lesson: Class, line: str, said: str) -> None:
    assert said in lesson.notebook.fails(f"%cluster {line}")


def test_a_large_file_is_not_handed_out_and_the_way_out_is_named(lesson: Class) -> None:
    (lesson.notebook.work / "big.bin").write_bytes(os.urandom(600_000))
    assert "%cluster send big.bin puts it" in lesson.notebook.fails("%cluster class hand-out big.bin")


def test_a_closed_class_lets_nobody_new_in_and_opens_again_with_the_same_code(lesson: Class) -> None:
    lesson.notebook.works("%cluster class close")
    assert lesson.cluster.state().invitation == ""
    lesson.notebook.works(f"%cluster class start --code {CODE}")
    assert lesson.cluster.state().invitation.endswith(f" {CODE}")


class Hostile:
    """A cluster whose one machine answers what it is told to."""

    def __init__(self, found: list[t.FileOffer], pieces: list[t.FilesAnswer]) -> None:
        self.connection, self._found, self._pieces = self, found, iter(pieces)

    def request(self, body: object, kind: object) -> "concurrent.futures.Future[t.FilesAnswer]":
        future: concurrent.futures.Future[t.FilesAnswer] = concurrent.futures.Future()
        match body:
            case t.FindFolder():
                future.set_result(t.FilesAnswer(request=1, folder="/there"))
            case t.FindFiles():
                future.set_result(t.FilesAnswer(request=2, files=self._found))
            case _:
                future.set_result(next(self._pieces))
        return future


def piece(data: bytes, size: int, changed: int = 1) -> t.FilesAnswer:
    return t.FilesAnswer(request=3, data=data, size=size, changed=changed)


@pytest.mark.parametrize(
    ("path", "pieces", "said"),
    [
        ("../evil", [], "must be relative and stay inside"),
        ("/etc/evil", [], "must be relative and stay inside"),
        ("a\\b", [], "must be relative and stay inside"),
        ("x", [piece(b"", 1 << 60)], "does not fit on the disk here"),
        ("x", [piece(b"12345", 3)] * 3, "changes on eva all the time"),
        ("x", [piece(b"", 3)] * 3, "changes on eva all the time"),
        ("x", [piece(b"1", 2), piece(b"1", 2, changed=2)] * 3, "changes on eva all the time"),
    ],
)
def test_a_hostile_machine_writes_nothing_but_its_file(
    tmp_path: Path, path: str, pieces: list[t.FilesAnswer], said: str
) -> None:
    nodes = [NodeView("eva", 0, "eva", "cpu", "cpu", 1, "ok"), NodeView("tom", 1, "tom", "cpu", "cpu", 1, "asleep")]
    cluster = Hostile([t.FileOffer(path=path, size=3)], pieces)
    here = tmp_path / "here"
    eva, tom = collect_files(cluster, "x", here / "into", nodes, lambda done, total: None)  # type: ignore[arg-type]
    assert said in eva.error
    assert (eva.files, tom.error) == ([], "tom is asleep")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
