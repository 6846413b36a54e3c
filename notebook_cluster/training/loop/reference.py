"""What a node's work is taken from: theta as the model holds it. Main thread, or while it rests.

A model of float32 holds theta itself. One of a smaller dtype holds theta rounded, which would be another vector of its
size: it is computed part by part where it is read. Only what a fragment was loaded with while work was left in it is
kept, for it does not follow from theta: ``rounded(theta - work) + work``.
"""

from collections.abc import Callable, Iterator

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import CHUNK
from notebook_cluster.rounds.numerics.vectors import empty
from notebook_cluster.training.models.parameters import Parameters


class Reference:
    """What the model was loaded with last.

    Attributes:
        theta: the global parameters among it.
        with_work: fragment -> its elements where they are not those of theta, rounded.
    """

    def __init__(self, parameters: Parameters, fragments: Fragments) -> None:
        self._parameters, self._fragments = parameters, fragments
        self.theta: Vector = np.empty(0, np.float32)
        self.with_work: dict[int, Vector] = {}

    def loaded(self, theta: Vector, work: dict[int, Vector | None]) -> None:
        """The fragments named in ``work`` were loaded: with theta, or with theta - work where some was left in them."""
        kept = {fragment: values for fragment, values in self.with_work.items() if fragment not in work}
        for fragment, left in work.items():
            if left is not None and not self._parameters.exact:
                kept[fragment] = self.in_model(fragment)
                kept[fragment] += left
        self.theta, self.with_work = theta, kept

    def parts(self, fragment: int) -> Callable[[slice], Vector]:
        """What gives a range of the elements of ``fragment``, only to be read, until the model is loaded again. On any
        thread."""
        if fragment in self.with_work:
            return self.with_work[fragment].__getitem__
        held = self._parameters.as_held(self.theta)
        return held if self._fragments.count == 1 else _gathered(held, self._fragments.ranges(fragment)).__getitem__

    def in_model(self, fragment: int) -> Vector:
        """The elements of ``fragment`` in the model now, as a new vector."""
        if self._fragments.count == 1:
            return self._parameters.read()
        return _gathered(self._parameters.parts(), self._fragments.ranges(fragment))

    def without(self, fragment: int, local: Vector, out: Vector | None = None) -> Vector:
        """``reference - local`` of the elements of ``fragment``, in ``out`` (perhaps ``local``) or a new vector."""
        parts, out = self.parts(fragment), empty(local.size) if out is None else out
        for part, _ in _chunks([slice(0, local.size)]):
            np.subtract(parts(part), local[part], out=out[part])
        return out

    def differs(self) -> bool:
        """Whether a parameter of the model is not as it was loaded."""
        layout, local = self._parameters.layout, self._parameters.parts()
        trained = layout.size - layout.buffers
        for fragment in range(self._fragments.count):
            parts = self.parts(fragment)
            for part, here in _chunks(self._fragments.ranges(fragment)):
                if part.start < trained and not np.array_equal(local(part), parts(here), equal_nan=True):
                    return True
        return False


def _chunks(ranges: list[slice]) -> Iterator[tuple[slice, slice]]:
    """What ``ranges`` consist of, and where it is when they are one after the other."""
    position = 0
    for one in ranges:
        for start in range(one.start, one.stop, CHUNK):
            part = slice(start, min(start + CHUNK, one.stop))
            yield part, slice(position, position := position + part.stop - part.start)


def _gathered(parts: Callable[[slice], Vector], ranges: list[slice]) -> Vector:
    """The elements of ``ranges`` one after the other, as a new vector."""
    vector = empty(sum(one.stop - one.start for one in ranges))
    for part, here in _chunks(ranges):
        vector[here] = parts(part)
    return vector
