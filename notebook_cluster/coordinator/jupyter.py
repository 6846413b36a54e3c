"""The few Jupyter messages that a coordinator writes and reads (messaging protocol 5.4)."""

import datetime
from typing import Any

import msgspec

from notebook_cluster.journal.state import Cell


class JupyterHeader(msgspec.Struct):
    """The two fields of a Jupyter header that are looked at; the rest is skipped while decoding."""

    msg_type: str = ""
    msg_id: str = ""


_header = msgspec.json.Decoder(JupyterHeader)
_json = msgspec.json.Decoder()
_encode = msgspec.json.encode
EMPTY = b"{}"


def headers(buffers: list[bytes]) -> tuple[JupyterHeader, str]:
    """(header, parent's msg_id) of message parts [header, parent_header, metadata, content, ...]."""
    return _header.decode(buffers[0]), _header.decode(buffers[1]).msg_id


def content(buffers: list[bytes]) -> dict[str, Any]:
    """The decoded content. Raises msgspec.DecodeError."""
    value = _json.decode(buffers[3])
    if not isinstance(value, dict):
        raise msgspec.DecodeError("content is not an object")
    return value


def execute_request(
    message_id: str, session: str, cell: Cell, metadata: dict[str, Any], *, allow_stdin: bool = False
) -> list[bytes]:
    """Parts of an execute_request for ``cell``; ``metadata`` is found by the node under ``notebook_cluster``."""
    body = {
        "code": cell.source,
        "silent": False,
        "store_history": True,
        "user_expressions": cell.user_expressions,
        "allow_stdin": allow_stdin,
        "stop_on_error": True,
    }
    return message("execute_request", message_id, session, body, {"notebook_cluster": metadata})


def message(
    kind: str, message_id: str, session: str, body: dict[str, Any], metadata: dict[str, Any] | None = None
) -> list[bytes]:
    """Parts of any message that begins a conversation: header, parent_header, metadata, content."""
    header = {
        "msg_id": message_id,
        "session": session,
        "username": "notebook-cluster",
        "date": datetime.datetime.now(datetime.UTC).isoformat(),
        "msg_type": kind,
        "version": "5.4",
    }
    return [_encode(header), EMPTY, _encode(metadata or {}), _encode(body)]
