"""Last values of cells, handed from nodes to the views that watch; kept for views that come later, within limits."""

from typing import TYPE_CHECKING, Any

import msgspec

from notebook_cluster.coordinator.view_server import View
from notebook_cluster.protocol.collecting import MOST_PACKED_BYTES, VALUE_KEY, VALUE_MIME, NodeValue

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

MOST_KEPT_BYTES = 64 * 1024 * 1024
"""Over all cells; the oldest values go first."""


class Collected:
    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._kept: dict[tuple[int, str], NodeValue] = {}
        self._bytes = 0

    def take(self, cell: int, node: str, answers: object) -> dict[str, Any]:
        """The value among a node's answers to a cell's user expressions goes to the views; the others are returned."""
        if not isinstance(answers, dict):
            return {}
        rest = {str(key): answer for key, answer in answers.items() if key != VALUE_KEY}
        if VALUE_KEY in answers:
            packed = _packed(answers[VALUE_KEY])
            value = NodeValue(cell=cell, node=node, rank=self._hub.state.rank(node), packed=packed)
            self._keep(value)
            self._hub.views.send_watching(cell, value)
        return rest

    def catch_up(self, view: View, cell: int) -> None:
        """The values of ``cell`` so far to one view."""
        for (number, _), value in self._kept.items():
            if number == cell:
                self._hub.views.send(view, value)

    def _keep(self, value: NodeValue) -> None:
        key = (value.cell, value.node)
        before = self._kept.pop(key, None)
        self._kept[key] = value
        self._bytes += len(value.packed) - (len(before.packed) if before is not None else 0)
        while self._bytes > MOST_KEPT_BYTES:
            oldest = next(iter(self._kept))
            self._bytes -= len(self._kept.pop(oldest).packed)


def _packed(answer: object) -> bytes:
    """The JSON of a value; empty when the answer is not one or too large."""
    data = answer.get("data") if isinstance(answer, dict) else None
    value = data.get(VALUE_MIME) if isinstance(data, dict) else None
    if not isinstance(value, dict):
        return b""
    packed = msgspec.json.encode(value)
    return packed if len(packed) <= MOST_PACKED_BYTES else b""
