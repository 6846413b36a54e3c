"""A model's flat vector in fragments that are exchanged in turn (streaming DiLoCo, arXiv 2501.18512). Pure numpy.

The trainable part is cut into stripes of whole codec blocks, and stripe ``i`` belongs to fragment ``i % count``: as in
the paper's strided pattern each fragment has a part of every region of the model, and all have nearly the same size.
The running statistics of normalisation layers go with the last fragment. One fragment is the vector itself.
"""

import numpy as np

from notebook_cluster.codecs import Vector, WireFormat
from notebook_cluster.protocol.rounds import fragment_of
from notebook_cluster.rounds.numerics.outer import Descent, state_hash
from notebook_cluster.rounds.numerics.tiles import Tiles
from notebook_cluster.rounds.numerics.weighted_mean import codec_of

STRIPE = 64 * 1024
"""Most elements of a stripe."""

_LEAST_STRIPES = 8
"""Stripes of each fragment, where the model is large enough."""


class Fragments:
    """``count`` fragments of ``parameters`` elements in codec ``codec``, then ``buffers`` elements in float32."""

    def __init__(
        self,
        codec: str,
        parameters: int,
        buffers: int = 0,
        count: int = 1,
        *,
        gathers: bool = False,
        gradients: bool = False,
        served: bool = False,
        exact_every: int = 0,
        tiles: Tiles | None = None,
        descent: Descent | None = None,
    ) -> None:
        """``gathers``: owners of slices send the contributions on instead of their mean (:mod:`.weighted_mean`).
        ``gradients``: rounds carry gradients. Their mean is what momentum holds; theta is what every node's own
        optimiser made of it. ``served``: one node's optimiser makes its step with their mean, and theta, in float32,
        is what all get instead of the mean. ``exact_every``: in every round whose number it divides the codec is
        float32; 0: never.
        ``descent``: rounds carry momenta, and this is made of their mean; ``tiles``: the order of their elements on the
        wire. Both need ``gathers`` and one fragment.

        Raises:
            ValueError: more fragments than the model has codec blocks; says how many it can have.
        """
        self.codec = codec_of(codec)
        self.count = count
        self.gathers = gathers
        self.gradients = gradients
        self.served = served
        self.size = parameters + buffers
        """Elements of the whole vector."""
        self.descent = descent
        self._tiles = tiles
        self._ranges = _stripes(parameters, self.codec.block, count)
        if not all(self._ranges):
            blocks = -(-parameters // self.codec.block)
            raise ValueError(
                f"fragments={count}: this model has {parameters} parameters, which codec {codec!r} sends in {blocks} "
                f"blocks of {self.codec.block}: use fragments={blocks} or fewer"
            )
        if buffers:
            self._ranges[-1].append(slice(parameters, self.size))
        self.wires: tuple[WireFormat, ...] = tuple(
            WireFormat(self.codec, tiles.size if tiles is not None else size - tail, tail)
            for size, tail in zip(self._sizes(), [0] * (count - 1) + [buffers], strict=True)
        )
        """How each fragment is sent."""
        self._exact_every, self._exact = exact_every, WireFormat("float32", parameters, buffers)

    def of_round(self, round: int) -> int:
        """The fragment that round ``round`` exchanges."""
        return fragment_of(round, self.count)

    def wire(self, round: int) -> WireFormat:
        """How the fragment of round ``round`` is sent."""
        if self.is_exact(round):
            return self._exact
        return self.wires[self.of_round(round)]

    def result(self, round: int) -> WireFormat:
        """How what the owners of slices made of the contributions is sent."""
        return self._exact if self.served else self.wire(round)

    @property
    def advances(self) -> bool:
        """theta is what each node's own optimiser makes of a round, after its COMMIT."""
        return self.gradients and not self.served

    def is_exact(self, round: int) -> bool:
        """True for the rounds that are sent in float32."""
        return self._exact_every > 0 and round % self._exact_every == 0

    def changed(self, before: int, after: int) -> list[int]:
        """The fragments that differ between the states after rounds ``before`` and ``after``."""
        if not before < after < before + self.count:
            return list(range(self.count))
        return [self.of_round(round) for round in range(before + 1, after + 1)]

    def state_hash(self, theta: Vector, momentum: Vector) -> str:
        """What nodes compare after each round; the mean only where each has an optimiser of its own."""
        return state_hash(theta[:0] if self.advances else theta, momentum)

    def take(self, vector: Vector, fragment: int) -> Vector:
        """The elements of ``fragment``: a new vector, or ``vector`` itself where there is only one."""
        if self.count == 1:
            return vector
        return np.concatenate([vector[part] for part in self._ranges[fragment]])

    def ranges(self, fragment: int) -> list[slice]:
        """Where the elements of ``fragment`` lie in the vector, in their order."""
        return self._ranges[fragment]

    def put(self, vector: Vector, fragment: int, elements: Vector) -> None:
        """Write ``elements``, as :meth:`take` gives them, to their places in ``vector``."""
        position = 0
        for part in self._ranges[fragment]:
            size = part.stop - part.start
            vector[part] = elements[position : position + size]
            position += size

    def pack(self, elements: Vector) -> Vector:
        """Elements of a fragment in the order in which they are sent."""
        return elements if self._tiles is None else self._tiles.pack(elements)

    def unpack(self, sent: Vector) -> Vector:
        """The inverse of :meth:`pack`."""
        return sent if self._tiles is None else self._tiles.unpack(sent)

    def _sizes(self) -> list[int]:
        return [sum(part.stop - part.start for part in ranges) for ranges in self._ranges]


def _stripes(parameters: int, block: int, count: int) -> list[list[slice]]:
    """For each fragment the ranges that it consists of; only the last range of all may be no whole number of blocks."""
    if count == 1:
        return [[slice(0, parameters)]]
    blocks = -(-parameters // block)
    width = block * max(1, min(STRIPE // block, blocks // (count * _LEAST_STRIPES)))
    ranges: list[list[slice]] = [[] for _ in range(count)]
    for index, start in enumerate(range(0, parameters, width)):
        ranges[index % count].append(slice(start, min(start + width, parameters)))
    return ranges
