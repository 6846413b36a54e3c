"""The allow-list for the two small languages in Vega and Vega-Lite charts: expressions and streams of events.

A stream names events of the mouse on the chart itself, and no element elsewhere in the page. An expression is a small
program in the reader's page: it may have arithmetic, comparisons and functions that compute. Here it is cut into
tokens; what is no token, a function that is not in the list, or a name that is no parameter of the chart, refuses it.
What a mouse or keyboard does (``event``), parts of the page, and members by which JavaScript leads from a value to its
maker cannot be named.
"""

import re
from collections.abc import Iterator, Set

_LONGEST = 5_000
_LONGEST_STREAM = 300
_EVENTS = (
    "click|dblclick|mousedown|mousemove|mouseout|mouseover|mouseup|pointerdown|pointermove|pointerout|pointerover|"
    "pointerup|wheel"
)
_MARKS = "rect|symbol|line|area|rule|text|arc|path|group|trail|shape|cell"
_EVENT = re.compile(_EVENTS)
_STREAM = re.compile(
    rf"(?:(?:window:|view:|scope:|\*:|@\w{{1,50}}:|(?:{_MARKS}):)?(?:{_EVENTS})!?(?:\{{\d{{1,6}}\}})?|[\[\],>\s])*"
)
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>\d{1,20}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,3})?(?![\w.])|\.\d{1,20}(?![\w.]))
    | (?P<string>'(?:[^'\\\n\r\u2028\u2029]|\\['"\\nt])*'|"(?:[^"\\\n\r\u2028\u2029]|\\['"\\nt])*")
    | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<mark>===|!==|==|!=|<=|>=|&&|\|\||[-+*/%<>!?:(),.\[\]&|^~])
    )""",
    re.VERBOSE,
)
_FUNCTIONS = """
abs acos asin atan atan2 ceil clamp cos exp floor hypot isFinite isNaN log max min pow random round sin sqrt tan
cumulativeLogNormal cumulativeNormal cumulativeUniform densityLogNormal densityNormal densityUniform quantileLogNormal
quantileNormal quantileUniform sampleLogNormal sampleNormal sampleUniform
date datetime day dayofyear hours milliseconds minutes month now quarter seconds time timeOffset timeSequence
timezoneoffset utc utcdate utcday utcdayofyear utchours utcmilliseconds utcminutes utcmonth utcquarter utcseconds
utcweek utcyear week year
extent if inrange indexof isArray isBoolean isDate isDefined isNumber isObject isString isValid join lastindexof length
lerp peek pluck reverse sequence slice sort span toBoolean toDate toNumber toString
contrast hcl hsl lab luminance rgb
dayAbbrevFormat dayFormat format lower monthAbbrevFormat monthFormat pad parseFloat parseInt replace split substring
timeFormat timeParse timeUnitSpecifier trim truncate upper utcFormat utcOffset utcParse utcSequence test
bandspace bandwidth copy data domain indata invert range scale clampRange panLinear panLog panPow panSymlog x xy y
zoomLinear zoomLog zoomPow zoomSymlog
"""
_NAMES = (
    "datum parent true false null undefined NaN E LN2 LN10 LOG2E LOG10E MAX_VALUE MIN_VALUE PI SQRT1_2 SQRT2 "
    "width height"
)
_KNOWN_FUNCTIONS = frozenset(_FUNCTIONS.split())
_KNOWN_NAMES = frozenset(_NAMES.split())
_MEMBERS = re.compile(r"__|constructor|prototype|toString|valueOf|dataflow|ownerDocument|defaultView", re.IGNORECASE)
"""The last three lead from a drawn item to the page around it."""


class ExpressionRefused(ValueError):
    """What of the expression is not understood."""


def check_expression(text: str, names: Set[str]) -> None:
    """ExpressionRefused unless ``text`` only computes; ``names`` are those of the chart's own parameters."""
    if len(text) > _LONGEST:
        raise ExpressionRefused(f"more than {_LONGEST} characters")
    tokens = list(_tokens(text))
    for place, (kind, token) in enumerate(tokens):
        before = tokens[place - 1] if place else ("", "")
        after = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        if kind == "name":
            _check_name(token, before[1] == ".", after, names)
        elif token == "/" and not _ends_a_value(before):
            raise ExpressionRefused("a regular expression")
        elif token == "[" and _ends_a_value(before):
            _check_member(tokens[place + 1 : place + 3])
        elif token == "(" and before[0] != "name" and _ends_a_value(before):
            raise ExpressionRefused("a call of what has no name")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place, end = 0, len(text.rstrip())
    while place < end:
        found = _TOKEN.match(text, place)
        if found is None:
            raise ExpressionRefused(f"'{text[place : place + 20].strip()}'")
        assert found.lastgroup is not None
        yield found.lastgroup, found[found.lastgroup]
        place = found.end()


def _ends_a_value(token: tuple[str, str]) -> bool:
    return token[0] in ("number", "string", "name") or token[1] in (")", "]")


def _check_name(name: str, is_member: bool, after: str, names: Set[str]) -> None:
    if is_member:
        if after == "(" or _MEMBERS.search(name):
            raise ExpressionRefused(f"'.{name}'")
    elif after == "(":
        if name not in _KNOWN_FUNCTIONS:
            raise ExpressionRefused(f"the function '{name}'")
    elif name not in _KNOWN_NAMES and name not in names:
        raise ExpressionRefused(f"the name '{name}'")


def _check_member(inside: list[tuple[str, str]]) -> None:
    """``value["name"]`` and ``value[3]``: a name that is computed could be any."""
    if len(inside) != 2 or inside[1][1] != "]" or inside[0][0] not in ("number", "string"):
        raise ExpressionRefused("a member whose name is computed")
    if _MEMBERS.search(inside[0][1]):
        raise ExpressionRefused(f"the member {inside[0][1]}")


def is_event(text: str) -> bool:
    """Whether ``text`` is an event that a chart may listen to."""
    return _EVENT.fullmatch(text) is not None


def is_event_stream(text: str) -> bool:
    """Whether ``text`` is a stream of such events, also between two others."""
    return len(text) <= _LONGEST_STREAM and _STREAM.fullmatch(text) is not None
