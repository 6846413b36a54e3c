"""How fast the way to another node is, for the doctor and the bench: a few round trips, then some bytes."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from notebook_cluster.protocol.measuring import MeasurePair, PairMeasured
from notebook_cluster.protocol.mesh import ProbeFrame

MOST_ROUND_TRIPS = 100
TIMEOUT_SECONDS = 10.0
MAX_PAYLOAD = 64 << 20
"""Bytes: what is asked for above it is not measured."""
_MAX_AT_ONCE = 16

SendProbe = Callable[[str, ProbeFrame, bytes], None]
Done = Callable[[PairMeasured], None]


@dataclass
class _Measurement:
    order: MeasurePair
    done: Done
    chunks: list[int]
    """Bytes of each frame after the round trips."""
    started: float
    sent_at: float = 0.0
    round_trips: list[float] = field(default_factory=list)
    next_answer: int = 0
    missing: set[int] = field(default_factory=set)
    answered_at: float = 0.0


class PairMeasurements:
    """The measurements that one node makes. ``send`` gets (node, probe, payload). Used on the I/O thread only."""

    def __init__(self, send: SendProbe) -> None:
        self._send = send
        self._running: dict[tuple[int, str], _Measurement] = {}

    def start(self, order: MeasurePair, chunk_bytes: int, done: Done) -> None:
        """Measure the way to ``order.node``; ``done`` is called within ``TIMEOUT_SECONDS``."""
        trouble = ""
        if not 0 <= order.payload <= MAX_PAYLOAD:
            trouble = f"{order.payload} bytes are not measured: use 0 to {MAX_PAYLOAD}"
        elif not 1 <= order.round_trips <= MOST_ROUND_TRIPS:
            trouble = f"{order.round_trips} round trips are not measured: use 1 to {MOST_ROUND_TRIPS}"
        elif len(self._running) >= _MAX_AT_ONCE or (order.ticket, order.node) in self._running:
            trouble = f"{len(self._running)} measurements run here already: try again in {TIMEOUT_SECONDS:.0f} s"
        if trouble:
            done(PairMeasured(ticket=order.ticket, node=order.node, error=trouble))
            return
        chunks = [min(chunk_bytes, order.payload - offset) for offset in range(0, order.payload, chunk_bytes)]
        measurement = _Measurement(order, done, chunks, started=time.monotonic())
        self._running[order.ticket, order.node] = measurement
        self._probe(measurement)

    def answered(self, sender: str, header: ProbeFrame) -> None:
        """An answer came; those that nobody waits for are ignored."""
        measurement = self._running.get((header.ticket, sender))
        if measurement is None:
            return
        now = time.monotonic()
        if header.number in measurement.missing:
            measurement.missing.discard(header.number)
            measurement.answered_at = now
            if not measurement.missing:
                self._finish(measurement)
        elif header.number == measurement.next_answer < measurement.order.round_trips:
            measurement.round_trips.append(now - measurement.sent_at)
            measurement.next_answer += 1
            self._probe(measurement)

    def tick(self, now: float, why: Callable[[str], str]) -> None:
        """Give up on what takes too long; ``why(node)`` says what is wrong with the way to it."""
        for measurement in list(self._running.values()):
            if now - measurement.started >= TIMEOUT_SECONDS:
                self._finish(measurement, "" if measurement.round_trips else why(measurement.order.node))

    def _probe(self, measurement: _Measurement) -> None:
        order, number = measurement.order, measurement.next_answer
        measurement.sent_at = time.monotonic()
        if number < order.round_trips:
            self._send(order.node, ProbeFrame(ticket=order.ticket, number=number), b"")
            return
        if not measurement.chunks:
            self._finish(measurement)
            return
        measurement.missing = set(range(number, number + len(measurement.chunks)))
        zeros = bytes(measurement.chunks[0])
        for place, size in enumerate(measurement.chunks, number):
            self._send(order.node, ProbeFrame(ticket=order.ticket, number=place), zeros[:size])

    def _finish(self, measurement: _Measurement, error: str = "") -> None:
        order = measurement.order
        del self._running[order.ticket, order.node]
        # A slow way answers only some of it in time: that is a measurement too.
        came = sum(
            size
            for number, size in enumerate(measurement.chunks, order.round_trips)
            if measurement.answered_at and number not in measurement.missing
        )
        shortest = min(measurement.round_trips, default=0.0)
        took = measurement.answered_at - measurement.sent_at
        one_way = max(took - shortest / 2, took / 2)  # the last answer came all the way back
        measurement.done(
            PairMeasured(
                ticket=order.ticket, node=order.node, round_trip=shortest,
                median_round_trip=statistics.median(measurement.round_trips or [0.0]),
                bytes_per_s=came / one_way if came and one_way > 0 else 0.0, sent=came, error=error,
            )
        )  # fmt: skip
