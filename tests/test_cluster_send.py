"""``%cluster send`` and ``%pip`` in a notebook with a real cluster: one node here, two on each of two peers."""

import os
import re
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.client import Cluster, ClusterError
from tests.conftest import wait_until
from tests.shared_notebook import SharedNotebook, shared_notebook

BIG = os.urandom(1 << 20) * 8


@pytest.fixture(scope="module")
def notebook() -> Iterator[SharedNotebook]:
    with shared_notebook("--local 1", "mini", "desk") as notebook:
        # One after the other: that is the order of their ranks.
        notebook.works("%cluster add mini --count 2\n%cluster add desk")
        yield notebook


@pytest.fixture(scope="module")
def cluster(notebook: SharedNotebook) -> Iterator[Cluster]:
    with notebook.attach() as cluster:
        yield cluster


def send_here(cluster: Cluster, notebook: SharedNotebook, path: Path, **options: object) -> list[object]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(notebook.work)
        return cluster.send_files(str(path), **options)  # type: ignore[arg-type, return-value]


def parts_in(folder: Path) -> list[Path]:
    return list(folder.rglob(".nbc-*"))


# ---- what arrives ----------------------------------------------------------------------------------------------------


def test_a_file_is_at_the_same_path_on_every_node(notebook: SharedNotebook) -> None:
    (notebook.work / "data").mkdir()
    (notebook.work / "data" / "train.csv").write_text("x,y\n1,2\n")
    shown = notebook.works("%cluster send data/train.csv")
    assert "sent data/train.csv (8 bytes) to mini, mini-2, desk" in shown
    assert "data/train.csv: already there on local (it is the notebook's own folder)" in shown
    assert "[all 4 nodes]\nx,y\n1,2" in notebook.works("%%on_all\nprint(open('data/train.csv').read())")


def test_what_is_there_already_is_not_sent_again(notebook: SharedNotebook) -> None:
    (notebook.work / "same.txt").write_text("same")
    notebook.works("%cluster send same.txt")
    shown = notebook.works("%cluster send same.txt")
    assert "same.txt: already there on mini, mini-2, desk\n" in shown
    assert "sent" not in shown


def test_a_changed_file_is_sent_again_and_that_is_said(notebook: SharedNotebook) -> None:
    (notebook.work / "notes.txt").write_text("one")
    notebook.works("%cluster send notes.txt")
    (notebook.work / "notes.txt").write_text("two")
    shown = notebook.works("%cluster send notes.txt --to mini")
    assert shown.strip() == "sent notes.txt (3 bytes) to mini; replaced there: notes.txt"
    assert (notebook.folder_of("mini") / "notes.txt").read_text() == "two"
    assert (notebook.folder_of("desk") / "notes.txt").read_text() == "one"


def test_a_folder_is_sent_without_caches_and_version_control(notebook: SharedNotebook) -> None:
    source = notebook.work / "package"
    for path, text in {
        "a.py": "A = 1", "sub/b.py": "B = 2", "sub/empty.txt": "", ".git/config": "secret", "__pycache__/a.pyc": "x",
        "sub/.ipynb_checkpoints/c.py": "x", "run.sh": "#!/bin/sh",
    }.items():  # fmt: skip
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    (source / "run.sh").chmod(0o755)
    (source / "nothing").mkdir()
    (source / "inside").symlink_to("a.py")
    (source / "outside").symlink_to("/etc/hostname")
    shown = notebook.works("%cluster send package --to mini,desk")
    assert "sent the 5 files of package" in shown
    assert "left out: package/outside is a link that leads out of the folder" in shown
    there = notebook.folder_of("mini") / "package"
    assert {str(path.relative_to(there)) for path in there.rglob("*")} == {
        "a.py", "sub", "sub/b.py", "sub/empty.txt", "run.sh", "nothing", "inside",
    }  # fmt: skip
    assert os.access(there / "run.sh", os.X_OK)
    assert not (there / "inside").is_symlink()
    (source / "a.py").write_text("A = 3")
    shown = notebook.works("%cluster send package/ --to desk")
    assert "sent 2 of the 5 files of package/ (10 bytes) to desk; the rest was there already" in shown


def test_what_lies_elsewhere_goes_into_the_working_folder_itself(notebook: SharedNotebook, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"123")
    notebook.works(f"%cluster send {tmp_path / 'weights.bin'} --to mini")
    assert (notebook.folder_of("mini") / "weights.bin").read_bytes() == b"123"


