"""Messages of ``protocol/sidebar.py`` as JSON, and back."""

from typing import Any

import msgspec

from notebook_cluster.protocol.sidebar import Action, ServerMessage

MAX_ACTION_BYTES = 16 * 1024


class BadAction(ValueError):
    """What a browser or script sent is not an Action; one line that says why. ``id`` is its id, 0 if it has none."""

    def __init__(self, text: str, id: int = 0) -> None:
        super().__init__(text)
        self.id = id


def to_json(message: ServerMessage) -> str:
    """``message`` with its type and every field; numbers that are not finite become null."""
    return msgspec.json.encode({"type": type(message).__name__, **_plain(message)}).decode()


def _plain(value: Any) -> Any:
    # msgspec leaves out what has its default value, which is right between Python programs only.
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list):
        # Curves and lists of text go through whole.
        return [_plain(item) for item in value] if value and isinstance(value[0], msgspec.Struct) else value
    return value


def to_action(data: bytes | str) -> Action:
    """The Action in ``data``.

    Raises:
        BadAction: it is too long, or not one.
    """
    if len(data) > MAX_ACTION_BYTES:
        raise BadAction(f"an action of {len(data)} bytes is over the limit of {MAX_ACTION_BYTES}")
    try:
        return msgspec.json.decode(data, type=Action)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadAction(f"this is not an action ({error}): see protocol/sidebar.py", _id_in(data)) from None


def _id_in(data: bytes | str) -> int:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return 0
    number = found.get("id") if isinstance(found, dict) else 0
    return number if isinstance(number, int) and not isinstance(number, bool) else 0
