"""What nodes of one peer read of each other in place of having it sent: never changed under a reader, never left
behind."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from notebook_cluster.mesh import lending, shared_memory
from notebook_cluster.mesh.lending import LEAST, PIECE, Lending
from notebook_cluster.protocol.mesh import JobFrame, LentFrame, MeshHeader, ReturnedFrame
from tests.conftest import wait_until
from tests.mesh_nodes import MeshNode, make_roster, mesh_nodes

SIZE = 2 * LEAST
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is lent through /dev/shm")


class Lender:
    """A node that lends, and keeps what came as it came."""

    def __init__(self, node: MeshNode) -> None:
        self.node, self.name = node, node.name
        self.came: list[tuple[JobFrame, memoryview]] = []
        node.mesh.on_frame = self._keep
        self.lending = Lending(node.mesh)

    def _keep(self, sender: str, header: MeshHeader, payload: memoryview) -> None:
        assert isinstance(header, JobFrame)
        self.came.append((header, payload))

    def roster(self, nodes: "list[Lender]", peers: list[str], generation: int) -> None:
        def told() -> None:
            self.node.mesh.set_roster(roster)
            self.lending.on_roster(roster)

        roster = make_roster([lender.node for lender in nodes], peers, generation)
        self.node.loop.call(told)

    def filled(self, value: int, size: int = SIZE) -> NDArray[np.uint8]:
        memory = self.lending.memory(size)
        assert memory is not None
        memory.fill(value)
        return memory

    def send(self, node: str, data: NDArray[np.uint8], number: int = 1) -> None:
        self.lending.send(node, frame(number, data.size), memoryview(data))

    def files(self) -> list[Path]:
        """What it has in ``/dev/shm`` now."""
        return [file.shared._path for file in self.lending._files if file.shared._path.exists()]


def frame(number: int, size: int) -> JobFrame:
    return JobFrame(job="model", incarnation=1, kind="contribution", round=number, total=size)


@contextmanager
def lenders(*names: str, peers: list[str] | None = None) -> Iterator[list[Lender]]:
    with mesh_nodes(*names, peers=peers) as nodes:
        found = [Lender(node) for node in nodes]
        for lender in found:
            lender.roster(found, peers or ["one"] * len(names), 2)
        try:
            yield found
        finally:
            for lender in found:
                lender.came.clear()
                lender.lending.close()


@pytest.fixture
def pair() -> Iterator[list[Lender]]:
    with lenders("mini", "desk") as found:
        yield found


def place(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])


def test_what_is_lent_is_read_where_it_is(pair: list[Lender]) -> None:
    mini, desk = pair
    assert mini.lending.readers() == {"desk"}
    data = mini.filled(7)
    before = mini.node.mesh.bytes_sent
    mini.send("desk", data)
    wait_until(lambda: desk.came)
    header, payload = desk.came[0]
    assert header == frame(1, SIZE)
    assert bytes(payload) == bytes([7]) * SIZE
    assert payload.readonly
    assert mini.node.mesh.bytes_sent - before < 1000
    data[5] = 9  # it is the same memory
    assert payload[5] == 9


def test_memory_is_used_again_when_its_reader_has_let_go_and_not_before(pair: list[Lender]) -> None:
    mini, desk = pair
    data = mini.filled(1)
    first = place(data)
    mini.send("desk", data)
    wait_until(lambda: desk.came)
    held = np.frombuffer(desk.came.pop()[1], np.uint8)[10:20]  # a part of it is enough
    del data
    other = mini.filled(2)
    assert place(other) != first
    mini.send("desk", other, 2)
    wait_until(lambda: desk.came)
    assert held.tolist() == [1] * 10
    assert desk.came[0][1][0] == 2
    del held
    wait_until(lambda: not mini.lending._files[0].loans)
    again = mini.filled(3)
    assert place(again) == first
    assert bytes(desk.came[0][1][:9]) == bytes([2]) * 9


def test_what_this_node_itself_still_needs_is_not_used_again(pair: list[Lender]) -> None:
    mini, _ = pair
    view = memoryview(mini.filled(1))[100:200]
    other = mini.filled(2)
    assert bytes(view) == bytes([1]) * 100
    assert place(other) != place(np.frombuffer(view, np.uint8)) - 100


def test_a_part_of_it_is_lent_as_that_part(pair: list[Lender]) -> None:
    mini, desk = pair
    data = mini.lending.memory(3 * LEAST)
    assert data is not None
    data[:] = np.arange(data.size) % 251
    start = LEAST + 4097
    mini.lending.send("desk", frame(1, LEAST), memoryview(data)[start : start + LEAST])
    wait_until(lambda: desk.came)
    assert bytes(desk.came[0][1]) == bytes(data[start : start + LEAST])


def test_memory_of_a_reader_that_left_is_never_used_again(pair: list[Lender]) -> None:
    """It may be stopped, and read on when it wakes up."""
    mini, desk = pair
    data = mini.filled(1)
    mini.send("desk", data)
    wait_until(lambda: desk.came)
    number, path = mini.lending._files[0].number, mini.files()[0]
    mini.roster([mini], ["one"], 3)
    mini.roster([mini, desk], ["one", "one"], 4)
    del data
    desk.send("mini", desk.filled(4))  # the way back works
    wait_until(lambda: mini.came)
    others = [mini.filled(number) for number in (5, 6, 7)]
    assert bytes(desk.came[0][1]) == bytes([1]) * SIZE
    assert len(others) == 3
    assert number not in [file.number for file in mini.lending._files]
    assert not path.exists()


def test_a_reader_that_never_lets_go_costs_its_memory_and_no_more(pair: list[Lender]) -> None:
    mini, desk = pair
    for number in range(6):
        mini.send("desk", mini.filled(number), number)
        wait_until(lambda count=number + 1: len(desk.came) == count)
    assert [payload[-1] for _, payload in desk.came] == list(range(6))
    assert len(mini.files()) <= 4


def test_nobody_writes_to_what_only_another_one_gives_back() -> None:
    """A ticket counts when it comes from the node that has it, for this life of the lender."""
    with lenders("mini", "desk", "book") as (mini, desk, book):
        data = mini.filled(1)
        mini.send("desk", data)
        mini.send("book", data)
        wait_until(lambda: desk.came and book.came)
        loans = mini.lending._files[0].loans
        first, second = loans
        take = mini.node.mesh.on_frame
        for sender, incarnation in (("book", 1), ("mini", 1), ("tall", 1), ("desk", 2)):
            said = ReturnedFrame(incarnation, [first])
            mini.node.loop.call(lambda sender=sender, said=said: take(sender, said, memoryview(b"")))
            assert list(loans) == [first, second]
        all_of_them = ReturnedFrame(1, [first, *range(20), *range(20)])
        mini.node.loop.call(lambda: take("desk", all_of_them, memoryview(b"")))
        assert list(loans) == [second]
        desk.came.clear()
        book.came.clear()
        wait_until(lambda: not loans)


def test_what_comes_before_its_roster_is_given_back_too() -> None:
    with mesh_nodes("mini", "desk") as nodes:
        mini, desk = map(Lender, nodes)
        alone = make_roster([desk.node], ["one"], 2)
        desk.node.loop.call(lambda: desk.node.mesh.set_roster(alone))
        mini.roster([mini, desk], ["one", "one"], 2)
        mini.send("desk", mini.filled(1))
        wait_until(lambda: desk.node.mesh._early)
        desk.roster([mini, desk], ["one", "one"], 3)
        wait_until(lambda: desk.came)
        assert mini.lending._files[0].loans
        desk.came.clear()
        wait_until(lambda: not mini.lending._files[0].loans)
        mini.lending.close()


def test_more_loans_than_a_process_has_descriptors_for_go_over_the_socket(
    pair: list[Lender], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lending, "_MOST_READ", 3)
    mini, desk = pair
    data = mini.filled(1)
    for number in range(5):  # one after the other there are never many
        mini.send("desk", data, number)
        wait_until(lambda: desk.came)
        desk.came.clear()
        wait_until(lambda: not mini.lending._files[0].loans)
    for number in range(5):
        mini.send("desk", data, number)
    wait_until(lambda: not mini.lending.readers())
    assert len(desk.came) == 3
    mini.send("desk", data, 7)
    wait_until(lambda: len(desk.came) == 3 + SIZE // PIECE)


@pytest.mark.parametrize("peers", [["one", "two"], ["one", "one"]], ids=["another peer", "ordinary memory"])
def test_what_cannot_be_lent_goes_in_pieces(peers: list[str]) -> None:
    with lenders("mini", "desk", peers=peers) as (mini, desk):
        assert (mini.lending.memory(SIZE) is None) == (peers[1] == "two")
        data = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
        mini.lending.send(
            "desk", JobFrame(job="model", incarnation=1, kind="mean", offset=8, total=SIZE + 8), data.data
        )
        wait_until(lambda: len(desk.came) == SIZE // PIECE)
        assert [header.offset for header, _ in desk.came] == list(range(8, SIZE + 8, PIECE))
        assert b"".join(payload for _, payload in desk.came) == data.tobytes()


def test_where_a_reader_may_not_open_it_the_next_ones_go_over_the_socket(
    pair: list[Lender], caplog: pytest.LogCaptureFixture
) -> None:
    mini, desk = pair
    data = mini.filled(1)
    mini.files()[0].chmod(0o644)
    mini.send("desk", data)
    wait_until(lambda: not mini.lending.readers())
    assert not desk.came
    assert "cannot read it here" in caplog.text
    assert mini.lending.memory(SIZE) is None
    mini.send("desk", data, 2)
    wait_until(lambda: len(desk.came) == SIZE // PIECE)
    # another life of that node is asked anew
    desk.node.incarnation = 2
    mini.roster([mini, desk], ["one", "one"], 5)
    assert mini.lending.readers() == {"desk"}


@pytest.mark.parametrize(
    ("start", "stop", "size"),
    [(0, SIZE + 1, SIZE), (-1, 5, SIZE), (5, 5, SIZE), (0, 9, SIZE + 1), (0, 1 << 70, 1 << 70)],
)
def test_a_frame_that_names_other_bytes_is_refused(pair: list[Lender], start: int, stop: int, size: int) -> None:
    mini, desk = pair
    data, number = mini.filled(1), mini.lending._files[0].number
    answers: list[MeshHeader] = []
    take = mini.node.mesh.on_frame
    mini.node.mesh.on_frame = lambda sender, header, payload: (answers.append(header), take(sender, header, payload))[1]
    lent = LentFrame(frame(1, 9), 99, number, size, start, stop)
    desk.node.loop.call(lambda: desk.node.mesh.on_frame("mini", lent, memoryview(b"")))
    wait_until(lambda: answers)
    assert isinstance(answers[0], ReturnedFrame)
    assert answers[0].refused
    assert not desk.came
    assert mini.lending.readers() == {"desk"}  # it did not lend that
    assert data[0] == 1


def test_where_there_is_no_room_nothing_is_lent(pair: list[Lender], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_has_room", lambda size: False)
    assert pair[0].lending.memory(SIZE) is None
    assert not list(pair[0].node.mesh_directory.glob("*.-*"))  # nor in a file on a disk


def test_small_and_of_other_kinds_is_sent(pair: list[Lender]) -> None:
    mini, desk = pair
    assert mini.lending.memory(LEAST - 1) is None
    data = mini.filled(1)
    header = JobFrame(job="model", incarnation=1, kind="state", total=SIZE)
    mini.lending.send("desk", header, data.data)
    wait_until(lambda: desk.came)
    assert desk.came[0][0] == header
    assert not mini.lending._files[0].loans


def test_the_end_of_a_cell_gives_everything_back(pair: list[Lender]) -> None:
    mini, desk = pair
    kept, free = mini.filled(1), mini.filled(2)
    mini.send("desk", kept)
    wait_until(lambda: desk.came)
    del free
    mini.lending.forget()
    assert len(mini.files()) == 1
    paths = mini.files()
    del kept
    wait_until(lambda: not mini.lending._files)
    assert not paths[0].exists()
    assert bytes(desk.came[0][1]) == bytes([1]) * SIZE  # its reader still has it
