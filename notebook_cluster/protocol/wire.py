"""How a message becomes bytes: MessagePack of tagged msgspec structs; and the number of this form, which must match
between two machines, with the package's version.
"""

from typing import Any, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Largest encoded struct; bulk data goes beside it as buffers and has limits of its own."""


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, kw_only=True):
    """Base of every message; the tag on the wire is the class name."""


class ProtocolError(ValueError):
    """Bytes that are not a message of the expected kind. Receivers count and drop them."""


T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: msgspec.Struct) -> bytes:
    """``message`` as MessagePack bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, kind: Any) -> Any:
    """The message of type (or union of types) ``kind`` in ``data``.

    Raises:
        ProtocolError: too long, not MessagePack, an unknown tag or a field of the wrong type.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(str(error)) from None


VERSION = "0.1.0"
PROTOCOL_VERSION = 23


def mismatch(peer: str, theirs: int) -> str | None:
    """One line that names both versions and the way out, or None when they match."""
    if theirs == PROTOCOL_VERSION:
        return None
    older = f"on {peer!r}" if theirs < PROTOCOL_VERSION else "on this machine"
    return f"peer {peer!r} speaks protocol {theirs}, this machine {PROTOCOL_VERSION}: upgrade notebook-cluster {older}"
