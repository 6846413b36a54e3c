"""The allow-list for Vega and Vega-Lite charts of nodes: data, marks, scales and expressions that compute.

Left out are addresses (``url``, ``href``), pictures, places elsewhere in the page (``bind.element``, event streams with
selectors), attributes of inputs, cursors by address, and whatever steers the renderer itself (``usermeta``). These are
written here: no links to source and editor, no tooltips that show pictures, expressions interpreted and not compiled.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from notebook_cluster.security.chart_grammar import ChartReader, refused
from notebook_cluster.security.chart_words import VEGA_LITE_TYPES, VEGA_LITE_WORDS, VEGA_TYPES, VEGA_WORDS
from notebook_cluster.security.vega_expressions import ExpressionRefused, check_expression, is_event, is_event_stream

EMBED_OPTIONS: dict[str, Any] = {
    # "View source" would write the chart's text into a new window as HTML; an SVG would be one of the node's making.
    "actions": {"export": {"png": True, "svg": False}, "source": False, "compiled": False, "editor": False},
    "ast": True,
    "renderer": "canvas",
    # The one of vega-embed shows a picture from the address in a column that is called "image".
    "tooltip": False,
}
_CURSORS = (
    "auto default none pointer crosshair move text grab grabbing help wait cell not-allowed ew-resize ns-resize "
    "zoom-in zoom-out"
)
_STREAM_KEYS = frozenset(("source", "type", "marktype", "markname", "consume", "throttle", "debounce"))
_TOGGLE = re.compile(r"(?:true|false|event\.(?:shift|alt|ctrl|meta)Key)")
_WORD = re.compile(r"[A-Za-z][\w-]{0,60}")
_SETS = frozenset(("enter", "update", "exit", "hover"))
_PARTS = frozenset(
    ("axis", "domain", "entries", "gradient", "grid", "labels", "legend", "subtitle", "symbols", "ticks", "title")
)
"""Parts of an axis, a legend or a title; each has sets of its own."""
_OF_PARTS = frozenset(("name", "interactive", "style", "align", "zindex"))
_NO_CHANNELS = frozenset(("mark", "bounds", "group", "datum", "items"))
"""How the renderer finds what is drawn: an item with another ``mark`` could be a picture from an address."""
_WRITTEN = """
x x2 xc y y2 yc x0 x1 y0 y1 vx vy fx fy width height size angle theta radius startAngle endAngle padAngle innerRadius
outerRadius path shape opacity fill fillOpacity stroke strokeOpacity strokeWidth align baseline dx dy font fontSize
fontStyle fontWeight limit text id index k key value bin bin0 bin1 unit unit0 unit1
"""
"""What a transform of a mark may write: into the drawn item itself, so also its cursor, its link, what is in it."""
_INPUTS = frozenset(("range", "checkbox", "radio", "select"))
_INPUT_TEXTS = frozenset(("name",))
_INPUT_NUMBERS = frozenset(("min", "max", "step", "debounce"))
_INPUT_LISTS = frozenset(("options", "labels"))
_LONGEST_SEQUENCE = 100_000
"""A longer one makes the page hang."""
_NOT_OURS = frozenset(("event", "item", "group", "view", "window", "document", "this"))
"""A parameter of this name would stand for something else in an expression."""
_FORMAT_TYPES = frozenset(("number", "time", "utc"))


class _VegaReader(ChartReader):
    """What both grammars have."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._expressions: list[tuple[str, str]] = []

    def read(self, chart: dict[str, Any]) -> None:
        """ChartRefused: why ``chart`` is not drawn."""
        for key, value in chart.items():
            if key != "$schema":
                self.entry(key, value, key)
        # Only now are all names known: an expression may stand before the parameter that it names.
        for path, text in self._expressions:
            try:
                check_expression(text, self._names)
            except ExpressionRefused as error:
                raise refused(path, text, f"is not understood ({error}): compute it before the chart is made") from None

    # ---- words with a meaning of their own ---------------------------------------------------------------------

    def name(self, value: Any, path: str) -> None:
        """The name of a parameter, a view or a data set. One called ``cursor`` would set the page's cursor."""
        if value is None or isinstance(value, int):
            return
        if not isinstance(value, str) or value == "cursor":
            raise refused(path, value)
        self.text(value, path)
        if value not in _NOT_OURS:
            self._names.add(value)

    def expression(self, value: Any, path: str) -> None:
        """Text that is an expression, alone or in conditions that are put together; the rest is ordinary."""
        if isinstance(value, str):
            self._expressions.append((path, value))
        elif isinstance(value, list):
            for entry in value:
                self.expression(entry, path)
        else:
            self.value(value, path)

    def stream(self, value: Any, path: str) -> None:
        """What a parameter listens to: the mouse on the chart itself."""
        if isinstance(value, str):
            if not is_event_stream(value):
                raise refused(path, value)
        elif isinstance(value, list):
            for entry in value:
                self.stream(entry, path)
        elif isinstance(value, dict):
            for key, entry in value.items():
                self._stream_entry(key, entry, f"{path}.{key}")
        elif value is not None and not isinstance(value, bool):
            raise refused(path, value)

    def _stream_entry(self, key: str, value: Any, path: str) -> None:
        if key in ("between", "stream", "merge"):
            self.stream(value, path)
        elif key == "signal":
            self.expression(value, path)
        elif key == "scale":
            self.plain(value, path)
        else:
            fits = key in _STREAM_KEYS and not isinstance(value, dict | list)
            if key == "source":
                fits = value in ("view", "window", "scope")
            elif key == "type":
                fits = isinstance(value, str) and is_event(value)
            if not fits:
                raise refused(path, value)

    def bind(self, value: Any, path: str) -> None:
        """An input below the chart, or one for each field. Every other key would be an attribute of the input."""
        if value is None or value in ("scales", "legend"):
            return
        if not isinstance(value, dict):
            raise refused(path, value)
        if "input" not in value:
            for field, entry in value.items():
                if field == "legend":
                    self.stream(entry, f"{path}.legend")
                else:
                    self.bind(entry, f"{path}.{field}")
            return
        for key, entry in value.items():
            fits = (
                (key == "input" and isinstance(entry, str) and entry in _INPUTS)
                or (key in _INPUT_TEXTS and isinstance(entry, str))
                or (key in _INPUT_NUMBERS and isinstance(entry, int | float))
                or (key in _INPUT_LISTS and isinstance(entry, list) and not _has_objects(entry))
            )
            if not fits:
                raise refused(f"{path}.{key}", entry)

    def cursor(self, value: Any, path: str) -> None:
        """One of the system's cursors; others are pictures that are loaded from an address."""
        words = value.get("value") if isinstance(value, dict) and set(value) == {"value"} else value
        if words is not None and not (isinstance(words, str) and words in _CURSORS.split()):
            raise refused(path, value)

    def one_word(self, value: Any, path: str) -> None:
        """The name of an operation, which the renderer puts into expressions of its own."""
        if isinstance(value, str):
            if not _WORD.fullmatch(value):
                raise refused(path, value)
        else:
            self.value(value, path)

    def words_of(self, value: Any, path: str) -> None:
        """Several operations, or one."""
        for entry in value if isinstance(value, list) else [value]:
            self.one_word(entry, path)

    def sequence(self, value: Any, path: str) -> None:
        """A sequence from ``start`` to ``stop`` by ``step``: numbers, not too many."""
        if isinstance(value, dict):
            start, stop, step = (value.get(key, default) for key, default in (("start", 0), ("stop", 0), ("step", 1)))
            if any(type(entry) not in (int, float) for entry in (start, stop, step)):
                raise refused(path, value, "must have numbers as start, stop and step")
            if step and (stop - start) / step > _LONGEST_SEQUENCE:
                raise refused(path, value, f"holds more than {_LONGEST_SEQUENCE} numbers: make it shorter")
        self.value(value, path)

    def format_type(self, value: Any, path: str) -> None:
        """Any other would be the name of a function."""
        if value is not None and not (isinstance(value, str) and value in _FORMAT_TYPES):
            raise refused(path, value)

    def parse(self, value: Any, path: str) -> None:
        """field -> type, or ``auto``."""
        if isinstance(value, dict) and not _has_objects(list(value.values())):
            self.plain(value, path)
        elif value is not None and value != "auto":
            raise refused(path, value)

    def style(self, value: Any, path: str) -> None:
        """Names of styles; in a config, the styles by their names."""
        if isinstance(value, dict):
            for name, entry in value.items():
                self.text(name, path)
                self.value(entry, f"{path}.{name}")
        else:
            self.value(value, path)

    def given(self, value: Any, path: str) -> None:
        """``value``: a constant, for a selection with names of fields as keys; or what is computed."""
        if isinstance(value, dict) and value.keys() & {"expr", "signal", "gradient"}:
            self.value(value, path)
        elif _holds_reference(value):
            raise refused(path, value)
        else:
            self.plain(value, path)

    def data(self, value: Any, path: str) -> None:
        """A table with its rows, several of them, or the name of one."""
        if isinstance(value, list):
            for entry in value:
                self.data(entry, path)
        elif isinstance(value, dict):
            for key, entry in value.items():
                self._data_entry(key, entry, f"{path}.{key}")
        elif isinstance(value, str):
            self.text(value, path)
        elif value is not None:
            raise refused(path, value)

    def _data_entry(self, key: str, value: Any, path: str) -> None:
        if key == "values":
            if not isinstance(value, dict | list) or _is_reference(value):
                raise refused(path, value, "must be rows: put them into the chart as a list")
            self.plain(value, path)
        elif key == "on":
            raise refused(path, value)
        else:
            self.entry(key, value, path)

    def datasets(self, value: Any, path: str) -> None:
        """name -> rows."""
        if not isinstance(value, dict) or not all(isinstance(rows, list | dict) for rows in value.values()):
            raise refused(path, value)
        self.plain(value, path)


