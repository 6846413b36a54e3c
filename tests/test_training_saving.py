"""The writer of checkpoints: parts of orders that came to nothing, and orders that are given again."""

import queue
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from msgspec.structs import replace

from notebook_cluster.checkpoints import find_latest, load
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Save, Saved
from notebook_cluster.rounds.numerics.vectors import TensorLayout
from notebook_cluster.training.checkpointing.saving import CHUNK, OPEN_TICKETS, CheckpointWriter, TrainingSnapshot

ORDER = Save(job="model", name="half", round=3, state_hash="h", writer="a", members=["a", "b"], ticket=7)
THETA = np.arange(4, dtype=np.float32)
STATE = TrainingSnapshot(3, "h", THETA, THETA * 2, TensorLayout.of([("weight", [4], "float32")], []), {})
RANKS = {"a": 0, "b": 1}


class Writer:
    def __init__(self, folder: Path) -> None:
        self.answers: SimpleQueue[Saved] = SimpleQueue()
        self.writer = CheckpointWriter(lambda: folder, self.answers.put)

    def order(self, ticket: int, **fields: object) -> None:
        self.writer.order(replace(ORDER, ticket=ticket, **fields), STATE, RANKS)

    def part(self, node: str, ticket: int, data: bytes, total: int | None = None) -> None:
        frame = JobFrame(job="model", incarnation=1, kind="part", ticket=ticket, total=total or len(data))
        self.writer.part(node, frame, memoryview(data))

    def answer(self) -> Saved:
        return self.answers.get(timeout=30)

    def is_silent(self) -> bool:
        try:
            self.answers.get_nowait()
        except queue.Empty:
            return True
        return False


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def parts_in(folder: Path) -> list[bytes | None]:
    found = find_latest(folder, "half")
    assert found is not None
    return list(load(found.path).parts())


def test_what_came_for_an_order_before_a_restart_is_not_in_the_new_checkpoint(writer: Writer, tmp_path: Path) -> None:
    writer.order(7)
    writer.part("a", 7, b"old a")
    writer.part("b", 7, bytes(CHUNK), total=CHUNK + 5)  # the rest never comes
    writer.order(1007)
    writer.part("a", 1007, b"new a")
    assert writer.is_silent()
    writer.part("b", 1007, b"new b")
    saved = writer.answer()
    assert (saved.error, saved.ticket) == ("", 1007)
    assert parts_in(tmp_path) == [b"new a", b"new b"]
    assert list(writer.writer._open) == []


def test_orders_whose_parts_do_not_come_are_given_up_when_there_are_too_many(writer: Writer) -> None:
    for ticket in range(OPEN_TICKETS + 2):
        writer.order(ticket, name=f"half-{ticket}")
    assert [writer.answer().ticket for _ in range(2)] == [0, 1]
    assert writer.is_silent()
    for node in RANKS:
        writer.part(node, 2, b"x")
    assert (writer.answer().name, len(writer.writer._open)) == ("half-2", OPEN_TICKETS - 1)


def test_the_same_checkpoint_ordered_twice_at_once_is_there_in_the_end(writer: Writer, tmp_path: Path) -> None:
    for ticket in (7, 1007):
        writer.order(ticket)
        for node in RANKS:
            writer.part(node, ticket, f"{node} {ticket}".encode())
    assert {writer.answer().ticket for _ in range(2)} == {7, 1007}
    assert parts_in(tmp_path) in ([b"a 7", b"b 7"], [b"a 1007", b"b 1007"])
