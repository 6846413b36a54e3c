"""A contribution encoded on the host: at once, or on a thread of its own while training goes on.

:mod:`.device_encoding` does it on the model's GPU.
"""

import math
import threading
from collections.abc import Callable

import numpy as np

from notebook_cluster.codecs import Buffer, Vector, WireFormat
from notebook_cluster.rounds.member.events_effects import Boundary
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.outer import CHUNK


class Background:
    """Makes one contribution at a time on a thread of its own. Main thread only."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, make: Callable[[], Boundary], hand_over: Callable[[Boundary], None]) -> None:
        """``hand_over(make())`` on the thread. The one before has been handed over."""
        self.wait()

        def run() -> None:
            try:
                hand_over(make())
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="encode", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is handed over: what the caller posts next comes after it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def error(self) -> Exception | None:
        """Why the last contribution could not be made; told once."""
        error, self._error = self._error, None
        return error


def encoded(
    wire: WireFormat, reference: Vector, local: Vector, feedback: Vector | None, beta: np.float32
) -> tuple[Buffer, Vector | None, float]:
    """``a = reference - local + beta * feedback`` as bytes, what of it they do not say (of a lossy codec), and its
    norm. A group of blocks at a time, while its elements are in the cache.

    Raises:
        NotFiniteError: a value is NaN or infinite.
    """
    encoded, squares = vectors.bytes_of(wire.size), 0.0
    left = vectors.empty(local.size) if wire.codec.lossy else None
    room, scratch = np.empty(wire.largest_group, np.float32), np.empty(CHUNK, np.float32)
    for group in wire.groups(elements=wire.encoded_at_a_time):
        first, end = group.elements.start, group.elements.stop
        values = room[: end - first] if left is None else left[group.elements]
        for start in range(first, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            work = values[part.start - first : part.stop - first]
            with np.errstate(all="ignore"):  # a diverged model is told when it is encoded
                np.subtract(reference[part], local[part], out=work)
                if feedback is not None:
                    work += np.multiply(feedback[part], beta, out=scratch[: work.size])
                squares += float(np.dot(work, work))
        encode = wire.encode if left is None else wire.encode_from
        encoded[group.bytes] = encode(values, group.first, group.end)
    encoded.flags.writeable = False
    return encoded.data, left, math.sqrt(squares)
