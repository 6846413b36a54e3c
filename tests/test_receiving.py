"""Files that a coordinator offers: they stay inside the working folder, and only whole ones are ever seen there."""

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notebook_cluster.agent.receiving import FileRefused, Receiving, check_path, check_room
from notebook_cluster.protocol.transfers import FileOffer

TICKET = "0123456789abcdef"


def offer(path: str, content: bytes = b"content", **options: object) -> FileOffer:
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return FileOffer(path=path, size=len(content), digest=digest, **options)  # type: ignore[arg-type]


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ---- where files may go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "", ".", "..", "/etc/passwd", "../x", "a/../../x", "a//b", "a/./b", "a/", "C:x", "c:/x", "a\\b", "x\0y", "x\ny",
        "\x1b[31m", "a" * 256, "ä" * 128, "a/" * 600 + "a", "\ud800",
    ],
)  # fmt: skip
def test_a_path_that_could_lead_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match=r"is not usable|cannot write") as caught:
        Receiving(tmp_path, TICKET, [offer(path)])
    assert str(caught.value).isprintable()
    assert not everything_in(tmp_path)


@given(st.text(max_size=30))
def test_any_path_that_is_taken_stays_below_the_folder(path: str) -> None:
    try:
        names = check_path(path)
    except FileRefused:
        return
    assert Path(os.path.normpath(Path("/work").joinpath(*names))).is_relative_to("/work")
    assert "/".join(names) == path


def test_ordinary_names_are_taken() -> None:
    assert check_path("data/été 1/x-y_z.tar.gz") == ("data", "été 1", "x-y_z.tar.gz")


def test_a_link_in_the_folder_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "work" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(FileRefused, match="link leads out of the working folder"):
        Receiving(tmp_path / "work", TICKET, [offer("link/x")])


def test_a_link_that_appears_after_the_offer_is_not_followed_either(tmp_path: Path) -> None:
    (tmp_path / "work" / "sub").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    receiving = Receiving(tmp_path / "work", TICKET, [offer("sub/x")])
    (tmp_path / "work" / "sub").rmdir()
    (tmp_path / "work" / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(FileRefused, match="leads out"):
        receiving.write(0, 0, b"content")
    assert not everything_in(tmp_path / "outside")


def test_a_link_at_the_files_own_place_is_replaced_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "outside.txt").write_text("mine")
    (tmp_path / "work" / "x").symlink_to(tmp_path / "outside.txt")
    Receiving(tmp_path / "work", TICKET, [offer("x")]).write(0, 0, b"content")
    assert (tmp_path / "outside.txt").read_text() == "mine"
    assert (tmp_path / "work" / "x").read_bytes() == b"content"
    assert not (tmp_path / "work" / "x").is_symlink()


def test_a_link_that_leads_nowhere_is_refused_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileRefused, match="link that leads nowhere"):
        Receiving(tmp_path, TICKET, [offer("gone/x")])


def test_a_file_where_a_folder_is_and_the_other_way_round_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for wrong, words in (
        (offer("folder"), "is a folder there"),
        (offer("file/x"), "is a file there"),
        (FileOffer(path="file", folder=True), "is a file there"),
    ):
        with pytest.raises(FileRefused, match=words):
            Receiving(tmp_path, TICKET, [wrong])


@pytest.mark.parametrize(
    ("ticket", "files"),
    [
        ("../../x", [offer("a")]),
        (TICKET, [offer("a"), offer("a")]),
        (TICKET, [FileOffer(path="a", size=-1, digest=bytes(16))]),
        (TICKET, [FileOffer(path="a", size=1 << 60, digest=bytes(16))]),
        (TICKET, [FileOffer(path="a", size=1, digest=b"short")]),
        (TICKET, [FileOffer(path=f"f{number}", digest=bytes(16)) for number in range(20_001)]),
    ],
    ids=["ticket", "twice", "negative", "vast", "digest", "many"],
)
def test_an_offer_that_cannot_be_is_refused(ticket: str, files: list[FileOffer], tmp_path: Path) -> None:
    with pytest.raises(FileRefused):
        Receiving(tmp_path, ticket, files)


# ---- what is written -------------------------------------------------------------------------------------------------