_COMMON: dict[str, Callable[[Any, Any, str], None]] = {
    "type": _VegaReader.kind, "name": _VegaReader.name, "expr": _VegaReader.expression,
    "filter": _VegaReader.expression, "test": _VegaReader.expression, "bind": _VegaReader.bind,
    "cursor": _VegaReader.cursor, "formatType": _VegaReader.format_type, "parse": _VegaReader.parse,
    "style": _VegaReader.style, "value": _VegaReader.given, "data": _VegaReader.data, "op": _VegaReader.words_of,
    "keyvals": _VegaReader.sequence,
}  # fmt: skip


class VegaLiteReader(_VegaReader):
    """Vega-Lite, as altair writes it."""

    words = VEGA_LITE_WORDS
    types = VEGA_LITE_TYPES

    def mark(self, value: Any, path: str) -> None:
        """``bar``, or an object with a ``type``."""
        if isinstance(value, str):
            self.kind(value, path)
        else:
            self.value(value, path)

    def toggle(self, value: Any, path: str) -> None:
        """Whether a key must be held; the only place where a key of the keyboard has a name."""
        if not isinstance(value, bool) and not (isinstance(value, str) and _TOGGLE.fullmatch(value)):
            raise refused(path, value)

    def listening(self, value: Any, path: str) -> None:
        """``translate``: a stream of events, or in a projection two numbers."""
        if not isinstance(value, list) or _has_objects(value) or any(isinstance(entry, str) for entry in value):
            self.stream(value, path)

    def transform(self, value: Any, path: str) -> None:
        """Steps of a computation. A regression is ``on`` a field, a selection ``on`` events."""
        for step in value if isinstance(value, list) else [value]:
            if isinstance(step, dict) and step.keys() & {"loess", "regression"} and isinstance(step.get("on"), str):
                self.text(step["on"], path)
                step = {key: entry for key, entry in step.items() if key != "on"}
            self.value(step, path)

    special: ClassVar[Mapping[str, Callable[[Any, Any, str], None]]] = {
        **_COMMON, "sequence": _VegaReader.sequence,
        "transform": transform, "datasets": _VegaReader.datasets, "mark": mark, "on": _VegaReader.stream,
        "clear": _VegaReader.stream, "zoom": _VegaReader.stream, "translate": listening, "toggle": toggle,
        "calculate": _VegaReader.expression, "labelExpr": _VegaReader.expression, "and": _VegaReader.expression,
        "or": _VegaReader.expression, "not": _VegaReader.expression, "aggregate": _VegaReader.words_of,
        "timeUnit": _VegaReader.one_word, "unit": _VegaReader.one_word, "numberFormatType": _VegaReader.format_type,
        "timeFormatType": _VegaReader.format_type, "normalizedNumberFormatType": _VegaReader.format_type,
    }  # fmt: skip


