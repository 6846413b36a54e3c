"""Many small requests, of which only a few are open at a time."""

import concurrent.futures
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from notebook_cluster.client.stream import wait
from notebook_cluster.protocol.transfers import CHUNKS_AT_ONCE

Answer = TypeVar("Answer")
Progress = Callable[[int, int], None]
"""Called with (bytes that have arrived, bytes in all)."""


def paced(requests: "Iterator[concurrent.futures.Future[Answer]]", at_once: int = CHUNKS_AT_ONCE) -> Iterator[Answer]:
    """The answers in order; taking the next item of ``requests`` sends one more, at most ``at_once`` ahead."""
    waiting: deque[concurrent.futures.Future[Answer]] = deque()
    for request in requests:
        waiting.append(request)
        if len(waiting) >= at_once:
            yield wait(waiting.popleft())
    while waiting:
        yield wait(waiting.popleft())
