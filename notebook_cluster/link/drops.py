"""Counting what is dropped, with a log that its sender cannot fill."""

import logging
from collections import Counter
from typing import Any

_log = logging.getLogger(__name__)


class Drops(Counter[str]):
    """Number of frames dropped, by cause."""

    def note(self, cause: str, text: str, *values: Any) -> None:
        """Count one more of ``cause`` and log it, but only the first, second, fourth, eighth ... of each cause."""
        self[cause] += 1
        count = self[cause]
        if count & (count - 1) == 0:
            _log.warning(text + " (%d of this kind so far)", *values, count)