def test_nodes_that_share_a_folder_get_it_once(notebook: SharedNotebook, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "big.bin").write_bytes(BIG)
    seen: list[tuple[int, int]] = []
    places = send_here(
        cluster, notebook, tmp_path / "big.bin", targets=["mini", "mini-2", "desk"],
        on_progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert [place.nodes for place in places] == [["mini", "mini-2"], ["desk"]]  # type: ignore[attr-defined]
    assert seen[-1] == (2 * len(BIG), 2 * len(BIG))
    for peer in ("mini", "desk"):
        assert (notebook.folder_of(peer) / "big.bin").read_bytes() == BIG


# ---- what does not ---------------------------------------------------------------------------------------------------


def test_a_file_that_does_not_exist(notebook: SharedNotebook) -> None:
    (notebook.work / "model.pt").write_text("")
    error = notebook.fails("%cluster send modl.pt")
    assert error == (
        f"ClusterError: there is no file or folder 'modl.pt' in {notebook.work.resolve()} (did you mean 'model.pt'?)"
    )
    assert "/nowhere does not exist" in notebook.fails("%cluster send /nowhere/x")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%cluster send", "needs FILE|DIR"),
        ("%cluster send a b", "does not take 'b'"),
        ("%cluster send . --to nobody", "no node is called 'nobody'"),
        ("%cluster send /dev/null", "neither a file nor a folder"),
    ],
)
def test_bad_lines_are_refused(notebook: SharedNotebook, line: str, words: str) -> None:
    assert words in notebook.fails(line)


def test_a_folder_in_the_way_is_named_and_the_others_get_the_file(notebook: SharedNotebook) -> None:
    (notebook.work / "taken").write_text("file")
    (notebook.folder_of("mini") / "taken").mkdir()
    cell = notebook.kernel.run("%cluster send taken")
    assert cell.error is not None
    assert "taken is not on mini, mini-2: mini: taken is a folder there" in cell.error.value
    assert "sent taken (4 bytes) to desk" in cell.shown
    assert (notebook.folder_of("desk") / "taken").read_text() == "file"


def test_a_link_on_the_node_that_leads_out_is_not_followed(notebook: SharedNotebook, tmp_path: Path) -> None:
    (notebook.folder_of("mini") / "exit").symlink_to(tmp_path)
    (notebook.work / "exit").mkdir()
    (notebook.work / "exit" / "x").write_text("x")
    assert "exit leads out of the working folder" in notebook.fails("%cluster send exit --to mini")
    assert not list(tmp_path.iterdir())


def test_another_file_in_the_notebooks_own_folder_is_not_replaced(notebook: SharedNotebook, tmp_path: Path) -> None:
    (notebook.work / "mine.txt").write_text("mine")
    (tmp_path / "mine.txt").write_text("other")
    error = notebook.fails(f"%cluster send {tmp_path / 'mine.txt'}")
    assert "mine.txt in the notebook's own folder is another file" in error
    assert (notebook.work / "mine.txt").read_text() == "mine"
    assert (notebook.folder_of("desk") / "mine.txt").read_text() == "other"


@pytest.mark.parametrize("size", [len(BIG), 100])
def test_a_file_that_changes_while_it_is_sent(
    notebook: SharedNotebook, cluster: Cluster, tmp_path: Path, size: int
) -> None:
    source = tmp_path / "changing.bin"
    source.write_bytes(BIG)

    def change(done: int, total: int) -> None:
        if done < total and source.stat().st_size == len(BIG):
            source.write_bytes(bytes(size))

    (place,) = send_here(cluster, notebook, source, targets=["desk"], on_progress=change)
    assert "changing.bin changed while it was sent: send it again" in place.error  # type: ignore[attr-defined]
    folder = notebook.folder_of("desk")
    wait_until(lambda: not parts_in(folder), 60, "the part to be removed")
    assert not (folder / "changing.bin").exists()


# ---- Stop, and peers that are away -----------------------------------------------------------------------------------


def test_stop_leaves_no_partial_file(notebook: SharedNotebook, cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "half.bin").write_bytes(BIG)

    def stop(done: int, total: int) -> None:
        if 0 < done < total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        send_here(cluster, notebook, tmp_path / "half.bin", targets=["mini", "desk"], on_progress=stop)
    for peer in ("mini", "desk"):
        folder = notebook.folder_of(peer)
        wait_until(lambda folder=folder: not parts_in(folder), 60, "the part to be removed")  # type: ignore[misc]
        assert not (folder / "half.bin").exists()


def test_a_bar_shows_how_far_it_is_and_goes_at_the_end(notebook: SharedNotebook) -> None:
    (notebook.work / "bar.bin").write_bytes(BIG)
    notebook.works("from notebook_cluster.magics.display import publishing")
    notebook.works("before = publishing._FIRST_AFTER, publishing._EVERY")
    notebook.works("publishing._FIRST_AFTER = publishing._EVERY = 0.0  # also for what is done at once")
    sending = notebook.start("%cluster send bar.bin --to mini,desk")
    notebook.kernel.until(sending, "sending bar.bin")
    assert re.search(r"sending bar\.bin  █*░* +\d+%  [\d.,]+ of [\d.,]+ MB, ", sending.shown)
    notebook.kernel.until(sending)
    assert sending.error is None
    assert "sent bar.bin" in sending.shown
    assert "sending" not in sending.shown
    notebook.works("publishing._FIRST_AFTER, publishing._EVERY = before")