def test_a_file_appears_whole_with_its_last_piece(tmp_path: Path) -> None:
    receiving = Receiving(tmp_path, TICKET, [offer("sub/x.bin", b"0123456789")])
    receiving.write(0, 0, b"01234")
    assert not (tmp_path / "sub" / "x.bin").exists()
    assert receiving.left == 5
    receiving.write(0, 5, b"56789")
    assert everything_in(tmp_path) == {"sub", "sub/x.bin"}
    assert (tmp_path / "sub" / "x.bin").read_bytes() == b"0123456789"
    assert receiving.wanted == []


def test_what_is_there_with_the_same_content_is_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "same").write_bytes(b"content")
    (tmp_path / "other").write_bytes(b"CONTENT")
    receiving = Receiving(tmp_path, TICKET, [offer("same"), offer("other"), offer("new")])
    assert (receiving.wanted, receiving.replaced, receiving.size) == ([1, 2], [1], 14)


def test_empty_files_and_folders(tmp_path: Path) -> None:
    receiving = Receiving(tmp_path, TICKET, [offer("empty", b""), FileOffer(path="a/b", folder=True)])
    receiving.make_folders()
    receiving.write(0, 0, b"")
    assert everything_in(tmp_path) == {"empty", "a", "a/b"}


def test_the_executable_bit_is_kept_and_no_other(tmp_path: Path) -> None:
    receiving = Receiving(tmp_path, TICKET, [offer("run.sh", executable=True), offer("data")])
    receiving.write(0, 0, b"content")
    receiving.write(1, 0, b"content")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "run.sh").stat().st_mode & 0o7777 == 0o777 & ~umask
    assert (tmp_path / "data").stat().st_mode & 0o7777 == 0o666 & ~umask


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([(0, 0, b"CONTENT")], "changed while it was sent"),
        ([(0, 1, b"ontent")], "out of order"),
        ([(0, 0, b"con"), (0, 4, b"ent")], "out of order"),
        ([(0, 0, b"con"), (0, 0, b"con")], "out of order"),
        ([(0, 0, b"con"), (0, 3, b"tent and more")], "out of order"),
        ([(0, 0, b"con"), (0, 3, b"")], "out of order"),
        ([(0, 0, b"con"), (1, 0, b"content")], "out of order"),
        ([(2, 0, b"content")], "out of order"),
        ([(-1, 0, b"content")], "out of order"),
    ],
)
def test_pieces_that_make_another_file_leave_nothing(
    pieces: list[tuple[int, int, bytes]], words: str, tmp_path: Path
) -> None:
    receiving = Receiving(tmp_path, TICKET, [offer("x"), offer("y")])
    *before, last = pieces
    for piece in before:
        receiving.write(*piece)
    with pytest.raises(FileRefused, match=words):
        receiving.write(*last)
    receiving.close()
    assert not everything_in(tmp_path)


def test_the_file_before_stays_when_the_new_one_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"before")
    receiving = Receiving(tmp_path, TICKET, [offer("x")])
    receiving.write(0, 0, b"con")
    receiving.close()
    assert everything_in(tmp_path) == {"x"}
    assert (tmp_path / "x").read_bytes() == b"before"


def test_an_unfinished_file_of_an_agent_that_was_killed_is_removed_later(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".nbc-aaaa-0.part", tmp_path / ".nbc-bbbb-0.part"
    for path in (old, fresh):
        path.write_text("")
    os.utime(old, (1, 1))
    Receiving(tmp_path, TICKET, [offer("x")]).write(0, 0, b"content")
    assert everything_in(tmp_path) == {"x", fresh.name}


def test_a_working_folder_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match="not there any more"):
        Receiving(tmp_path / "gone", TICKET, [offer("x")])


# ---- room ------------------------------------------------------------------------------------------------------------


def test_what_fits_is_taken() -> None:
    check_room(10, promised=5, free=15, allowed=20, taken=5)


def test_more_than_the_disk_holds_is_refused() -> None:
    with pytest.raises(FileRefused, match=r"2 GB of files do not fit on the disk: 500 MB are free there"):
        check_room(2 * 10**9, promised=10**9, free=15 * 10**8, allowed=None, taken=0)


def test_more_than_the_owner_allows_is_refused() -> None:
    with pytest.raises(FileRefused, match=r"its owner allows 1 GB for each cluster, 900 MB of it are used"):
        check_room(2 * 10**8, promised=10**8, free=10**12, allowed=10**9, taken=8 * 10**8)
