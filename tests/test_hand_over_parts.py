"""What a hand over is made of: the file that the next coordinator begins from, and who cannot follow."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from notebook_cluster.agent.head_files import begin_from, begun_from, check_room, has_led, write_piece
from notebook_cluster.agent.head_process import HeadTrouble
from notebook_cluster.journal import events as e
from notebook_cluster.journal.moving import MOVED, pack, read_moved, unpack
from notebook_cluster.journal.reading import has_crashed, read_state
from notebook_cluster.journal.state import State, apply
from notebook_cluster.journal.store import JOURNAL, JOURNAL_FILE, journal_path, open_to_write
from notebook_cluster.protocol.hand_over import Moved
from notebook_cluster.protocol.heads import MOVED_FILE, WriteHeadFile
from notebook_cluster.window.moves import cannot_move

EVENTS: list[e.Event] = [
    e.ClusterStarted(cluster="digits", cluster_id="digits-1", epoch=7, directory="/", time=1.0),
    e.PeerAdded(name="mini", key="k", address="tcp://1.2.3.4:5", found_by="mdns"),
    e.NodeAdded(node="mini", peer="mini", device="cpu"),
]


def run_in(folder: Path, *more: e.Event) -> Path:
    folder.mkdir()
    connection = open_to_write(folder / JOURNAL_FILE, JOURNAL)
    for event in (*EVENTS, *more):
        connection.execute("INSERT INTO events (time, body) VALUES (1.0, ?)", (msgspec.json.encode(event),))
    connection.close()
    (folder / "cells" / "000001").mkdir(parents=True)
    (folder / "cells" / "000001.jsonl").write_text("index")
    (folder / "cells" / "000001" / "mini.txt").write_text("printed")
    return folder


def test_a_run_is_packed_and_unpacked_whole(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "here")
    (folder / "coordinator.log").write_text("not of the run")
    (folder / "cells" / "secret").write_text("no output")
    assert pack(folder, Moved(token="t", may_ask=[3]), folder / MOVED_FILE) == (folder / MOVED_FILE).stat().st_size
    there = run_in(tmp_path / "there", e.ClusterStarted("other", "other-1", 1, "/", 1.0))
    unpack(folder / MOVED_FILE, there)
    assert read_state(journal_path(there)).cluster_id == "digits-1"
    assert (there / "cells" / "000001" / "mini.txt").read_text() == "printed"
    assert (read_moved(there).token, read_moved(there).may_ask) == ("t", [3])
    assert sorted(path.name for path in there.iterdir()) == ["cells", MOVED, JOURNAL_FILE, "runs"]
    assert sorted(path.name for path in (there / "cells").iterdir()) == ["000001", "000001.jsonl"]
    (kept,) = (there / "runs").iterdir()
    assert read_state(kept / JOURNAL_FILE).cluster_id == "other-1", "what ran there before is kept"
    assert (there / JOURNAL_FILE).stat().st_mode & 0o777 == 0o600


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.size = kind, link, 4 if kind == tarfile.REGTYPE else 0
        tar.addfile(info, io.BytesIO(b"evil"))

    return add


@pytest.mark.parametrize(
    "add",
    [
        member("../outside"), member("/etc/outside"), member("cells/../../outside"), member("cells/000001/../x.txt"),
        member("cells/000001/a/b.txt"), member("cells/000001.jsonl", tarfile.SYMTYPE, "/etc/passwd"),
        member("cells/000001.jsonl", tarfile.LNKTYPE, "run.journal"), member("cells", tarfile.DIRTYPE),
        member("connection.json"), member("trusted_peers.json"), member("run.journal"), member("cells/000001/x.txt\n"),
        member("cells/000001.jsonl", tarfile.FIFOTYPE),
    ],
)  # fmt: skip
def test_a_file_of_a_hostile_machine_puts_nothing_anywhere(
    add: Callable[[tarfile.TarFile], None], tmp_path: Path
) -> None:
    folder = run_in(tmp_path / "here")
    pack(folder, Moved(), folder / MOVED_FILE)
    with tarfile.open(folder / MOVED_FILE, "a") as tar:
        add(tar)
    there = run_in(tmp_path / "there", e.Stopped(reason="mine", time=1.0))
    with pytest.raises(ValueError, match="which is no file of a run"):
        unpack(folder / MOVED_FILE, there)
    assert read_state(journal_path(there)).stopped == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "there"]


def long_name() -> bytes:
    """A header that announces a name of 4 GiB, which tarfile would read into memory."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 4 << 30
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("content", [b"", b"no tar", b"\0" * 20480, long_name()])
def test_what_is_no_run_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MOVED_FILE).write_bytes(content)
    with pytest.raises(ValueError, match="is not what a coordinator has written"):
        unpack(tmp_path / MOVED_FILE, tmp_path)


