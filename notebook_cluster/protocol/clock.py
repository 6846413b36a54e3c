"""Moments and lengths of time as people read them, in panel, strip, report, events and terminal alike. Pure.

``labextension/src/sidebar/format.ts`` writes the same in the browser; one file of examples is held against both.
"""

import math
import time

ABSENT = "\u2013"
"""Stands where there is no value."""
_LARGEST = 2.0**36
"""Seconds since 1970 behind which a moment is a broken clock's, and no calendar has a date for it."""


def clock(seconds: float, today: float | None = None) -> str:
    """The moment ``seconds`` (Unix time) in local time: ``14:03:10``, with its date where that is not the day of
    ``today`` (Unix time; default: now): ``2026-11-19 14:03:10``. A dash for what is no moment."""
    if not _is_moment(seconds):
        return ABSENT
    if today is None or not _is_moment(today):
        today = time.time()
    moment, day = time.localtime(seconds), time.localtime(today)
    is_today = (moment.tm_year, moment.tm_yday) == (day.tm_year, day.tm_yday)
    return time.strftime("%H:%M:%S", moment) if is_today else dated(seconds)


def dated(seconds: float) -> str:
    """The same with its date always, for what is read on another day: ``2026-11-19 14:03:10``."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if _is_moment(seconds) else ABSENT


def _is_moment(seconds: float) -> bool:
    return math.isfinite(seconds) and 0 <= seconds < _LARGEST


def duration(seconds: float) -> str:
    """``seconds`` as ``40 ms``, ``3.4 s``, ``2 min 05 s``, ``1 h 12 min`` or ``3 d 4 h``."""
    if not math.isfinite(seconds):
        return ABSENT
    seconds = max(seconds, 0.0)
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def roughly(seconds: float) -> str:
    """A length that is no measurement: ``40 s``, ``3 min``, ``2 h``, ``5 d``."""
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "min"), (129_600, 3600, "h"), (math.inf, 86_400, "d")):
        if seconds < limit:
            return f"{max(seconds, 0.0) / unit:.0f} {name}"
    return "long"


def ago(seconds: float) -> str:
    """How long since something happened, roughly: ``40 s ago``, ``3 min ago``, ``2 h ago``, ``5 d ago``."""
    return f"{roughly(seconds)} ago"
