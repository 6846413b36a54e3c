"""Every value by itself: float32 as it is, exact, and bfloat16, its upper half."""

import numpy as np

from notebook_cluster.codecs.bfloat16 import from_bfloat16, to_bfloat16
from notebook_cluster.codecs.codec import BLOCK, CHUNK, Buffer, Vector, check_finite, check_size


class Float32:
    """Little-endian float32. ``decode`` is a view, not a copy."""

    name = "float32"
    block = BLOCK
    lossy = False

    def size(self, count: int) -> int:
        return 4 * count

    def encode(self, flat: Vector) -> memoryview:
        encoded = np.empty(flat.size, "<f4")
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            check_finite(chunk, start)
            encoded[start : start + CHUNK] = chunk
        encoded.flags.writeable = False
        return encoded.view(np.uint8).data

    def decode(self, data: Buffer, count: int) -> Vector:
        check_size(self.name, data, self.size(count))
        return np.frombuffer(data, "<f4")


class BFloat16:
    """Little-endian bfloat16: the range of float32 with 8 bits of precision, so no scale is needed."""

    name = "bf16"
    block = BLOCK
    lossy = True

    def size(self, count: int) -> int:
        return 2 * count

    def encode(self, flat: Vector) -> memoryview:
        encoded = np.empty(flat.size, "<u2")
        for start in range(0, flat.size, CHUNK):
            chunk = flat[start : start + CHUNK]
            check_finite(chunk, start)
            encoded[start : start + CHUNK] = to_bfloat16(chunk)
        encoded.flags.writeable = False
        return encoded.view(np.uint8).data

    def decode(self, data: Buffer, count: int) -> Vector:
        check_size(self.name, data, self.size(count))
        encoded, flat = np.frombuffer(data, "<u2"), np.empty(count, np.float32)
        for start in range(0, count, CHUNK):
            from_bfloat16(encoded[start : start + CHUNK], flat[start : start + CHUNK])
        return flat
