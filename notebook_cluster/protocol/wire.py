"""How a message becomes bytes: MessagePack of tagged msgspec structs."""

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
