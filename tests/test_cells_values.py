"""Last values on their way: what a node packs, what the coordinator keeps, what the notebook makes of it."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pytest

from notebook_cluster.coordinator.cells import streaming
from notebook_cluster.coordinator.cells.streaming import Collected
from notebook_cluster.journal import events
from notebook_cluster.journal.state import State, apply
from notebook_cluster.magics.execution.node_values import NodeValues, Remote, unpack
from notebook_cluster.node.namespace.last_value import pack
from notebook_cluster.protocol.interaction import MOST_VALUE_BYTES, VALUE_KEY, VALUE_MIME, NodeValue


def event(packed: bytes, node: str = "mini", rank: int | None = 0) -> NodeValue:
    return NodeValue(cell=1, node=node, rank=rank, packed=packed)


@pytest.mark.parametrize("value", [None, 3, "text", [1, (2.5, None)], {"a": {1, 2}}, b"\x00\xff"])
def test_plain_values_come_back(value: object) -> None:
    assert unpack(event(msgspec.json.encode(pack(value)))) == value


def test_an_array_comes_back() -> None:
    array = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    found = unpack(event(msgspec.json.encode(pack(array))))
    assert isinstance(found, numpy.ndarray)
    assert found.dtype == array.dtype
    assert (found == array).all()


def test_a_tensor_comes_back() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.full((2,), 1.5, dtype=torch.bfloat16)
    found = unpack(event(msgspec.json.encode(pack(tensor))))
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1.5, 1.5]


class Stubborn:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (numpy.zeros(MOST_VALUE_BYTES + 1, dtype=numpy.uint8), "4.2 MB, a cell's value may have 4 MiB"),
        ({"deep": [numpy.zeros(MOST_VALUE_BYTES + 1, dtype=numpy.uint8)]}, "4.2 MB"),
        ("x" * (MOST_VALUE_BYTES + 1), "4.2 MB"),
        (object(), "an object does not travel"),
        (Stubborn(), "a Stubborn does not travel"),
    ],
)
def test_what_cannot_travel_says_why(value: object, reason: str) -> None:
    found = unpack(event(msgspec.json.encode(pack(value))))
    assert isinstance(found, Remote)
    assert reason in found.reason
    assert len(repr(found)) < 700


def test_a_value_that_holds_itself_says_so() -> None:
    loop: list[Any] = []
    loop.append(loop)
    found = unpack(event(msgspec.json.encode(pack(loop))))
    assert isinstance(found, Remote)
    assert "holds itself" in found.reason


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"not json",
        b"[]",
        b'{"meta": 5}',
        b'{"meta": {}, "buffers": []}',
        b'{"meta": {"kind": "plain"}, "buffers": ["!!!"]}',
        b'{"meta": {"kind": "plain"}, "buffers": ["bnVsbA==", "bnVsbA=="]}',
        b'{"meta": {"kind": "numpy", "dtype": "O", "shape": [1]}, "buffers": ["AAAAAAAAAAA="]}',
        b'{"meta": {"kind": "numpy", "dtype": "<f4", "shape": [99999999999]}, "buffers": ["AAAA"]}',
        b'{"meta": {"kind": "pickle"}, "buffers": ["gASVCg=="]}',
        b'{"reason": "\\u001b[31mred\\u0007\\n"}',
        b'{"meta": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_nonsense_of_a_node_becomes_a_remote_value_without_control_characters(packed: bytes) -> None:
    found = unpack(event(packed))
    assert isinstance(found, Remote)
    assert found.node == "mini"
    assert repr(found).isprintable()


def test_values_are_in_rank_order_whatever_came_first() -> None:
    values = NodeValues()
    for node, rank in (("late", None), ("desk", 2), ("mini", 0)):
        values.add(event(b'{"meta": {"kind": "plain"}, "buffers": ["bnVsbA=="]}', node, rank))
    assert list(values.in_rank_order()) == ["mini", "desk", "late"]


def coordinator() -> Any:
    sent: list[NodeValue] = []
    views = SimpleNamespace(
        send_watching=lambda cell, value: sent.append(value), send=lambda view, value: sent.append(value)
    )
    return SimpleNamespace(state=SimpleNamespace(rank=lambda node: 0), views=views, sent=sent)


def answer(value: object) -> dict[str, Any]:
    return {"status": "ok", "data": {VALUE_MIME: value}}


def test_the_coordinator_takes_the_value_out_of_the_answers() -> None:
    fake = coordinator()
    rest = Collected(fake, fake.views).take(
        1, "mini", {VALUE_KEY: answer({"reason": "why"}), "other": {"status": "ok"}}
    )
    assert rest == {"other": {"status": "ok"}}
    assert [value.packed for value in fake.sent] == [b'{"reason":"why"}']


@pytest.mark.parametrize(
    "answers", [None, [], "x", {VALUE_KEY: 3}, {VALUE_KEY: {"data": []}}, {VALUE_KEY: answer([1])}]
)
def test_answers_that_are_none_harm_nothing(answers: object) -> None:
    fake = coordinator()
    assert Collected(fake, fake.views).take(1, "mini", answers) == {}
    assert all(value.packed == b"" for value in fake.sent)


def test_only_so_much_is_kept_for_views_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MOST_KEPT_BYTES", 100)
    fake = coordinator()
    kept = Collected(fake, fake.views)
    for number in range(1, 6):
        kept.take(number, "mini", {VALUE_KEY: answer({"text": "x" * 30})})
    fake.sent.clear()
    for number in range(1, 6):
        kept.catch_up(None, number)  # type: ignore[arg-type]
    assert [value.cell for value in fake.sent] == [4, 5]


def test_before_its_canary_has_ended_nobody_else_may_run_a_cell() -> None:
    state = apply(State(), events.CellSubmitted(cell=1, source="", targets=["a", "b"], replay=True, canary="b"))
    assert [state.cells[1].may_run(name) for name in "abc"] == [False, True, False]
    state = apply(state, events.CellStarted(cell=1, nodes=["b"], generation=1, time=0.0))
    assert state.cells[1].partners("b") == ["b"]
    state = apply(state, events.CellNodeEnded(cell=1, node="b", status="ok"))
    state = apply(state, events.CellWidened(cell=1, nodes=["a"], generation=2))
    assert [state.cells[1].may_run(name) for name in "abc"] == [True, True, False]
    assert (state.cells[1].partners("a"), state.cells[1].partners("b")) == (["a"], ["b"])
    assert state.cells[1].nodes == {"b": "ok", "a": "running"}
