"""The last values of a cell: what ``-o VAR`` holds, and the results of a handle. Bytes become values by
:func:`notebook_cluster.values.encoding.decode_value`; nothing is unpickled."""

import base64
import binascii
from dataclasses import dataclass
from typing import Any

import msgspec

from notebook_cluster.protocol.interaction import MOST_PACKED_BYTES, NodeValue
from notebook_cluster.values.encoding import decode_value
from notebook_cluster.widgets.formatting import plain


@dataclass(frozen=True)
class Remote:
    """A value that stays on its node.

    Attributes:
        node: where it is.
        kind: what it is, in a few words.
        text: the beginning of its repr.
        reason: why it did not come, with the way out.
    """

    node: str
    kind: str
    text: str
    reason: str

    def __repr__(self) -> str:
        return f"<{self.text or self.kind or 'a value'} stays on {self.node}: {self.reason}>"


@dataclass(frozen=True)
class Failed:
    """A node that has no value, because the cell did not end well there.

    Attributes:
        node: its name.
        status: ``error``, ``interrupted``, ``lost`` or ``cancelled`` (it did not run the cell).
        reason: the error, or why it was lost or left out.
    """

    node: str
    status: str
    reason: str

    def __repr__(self) -> str:
        return f"<{self.node}: {self.reason or self.status}>"


class _Packed(msgspec.Struct):
    meta: dict[str, Any] | None = None
    buffers: list[str] = []
    kind: str = ""
    text: str = ""
    reason: str = ""


class NodeValues:
    """The values of one cell's nodes."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int | None, object]] = {}

    def add(self, event: NodeValue) -> None:
        """Take what came from one node. Never raises: what is not readable becomes a :class:`Remote` that says so."""
        self._values[event.node] = (event.rank, unpack(event))

    def in_rank_order(self) -> dict[str, object]:
        """Node -> value."""
        ordered = sorted(self._values.items(), key=lambda item: (item[1][0] is None, item[1][0] or 0, item[0]))
        return {node: value for node, (_, value) in ordered}


def unpack(event: NodeValue) -> object:
    """The value in ``event``, or a :class:`Remote`."""
    try:
        if len(event.packed) > MOST_PACKED_BYTES:
            raise ValueError("it is too large")
        packed = msgspec.json.decode(event.packed, type=_Packed)
        if packed.meta is None:
            kind, text, reason = (plain(part, 300) for part in (packed.kind, packed.text, packed.reason))
            return Remote(event.node, kind, text, reason or "the node does not say why")
        return decode_value(packed.meta, [base64.b64decode(text, validate=True) for text in packed.buffers])
    except (msgspec.DecodeError, binascii.Error, ValueError, RecursionError) as error:
        reason = plain(error, 200) if event.packed else "the node sent none, or one that is too large"
        return Remote(event.node, "", "", f"its value is not readable here: {reason}")