class VegaReader(_VegaReader):
    """Vega itself."""

    words = VEGA_WORDS
    types = VEGA_TYPES

    def listened(self, value: Any, path: str) -> None:
        """``on`` of a signal: a list of events, each with an expression."""
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, dict) or not entry.keys() <= {"events", "update", "force"}:
                raise refused(path, entry)
            self.value(entry, path)

    def transform(self, value: Any, path: str) -> None:
        """Steps of a computation; what ``extent`` finds has a name for expressions."""
        for step in value if isinstance(value, list) else [value]:
            if isinstance(step, dict):
                if isinstance(step.get("signal"), str):
                    self.name(step["signal"], path)
                if step.get("type") == "sequence":
                    self.sequence({key: step[key] for key in step.keys() & {"start", "stop", "step"}}, path)
                if not path.endswith("data.transform"):
                    _check_written(step, path)
            self.value(step, path)

    def encode(self, value: Any, path: str) -> None:
        """Sets of properties: of a mark by the moment in which they hold, of an axis or a legend by their parts."""
        if not isinstance(value, dict):
            raise refused(path, value)
        for key, entry in value.items():
            if key in _PARTS and isinstance(entry, dict):
                for name in entry.keys() & _OF_PARTS:
                    self.entry(name, entry[name], f"{path}.{key}.{name}")
                self.encode({name: entry[name] for name in entry.keys() - _OF_PARTS}, f"{path}.{key}")
            elif key not in _SETS or not isinstance(entry, dict):
                raise refused(f"{path}.{key}", entry)
            else:
                for name in entry.keys() & _NO_CHANNELS:
                    raise refused(f"{path}.{key}.{name}", entry[name])
                self.value(entry, f"{path}.{key}")

    special: ClassVar[Mapping[str, Callable[[Any, Any, str], None]]] = {
        **_COMMON, "signal": _VegaReader.expression, "update": _VegaReader.expression, "init": _VegaReader.expression,
        "events": _VegaReader.stream, "on": listened, "encode": encode, "transform": transform,
        "ops": _VegaReader.words_of,
    }  # fmt: skip


def _check_written(step: dict[str, Any], path: str) -> None:
    """ChartRefused where ``step``, of a mark, writes anything but what :data:`_WRITTEN` names."""
    names = step.get("as")
    if names is None and step.get("type") == "lookup":
        raise refused(f"{path}.as", names, "must be there: name what is written")
    for name in names if isinstance(names, list) else [names]:
        if name is not None and not (isinstance(name, str) and name in _WRITTEN.split()):
            raise refused(f"{path}.as", name, "is not what a mark may compute of itself: compute it in 'data'")


def _has_objects(entries: list[Any]) -> bool:
    return any(isinstance(entry, dict | list) for entry in entries)


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and bool(value.keys() & {"signal", "expr"})


def _holds_reference(value: Any) -> bool:
    """Somewhere in ``value`` is what a renderer might compute."""
    if isinstance(value, dict):
        return _is_reference(value) or any(_holds_reference(entry) for entry in value.values())
    return isinstance(value, list) and any(_holds_reference(entry) for entry in value)
