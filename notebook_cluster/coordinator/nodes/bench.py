"""How fast the way from one node to another is, for people who ask: one way at a time, and none beside a cell."""

import asyncio

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.nodes.relay import FrameRelay
from notebook_cluster.protocol.measuring import MEGABYTE, MOST_MEGABYTES, MeasureWay, PairMeasured
from notebook_cluster.protocol.views import RequestError

FIRST_BYTES = 256 * 1024
ROUND_TRIPS = 21
LONGEST_S = 4.0
"""For the bytes of one measurement, as far as the one before can tell."""


class WayBench:
    """Measures with the frames in which training sends its numbers. Nothing of it is kept.

    Args:
        alone: who measures the ways of this cluster holds it.
    """

    def __init__(self, core: Core, relay: FrameRelay, alone: asyncio.Lock) -> None:
        self._core = core
        self._relay = relay
        self._alone = alone

    async def measure(self, request: MeasureWay) -> PairMeasured:
        """The way from ``request.source`` to ``request.target``; ``error`` says why there is none.

        Raises:
            RequestError: a cell runs or waits, or there is no such node.
        """
        if not 1 <= request.megabytes <= MOST_MEGABYTES:
            raise RequestError(f"--mb {request.megabytes}: use 1 to {MOST_MEGABYTES}")
        wanted = request.megabytes * MEGABYTE
        size = min(wanted, FIRST_BYTES)
        async with self._alone:
            while True:
                self._refuse_beside_a_cell()
                found = await self._relay.measure(request.source, request.target, size, ROUND_TRIPS)
                # What a slow connection brings forth grows with the bytes, so they do too, as long as it is quick.
                larger = min(wanted, int(found.bytes_per_s * LONGEST_S))
                if found.error or size == wanted or larger < 2 * size:
                    return found
                size = larger

    def _refuse_beside_a_cell(self) -> None:
        state = self._core.state
        cell = state.running() or next(iter(state.queue()), None)
        if cell is None:
            return
        what = "waits to run"
        if cell.status == "running":
            what = f"runs on {', '.join(name for name, status in cell.nodes.items() if status == 'running')}"
        raise RequestError(
            f"cell {cell.id} {what}: nothing is measured beside it, since each would slow the other down. Measure when "
            "it has ended, or end it with Stop in its notebook"
        )
