"""The cells that ``%push`` sends: what they make on a node is what was pushed."""

import numpy
import pandas
import pytest
import torch

from notebook_cluster.client import ClusterError, Packed, pack, small_source, take_source
from notebook_cluster.protocol.transfers import CHUNK_BYTES, ForgetTicket, PartWritten, ReadPart, ValuePart, WritePart
from notebook_cluster.values.transfer_store import SHELF, PushFailed


def run(source):
    """Run a cell as a node would."""
    namespace = {}
    exec(source, namespace)
    return namespace["value"]


def written(packed: Packed, ticket: str = "ticket", pieces: int = 3) -> list[str]:
    """Write a value in pieces, as the coordinator does; the answers."""
    data = b"".join(packed.buffers)
    step = max(-(-len(data) // pieces), 1)
    answers: list[PartWritten] = []
    for offset in range(0, len(data), step):
        piece = data[offset : offset + step]
        part = WritePart(request=offset, ticket=ticket, total=len(data), offset=offset, data=piece)
        SHELF.on_control(part, answers.append)
    return [answer.error for answer in answers]


@pytest.mark.parametrize(
    "value",
    [
        None, "text with 'quotes' \n, \\ and ü \ud800", b"\x00\xff", {"a": [1, (2.5, {3})]},
        numpy.arange(6, dtype="i2").reshape(2, 3), torch.ones(2, dtype=torch.bfloat16), pandas.DataFrame({"a": ["x"]}),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize("small", [True, False])
def test_a_value_arrives_inside_its_cell_or_beside_it(value, small):
    packed = pack("value", value)
    if small:
        arrived = run(small_source(packed))
    else:
        assert set(written(packed)) == {""}
        arrived = run(take_source(packed, "ticket"))
    assert type(arrived) is type(value)
    assert repr(arrived) == repr(value)


def test_only_small_values_travel_inside_their_cell():
    assert pack("value", bytes(300_000)).is_small
    assert not pack("value", bytes(1_000_000)).is_small


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (object(), "an object does not travel"),
        ({"net": torch.nn.Linear(1, 1)}, "Linear inside it"),
        (torch.eye(2).to_sparse(), "to_dense()"),
        (numpy.broadcast_to(numpy.float64(1), (1 << 28,)), "2,147 MB, at most 1 GiB"),
    ],
    ids=["object", "model", "sparse", "large"],
)
def test_what_cannot_be_pushed_is_named_with_the_way_out(value, part):
    with pytest.raises(ClusterError) as caught:
        pack("model", value)
    assert part in str(caught.value)
    assert str(caught.value).startswith("cannot push 'model': ")
    assert "%%on_all" in str(caught.value)


def test_a_value_is_taken_once():
    packed = pack("value", 1)
    written(packed)
    assert run(take_source(packed, "ticket")) == 1
    with pytest.raises(PushFailed, match="not here any more"):
        run(take_source(packed, "ticket"))


def test_a_value_that_is_not_whole_is_not_made():
    packed = pack("value", bytes(1000))
    data = b"".join(packed.buffers)
    for wrong in (data[:-1], data[:-1] + b"?"):
        part = WritePart(request=1, ticket="part", total=len(data), offset=0, data=wrong)
        SHELF.on_control(part, lambda answer: None)
        with pytest.raises(PushFailed, match="not all of the value: push it again"):
            run(take_source(packed, "part"))


@pytest.mark.parametrize(
    ("total", "offset", "data", "words"),
    [
        (10, 5, b"xxxxx", "what came before is not here any more"),
        (1 << 40, 0, b"x", "over the limit of 1 GiB"),
        (-1, 0, b"x", "over the limit"),
        (2, 0, b"xxx", "push it again"),
    ],
)
def test_bytes_that_cannot_be_are_refused(total, offset, data, words):
    answers = []
    SHELF.on_control(WritePart(request=7, ticket="odd", total=total, offset=offset, data=data), answers.append)
    assert answers[0].request == 7
    assert words in answers[0].error
    SHELF.on_control(ForgetTicket(ticket="odd"), answers.append)


def test_a_value_that_does_not_fit_into_memory_is_refused_before_it_comes(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 300 << 20}))
    answers = []
    part = WritePart(request=1, ticket="vast", total=200 << 20, offset=0, data=b"x")
    SHELF.on_control(part, answers.append)
    assert answers[0].error == "a value of 210 MB does not fit into the 315 MB of memory that are free"


def test_reading_what_nobody_laid_out_is_answered():
    answers: list[ValuePart] = []
    SHELF.on_control(ReadPart(request=3, ticket="none", name="x", size=CHUNK_BYTES), answers.append)
    assert (answers[0].request, answers[0].data) == (3, b"")
    assert "not here any more" in answers[0].error


def test_the_shelf_forgets_the_oldest_and_what_nobody_asks_for(monkeypatch):
    for number in range(40):
        SHELF.on_control(WritePart(request=0, ticket=f"t{number}", total=1, offset=0, data=b"x"), lambda answer: None)
    assert SHELF.pick_up("t39") == b"x"
    with pytest.raises(PushFailed):
        SHELF.pick_up("t0")
    monkeypatch.setattr("notebook_cluster.values.transfer_store.KEPT_SECONDS", -1.0)
    SHELF.tick()
    with pytest.raises(PushFailed):
        SHELF.pick_up("t38")
