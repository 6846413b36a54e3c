"""Makes bad frames out of good ones: flipped bits, cut, spliced, lying about lengths, bombs, and right but absurd.

A *message* here is what one zmq multipart message carries: a list of frames as bytes.
"""

import random
import struct
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Frames = list[bytes]

NUMBERS = (0, 1, -1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, -(2**31), -(2**63))
TEXTS = (
    "", "a", "fuzz", "../../etc/passwd", "/dev/null", "a\0b", "<script>alert(1)</script>", "x" * 5000, "é" * 300,
    "\u202emoc", "local", "all", "cpu99", "tcp://127.0.0.1:1", "-rf", "a\nb\r\n", "%s%n{0}", "\ufeff", "..",
)  # fmt: skip
_NUMBER = st.sampled_from(NUMBERS) | st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 30)
_FLOAT = st.sampled_from((0.0, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("nan"))) | st.floats()
_TEXT = st.sampled_from(TEXTS) | st.text(max_size=40)
_BYTES = st.binary(max_size=64) | st.sampled_from((b"", b"\0" * 32, b"\xff" * 5000))
_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: _NUMBER, float: _FLOAT, str: _TEXT, bytes: _BYTES, bool: st.booleans(), type(None): st.none(),
    Any: st.none() | _NUMBER | _TEXT | _BYTES,
}  # fmt: skip


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values that have the form of ``kind`` (a struct, or what a struct's field may be) and extreme content."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        fields = {name: values_of(hints[name]) for name in kind.__struct_fields__}
        return st.builds(kind, **fields)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(argument) for argument in arguments])
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=5)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=5).map(tuple)
        return st.tuples(*(values_of(argument) for argument in arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=4)
    raise TypeError(f"no values of {kind!r}: say how in {__name__}")


def examples(kinds: Sequence[type[msgspec.Struct]], each: int, start: int) -> list[msgspec.Struct]:
    """``each`` structs of every one of ``kinds``, the same ones for the same ``start``."""
    found: list[msgspec.Struct] = []
    for kind in kinds:

        @seed(start)
        @settings(
            max_examples=each, phases=[Phase.generate], database=None, deadline=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(values_of(kind))
        def collect(value: msgspec.Struct) -> None:
            found.append(value)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            collect()
    return found


class Mutator:
    """Bad messages out of good ones; the same sequence for the same ``start``.

    ``limit``: the largest frame that the receiver takes. A larger one ends the connection on which it comes, so these
    are made by :meth:`oversized` only.
    """

    def __init__(self, start: int, limit: int) -> None:
        self.random = random.Random(start)
        self._limit = limit
        self._kept: list[Frames] = []
        self._ways: list[tuple[str, int, Callable[[Frames], Frames]]] = [
            ("intact", 3, list),
            ("bits", 5, self._each(self._flip_bits)),
            ("cut", 3, self._each(self._cut)),
            ("longer", 2, self._each(self._lengthen)),
            ("splice", 3, self._each(self._splice)),
            ("length", 4, self._each(self._lie_about_length)),
            ("bomb", 1, self._each(self._bomb)),
            ("random", 1, self._each(lambda frame: self.random.randbytes(self.random.randrange(200)))),
            ("frames", 2, self._other_frames),
            ("replay", 2, lambda frames: list(self.random.choice(self._kept))),
        ]
        self._names = [name for name, _, _ in self._ways]
        self._weights = [weight for _, weight, _ in self._ways]
        self._changes = {name: change for name, _, change in self._ways}

    def mutate(self, message: Sequence[bytes]) -> Frames:
        """``message`` changed in one way, or left as it is."""
        self._keep(message)
        (way,) = self.random.choices(self._names, self._weights)
        return [frame[: self._limit] for frame in self._changes[way](list(message))]

    def oversized(self) -> bytes:
        """A frame over the receiver's limit."""
        return b"\xc6" + bytes(self._limit + self.random.choice((1, 7, 100_000)))

    def garbage(self) -> bytes:
        """What a program that speaks another protocol writes to a TCP port, or a ZMTP greeting that goes wrong."""
        greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01" + self.random.choice((b"CURVE", b"NULL", b"PLAIN")).ljust(
            20, b"\0"
        )
        greeting += b"\0" * 32
        command = b"\x04" + bytes([self.random.randrange(256)]) + b"\x05HELLO" + self.random.randbytes(194)
        return self.random.choice(
            (
                self.random.randbytes(self.random.randrange(1, 300)),
                b"GET / HTTP/1.1\r\nHost: peer\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self.random.randbytes(32),
                greeting[: self.random.randrange(1, 64)],
                greeting + command,
                greeting + b"\x06" + struct.pack(">Q", 2**63 - 1) + self.random.randbytes(50),
                b"\xff" + struct.pack(">Q", self.random.getrandbits(64)) + b"\x7f\x01" + self.random.randbytes(30),
            )
        )

    def _keep(self, message: Sequence[bytes]) -> None:
        if len(self._kept) < 500:
            self._kept.append(list(message))
        else:
            self._kept[self.random.randrange(500)] = list(message)

    def _each(self, change: Callable[[bytes], bytes]) -> Callable[[Frames], Frames]:
        """Change one frame of a message."""

        def changed(frames: Frames) -> Frames:
            if not frames:
                return [change(b"")]
            index = self.random.randrange(len(frames))
            frames[index] = change(frames[index])
            return frames

        return changed

    def _flip_bits(self, frame: bytes) -> bytes:
        data = bytearray(frame)
        for _ in range(self.random.randint(1, 4)):
            if data:
                data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return bytes(data)

    def _cut(self, frame: bytes) -> bytes:
        return frame[: self.random.randrange(len(frame) + 1)]

    def _lengthen(self, frame: bytes) -> bytes:
        extra = self.random.randbytes(self.random.randrange(1, 64))
        return self.random.choice((frame + extra, extra + frame, frame + frame, frame + bytes(10_000)))

    def _splice(self, frame: bytes) -> bytes:
        other = self.random.choice(self._kept)
        donor = self.random.choice(other) if other else b""
        return frame[: self.random.randrange(len(frame) + 1)] + donor[self.random.randrange(len(donor) + 1) :]

    def _lie_about_length(self, frame: bytes) -> bytes:
        """A MessagePack header in the middle that promises more than there is."""
        size = self.random.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x10\x00\x00", b"\0\0\0\0"))
        header = self.random.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")) + size
        position = self.random.randrange(len(frame) + 1)
        return frame[:position] + header + frame[position + self.random.choice((0, 1, 5)) :]

    def _bomb(self, frame: bytes) -> bytes:
        """Small to send, large or deep to decode."""
        deep = self.random.choice((100, 10_000, 60_000))
        position = self.random.choice((0, self.random.randrange(len(frame) + 1)))
        bomb = self.random.choice(
            (b"\x91" * deep, b"\x81\xa1a" * (deep // 3), b"\xdd\x00\x01\x00\x00" + b"\xc0" * 65536)
        )
        return frame[:position] + bomb

    def _other_frames(self, frames: Frames) -> Frames:
        """More, fewer, empty or exchanged frames."""
        which = self.random.randrange(5)
        if which == 0:
            return frames[:-1]
        if which == 1:
            return frames + [b""]
        if which == 2:
            return frames + [self.random.randbytes(10)] * self.random.choice((1, 3, 200))
        if which == 3:
            return frames[::-1]
        return [b""] * len(frames)