def test_a_head_begins_once_and_only_from_what_was_sent_whole(tmp_path: Path) -> None:
    source = run_in(tmp_path / "here")
    pack(source, Moved(), source / MOVED_FILE)
    data, head = (source / MOVED_FILE).read_bytes(), tmp_path / "head"

    def send(offset: int, piece: bytes, token: str = "t", total: int = len(data)) -> None:
        write_piece(head, WriteHeadFile(ticket=1, cluster="digits", token=token, offset=offset, total=total), piece)

    for offset, piece, total in ((0, b"", 9), (-1, b"x", 9), (0, b"x", 1 << 60), (0, b"xx", 1)):
        with pytest.raises(HeadTrouble, match="are not taken"):
            send(offset, piece, total=total)
    send(0, data[:1000])
    with pytest.raises(HeadTrouble, match="those from 2000 on were sent"):
        send(2000, data[2000:3000])
    with pytest.raises(HeadTrouble, match="the beginning of this file was not sent"):
        send(1000, data[1000:2000], "another")
    with pytest.raises(HeadTrouble, match="was not sent"):
        begin_from(head, "another")
    with pytest.raises(HeadTrouble, match="or not whole"):
        begin_from(head, "t")
    with pytest.raises(HeadTrouble, match="the beginning of this file was not sent"):
        send(1000, data[1000:], total=len(data) + 1)
    assert not has_crashed(journal_path(head))
    send(1000, data[1000:])
    begin_from(head, "t")
    assert has_crashed(journal_path(head)), "the next coordinator goes on from it"
    assert begun_from(head) == "t"
    assert not has_led(head, "t")
    connection = open_to_write(head / JOURNAL_FILE, JOURNAL)
    connection.execute("INSERT INTO events (time, body) VALUES (2.0, ?)", (msgspec.json.encode(EVENTS[0]),))
    connection.close()
    assert has_led(head, "t"), "a coordinator has begun there: nobody goes on from before it"
    assert not has_led(head, "another")
    with pytest.raises(HeadTrouble, match="was not sent"):
        begin_from(head, "t")
    with pytest.raises(HeadTrouble, match=r"no room .* MB are free"):
        check_room(head, 1 << 60)


def test_a_journal_that_was_handed_over_is_begun_from_by_nobody(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "here", e.HandedOver(to="mini", token="t", time=2.0))
    assert not has_crashed(journal_path(folder))
    assert read_state(journal_path(folder)).left == "t"


def test_machines_that_come_by_themselves_and_those_of_engines_are_named() -> None:
    state = State()
    for event in EVENTS:
        state = apply(state, event)
    assert cannot_move(state) == ""
    dialled = e.PeerAdded(name="book", key="b", address="tcp://1.2.3.5:5", found_by="dialled")
    assert "book has joined by itself" in cannot_move(apply(state, dialled))
    assert cannot_move(apply(apply(state, dialled), e.PeerDropped(name="book", reason="gone"))) == ""
    local = e.PeerAdded(name="local", key="l", address="tcp://127.0.0.1:5", found_by="dialled")
    assert cannot_move(apply(state, local)) == ""
    launch = e.LaunchOrdered(launch="slurm-1", on="slurm", hosts=2, key="x", folder="/tmp")
    launched = apply(state, launch)
    assert "machines of slurm-1 were started by an engine" in cannot_move(launched)
    assert cannot_move(apply(launched, e.LaunchEnded(launch="slurm-1", reason="over"))) == ""
