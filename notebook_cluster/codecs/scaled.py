"""fp16, int8, int4 and e3m0 with one float32 scale per block of 256: a record is the scale, then the codes.

Symmetric: ``value = scale * code``, and the block's largest magnitude, absmax, becomes the largest code. fp16 codes are
``value / absmax``, so neither 1e5 overflows nor 1e-8 vanishes. A block whose scale or smallest values would be
subnormal is sent as zeros: machines differ in whether they flush subnormals. A last block of one element travels as
plain float32, else it would be longer than that.
"""

from typing import Any

import numpy as np

from notebook_cluster.codecs.codec import BLOCK, CHUNK, Buffer, Vector, check_size, not_finite
from notebook_cluster.codecs.codes import Codes

_BLOCKS = CHUNK // BLOCK
"""Blocks worked on at a time."""


class BlockScaled:
    """A codec whose blocks are records ``[scale: float32][codes]``."""

    block = BLOCK
    lossy = True

    def __init__(self, name: str, codes: Codes) -> None:
        self.name = name
        self.codes = codes
        self.largest_scale = _largest_scale(np.float32(codes.largest))
        self._largest = np.float32(codes.largest)
        self._record = 4 + codes.size(BLOCK)

    def size(self, count: int) -> int:
        blocks, rest = divmod(count, BLOCK)
        tail = 0 if rest == 0 else 4 if rest == 1 else 4 + self.codes.size(rest)
        return blocks * self._record + tail

    def encode(self, flat: Vector) -> memoryview:
        blocks = flat.size // BLOCK
        whole = blocks * BLOCK
        encoded = np.empty(self.size(flat.size), np.uint8)
        records = encoded[: blocks * self._record].reshape(blocks, self._record)
        scratch = np.empty((min(blocks, _BLOCKS), BLOCK), np.float32)
        for start in range(0, blocks, _BLOCKS):
            stop = min(start + _BLOCKS, blocks)
            values = flat[start * BLOCK : stop * BLOCK].reshape(-1, BLOCK)
            self._encode_blocks(values, records[start:stop], scratch[: stop - start], start * BLOCK)
        self._encode_tail(flat[whole:], encoded[blocks * self._record :], whole)
        encoded.flags.writeable = False
        return encoded.data

    def decode(self, data: Buffer, count: int) -> Vector:
        check_size(self.name, data, self.size(count))
        encoded = np.frombuffer(data, np.uint8)
        blocks, rest = divmod(count, BLOCK)
        flat = np.empty(count, np.float32)
        records = encoded[: blocks * self._record].reshape(blocks, self._record)
        for start in range(0, blocks, _BLOCKS):
            stop = min(start + _BLOCKS, blocks)
            self._decode_blocks(records[start:stop], flat[start * BLOCK : stop * BLOCK].reshape(-1, BLOCK))
        tail = encoded[blocks * self._record :]
        if rest == 1:
            flat[-1:] = tail.view("<f4")
        elif rest:
            self._decode_blocks(tail[None, :], flat[None, -rest:])
        return flat

    def _decode_blocks(self, records: Any, values: Any) -> None:
        """``records`` (n, record bytes) into ``values`` (n, block)."""
        self.codes.read(records[:, 4:], values)
        scale = records[:, :4].view("<f4")
        with np.errstate(invalid="ignore", over="ignore"):  # a scale that is not finite: see Codec.decode
            values *= scale

    def _encode_blocks(self, values: Any, records: Any, scratch: Any, start: int) -> None:
        """``values`` (n, block) into ``records`` (n, record bytes); ``start``: first element, for the error."""
        np.abs(values, out=scratch)
        absmax = scratch.max(axis=1, keepdims=True)
        if not np.isfinite(absmax).all():
            raise not_finite(start)
        scale = np.minimum(absmax / self._largest, self.largest_scale)
        empty = scale < self.codes.smallest_scale
        scale[empty] = 0
        absmax[empty] = np.inf  # codes become 0
        np.multiply(values, self._largest / absmax, out=scratch)
        records[:, :4].view("<f4")[...] = scale
        self.codes.write(scratch, records[:, 4:])

    def _encode_tail(self, values: Vector, record: Any, start: int) -> None:
        """The last, shorter block."""
        if values.size == 1:
            if not np.isfinite(values[0]):
                raise not_finite(start)
            record.view("<f4")[0] = values[0]
        elif values.size:
            self._encode_blocks(values[None, :], record[None, :], np.empty((1, values.size), np.float32), start)


def _largest_scale(largest: np.float32) -> np.float32:
    """The largest scale whose product with the largest code is finite: rounding may carry the quotient past it."""
    scale = np.finfo(np.float32).max / largest
    with np.errstate(over="ignore"):
        while not np.isfinite(scale * largest):
            scale = np.nextafter(scale, np.float32(0))
    return np.float32(scale)