TELL_QUESTIONS = """
from notebook_cluster.client.connection import Connection
request = Connection.request
def told(self, body, *rest, **options):
    print(type(body).__name__, flush=True)
    return request(self, body, *rest, **options)
Connection.request = told
"""


def test_stop_in_the_notebook_while_a_peer_does_not_answer(notebook: SharedNotebook) -> None:
    (notebook.work / "stuck.bin").write_bytes(BIG)
    pid = notebook.agents.pid("mini")
    os.kill(pid, signal.SIGSTOP)
    try:
        sending = notebook.start(f"{TELL_QUESTIONS}\n%cluster send stuck.bin --to mini,desk")
        notebook.kernel.until(sending, "FindFolder")
        notebook.kernel.manager.interrupt_kernel()
        notebook.kernel.until(sending)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert sending.error is not None
    assert (sending.error.name, sending.error.value) == ("KeyboardInterrupt", "%cluster send was stopped")
    notebook.works("Connection.request = request")
    notebook.works("%%on mini\nprint('back')")
    assert not (notebook.folder_of("mini") / "stuck.bin").exists()


def test_a_peer_that_was_away_for_a_while_gets_the_rest(
    notebook: SharedNotebook, cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "later.bin").write_bytes(BIG)
    pid, stopped = notebook.agents.pid("mini"), []

    def away(done: int, total: int) -> None:
        if done and not stopped:
            stopped.append(True)
            os.kill(pid, signal.SIGSTOP)
            try:
                wait_until(lambda: "suspect" in {peer.condition for peer in cluster.state().peers}, 60, "suspicion")
            finally:
                os.kill(pid, signal.SIGCONT)

    (place,) = send_here(cluster, notebook, tmp_path / "later.bin", targets=["mini"], on_progress=away)
    assert (place.error, stopped) == ("", [True])  # type: ignore[attr-defined]
    assert (notebook.folder_of("mini") / "later.bin").read_bytes() == BIG


# ---- %pip ------------------------------------------------------------------------------------------------------------


def make_wheel(folder: Path) -> Path:
    """A distribution of one module."""
    path = folder / "tinything-1.0-py3-none-any.whl"
    info = "tinything-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tinything.py", "ANSWER = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_pip_installs_on_every_node(notebook: SharedNotebook, tmp_path: Path) -> None:
    wheel = make_wheel(notebook.work)
    notebook.works(f"%cluster send {wheel.name}")
    # Not into the environment of the tests: into a folder of each node's own.
    shown = notebook.works(
        "%%on local,mini,desk\nimport sys, os\nplace = os.path.abspath('site-' + nc.node())\n"
        f"%pip install --quiet --no-index --no-deps --target {{place}} {wheel.name}\n"
        "sys.path.insert(0, place)\nimport tinything\nprint(tinything.ANSWER)"
    )
    assert "a package that was imported before is the old one until %cluster restart NODE\n42" in shown
    assert (notebook.folder_of("desk") / "site-desk" / "tinything.py").exists()


def test_a_pip_that_fails_is_an_error_of_one_line_that_names_the_nodes(notebook: SharedNotebook) -> None:
    cell = notebook.kernel.run("%%on_all\n%pip install --no-index no-such-thing-anywhere")
    assert cell.error is not None
    assert "all 4 nodes: PipFailed: %pip install --no-index no-such-thing-anywhere failed on this node: " in (
        cell.error.value
    )
    assert "Could not find a version that satisfies the requirement no-such-thing-anywhere" in cell.error.value
    assert "Traceback" not in cell.shown


def test_an_environment_that_cannot_be_written_to_is_said(notebook: SharedNotebook) -> None:
    # A pip that finds the environment as it is on a machine of somebody else.
    (notebook.folder_of("desk") / "owned").mkdir()
    (notebook.folder_of("desk") / "owned" / "pip.py").write_text(
        "print(\"ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/usr/lib'\")\n"
        "raise SystemExit(1)"
    )
    cell = notebook.kernel.run("%%on desk\nimport os\nos.environ['PYTHONPATH'] = 'owned'\n%pip install anything")
    notebook.works("%%on desk\ndel os.environ['PYTHONPATH']")
    assert cell.error is not None
    assert "%pip install anything failed on this node: Could not install packages due to an OSError" in cell.error.value
    assert "its environment cannot be written to, %pip install --user NAME may work" in cell.error.value


def test_the_python_client_refuses_a_file_that_is_not_there(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="there is no file or folder"):
        cluster.send_files("no-such-file-here")
