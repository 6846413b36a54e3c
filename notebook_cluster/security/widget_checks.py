"""What a trait of a node's widget may hold: each check returns the value as it may be shown, or raises ValueError."""

import math
import re
from collections.abc import Callable
from typing import Any

from notebook_cluster.security.chart_grammar import html_without_tex, without_tex
from notebook_cluster.security.sanitise import safe_html, safe_output, safe_text

Check = Callable[[Any], Any]
Reference = Callable[[str], str | None]
"""The id under which a view knows the widget with this id of the node; None when there is none that fits."""
MOST_TEXT = 100_000
MOST_ENTRIES = 10_000
"""Entries of one list, at most."""
REFERENCE = "IPY_MODEL_"
_STYLE = re.compile(r"[\w\s.,%#()+*/'\"!-]{0,300}", re.ASCII)
_STYLE_FUNCTION = re.compile(r"([\w-]*)\(", re.ASCII)
_FUNCTIONS = "rgb rgba hsl hsla calc min max clamp minmax repeat fit-content var linear-gradient radial-gradient"
_PLACE = re.compile(r"[\d.]{1,10}[a-z%]{0,5}|auto")
_CLASSES = re.compile(r"widget-[a-z-]{1,40}")
_DATE_PARTS = frozenset(("year", "month", "date", "hours", "minutes", "seconds", "milliseconds"))


def flag(value: Any) -> bool | None:
    """True, False or None."""
    if value is None or isinstance(value, bool):
        return value
    raise ValueError(value)


def number(value: Any) -> int | float | None:
    """None, or a number that every program on the way can hold."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise ValueError(value)


def text(value: Any) -> str | None:
    """Text for places that show it as text."""
    if value is None:
        return None
    if isinstance(value, str) and len(value) <= MOST_TEXT:
        return safe_text(value)
    raise ValueError("no text")


def typeset(value: Any) -> str | None:
    """Text for places that show it as text, with the mathematics in it."""
    shown = text(value)
    return None if shown is None else without_tex(shown)


def html(value: Any) -> str:
    """Text for places that show it as HTML: without script and styles that cover other things."""
    if not isinstance(value, str) or len(value) > MOST_TEXT:
        raise ValueError("no text, or too long")
    return html_without_tex(safe_html(value))


def matching(pattern: re.Pattern[str]) -> Check:
    """None, or text that ``pattern`` describes from its beginning to its end."""

    def check(value: Any) -> str | None:
        if value is None or (isinstance(value, str) and pattern.fullmatch(value)):
            return value
        raise ValueError(value)

    return check


def one_of(words: frozenset[str]) -> Check:
    """One of ``words``."""

    def check(value: Any) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise ValueError(value)

    return check


def style(value: Any) -> str | None:
    """A CSS value that loads nothing."""
    if value is None:
        return None
    if not isinstance(value, str) or not _STYLE.fullmatch(value) or "/*" in value:
        raise ValueError(value)
    if not all(name.lower() in _FUNCTIONS.split() for name in _STYLE_FUNCTION.findall(value) if name):
        raise ValueError(value)
    return value


def place(value: Any) -> str | None:
    """A CSS distance that moves a thing apart from others, not over them."""
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > 100 or not all(_PLACE.fullmatch(word) for word in value.split()):
        raise ValueError(value)
    return value


def classes(value: Any) -> list[str]:
    """Those that ipywidgets itself adds: others would borrow the look, or the place, of JupyterLab's own parts."""
    if not isinstance(value, list):
        raise ValueError("no list")
    return [entry for entry in value[:20] if isinstance(entry, str) and _CLASSES.fullmatch(entry)]


def either(*checks: Check) -> Check:
    """What the first fitting one of ``checks`` makes of it."""

    def check(value: Any) -> Any:
        for one in checks:
            try:
                return one(value)
            except ValueError:
                continue
        raise ValueError("no check fits")

    return check


def several(check: Check) -> Check:
    """A list of values that all pass ``check``."""

    def check_all(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > MOST_ENTRIES:
            raise ValueError("no list, or too long")
        return [check(entry) for entry in value]

    return check_all


def date(value: Any) -> dict[str, int] | None:
    """A date, a time or both as ipywidgets writes them."""
    if value is None:
        return None
    if isinstance(value, dict) and _DATE_PARTS.issuperset(value) and all(type(part) is int for part in value.values()):
        return value
    raise ValueError("no date")


def raw_bytes(value: Any) -> bytes:
    """Bytes that came beside the message."""
    if isinstance(value, bytes):
        return value
    raise ValueError("no bytes")


def never_html(value: Any) -> bool:
    """Descriptions are shown as text, whatever is asked for."""
    return False


def no_message(value: Any) -> str:
    """Output widgets are filled by the coordinator; in the browser this would catch the notebook's own output."""
    return ""


def outputs(value: Any) -> list[dict[str, Any]]:
    """Outputs as notebooks store them, those that may be shown."""
    if not isinstance(value, list) or len(value) > MOST_ENTRIES:
        raise ValueError("no list, or too long")
    return [safe for output in value if (safe := safe_stored_output(output)) is not None]


def safe_stored_output(output: Any) -> dict[str, Any] | None:
    """An output as notebooks store it (``output_type`` and the content), reduced to what may be shown."""
    kind = output.get("output_type") if isinstance(output, dict) else None
    if kind not in ("stream", "display_data", "execute_result", "error"):
        return None
    safe = safe_output(kind, output)
    if safe is None:
        return None
    safe.pop("transient", None)
    return {"output_type": kind, **safe}


def nothing_uploaded(value: Any) -> list[Any]:
    """What was chosen in the browser goes to the node; the node can only empty it."""
    if value == []:
        return []
    raise ValueError("not empty")


def referred(value: Any, reference: Reference) -> Any:
    """One reference to a widget, or a list of them, as views know them. One that leads nowhere is None or left out."""
    if isinstance(value, list):
        if len(value) > MOST_ENTRIES:
            raise ValueError("too long")
        found = [_referred_one(entry, reference) for entry in value]
        return [entry for entry in found if entry is not None]
    return _referred_one(value, reference)


def _referred_one(value: Any, reference: Reference) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.startswith(REFERENCE):
        raise ValueError("no reference")
    model = reference(value.removeprefix(REFERENCE))
    return None if model is None else REFERENCE + model
