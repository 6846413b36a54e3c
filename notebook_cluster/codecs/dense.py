"""float32 as it is: exact, four bytes per value."""

import numpy as np

from notebook_cluster.codecs.codec import BLOCK, CHUNK, Buffer, Vector, check_size, not_finite


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
            # max and min see NaN and both infinities, and leave nothing to allocate
            if not (np.isfinite(chunk.max()) and np.isfinite(chunk.min())):
                raise not_finite(start)
            encoded[start : start + CHUNK] = chunk
        encoded.flags.writeable = False
        return encoded.view(np.uint8).data

    def decode(self, data: Buffer, count: int) -> Vector:
        check_size(self.name, data, self.size(count))
        return np.frombuffer(data, "<f4")
