"""The allow-list for plotly figures of nodes: traces and layouts that draw what is in them.

Left out are maps (their tiles and shapes are loaded from servers), pictures by address, links and styles in texts, and
whatever steers the renderer (``config``), which is written here.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from notebook_cluster.security.chart_grammar import ChartReader, is_plain_tex, refused
from notebook_cluster.security.chart_words import (
    PLOTLY_MAPS,
    PLOTLY_NUMBERED,
    PLOTLY_TRACES,
    PLOTLY_TYPES,
    PLOTLY_WORDS,
)

_CONFIG: dict[str, Any] = {
    "displaylogo": False, "showLink": False, "showEditInChartStudio": False, "showSendToCloud": False,
}  # fmt: skip
_KEPT_CONFIG = frozenset(("responsive", "displayModeBar", "scrollZoom", "staticPlot"))
_PICTURE = re.compile(r"data:image/(?:png|jpeg|gif);base64,[A-Za-z0-9+/=\s]*")
_TAGS = re.compile(r"</?[\w|.-]{1,40}\s?/?>", re.ASCII)
"""A tag without attributes, of which plotly makes bold text or which it shows; ``<unk>`` is a word of many a model."""
_TAG_BEGINS = re.compile(r"<(?![\s\d=])")
_NUMBER_AT_END = re.compile(r"[1-9]\d{0,2}$")
_PART = re.compile(r"[.\[\]]+")
_FRAME_KEYS = frozenset(("name", "group", "traces", "baseframe", "data", "layout"))


class PlotlyReader(ChartReader):
    """One figure."""

    words = PLOTLY_WORDS
    types = PLOTLY_TYPES | PLOTLY_TRACES

    def __init__(self) -> None:
        self._dollar = False
        self._tex = ""

    def read(self, figure: dict[str, Any]) -> dict[str, Any]:
        """The figure as it may be shown. ChartRefused: why it is not drawn."""
        safe: dict[str, Any] = {"data": self.traces(figure.get("data", []), "data"), "layout": {}, "config": _CONFIG}
        for key, value in figure.items():
            if key == "layout":
                safe["layout"] = self.layout(value, "layout")
            elif key == "frames" and isinstance(value, list):
                safe["frames"] = [self.frame(entry, "frames") for entry in value]
            elif key == "config" and isinstance(value, dict):
                kept = {name: entry for name, entry in value.items() if name in _KEPT_CONFIG and type(entry) is bool}
                safe["config"] = {**kept, **_CONFIG}
            elif key != "data" and value is not None:
                raise refused(key, value)
        if self._dollar and self._tex:
            raise refused("text", self._tex, "holds a command of TeX that may lead to an address: leave it out")
        return safe

    def traces(self, value: Any, path: str) -> list[Any]:
        """A list of traces."""
        if not isinstance(value, list):
            raise refused(path, value)
        for trace in value:
            if not isinstance(trace, dict) or not isinstance(trace.get("type", "scatter"), str):
                raise refused(path, trace)
            if trace.get("type", "scatter") not in PLOTLY_TRACES:
                raise refused(f"{path}.type", trace["type"], _why_no_map(trace["type"]))
            self.value(trace, path)
        return value

    def layout(self, value: Any, path: str) -> dict[str, Any]:
        """A layout; of its template only what may be drawn is left."""
        if not isinstance(value, dict):
            raise refused(path, value)
        template = value.get("template")
        rest = {key: entry for key, entry in value.items() if key != "template"}
        self.value(rest, path)
        return rest if template is None else {**rest, "template": self._template(template, f"{path}.template")}

    def frame(self, value: Any, path: str) -> dict[str, Any]:
        """One picture of an animation."""
        if not isinstance(value, dict) or not value.keys() <= _FRAME_KEYS:
            raise refused(path, value)
        rest = {key: entry for key, entry in value.items() if key not in ("data", "layout")}
        self.value(rest, path)
        if value.get("data") is not None:
            rest["data"] = self.traces(value["data"], f"{path}.data")
        if value.get("layout") is not None:
            rest["layout"] = self.layout(value["layout"], f"{path}.layout")
        return rest

    def _template(self, value: Any, path: str) -> dict[str, Any]:
        """Looks for every kind of trace and layout: those for maps, which never come, are left out."""
        if not isinstance(value, dict) or not value.keys() <= {"data", "layout"}:
            raise refused(path, value)
        looks = value.get("data") or {}
        layout = value.get("layout") or {}
        if not isinstance(looks, dict) or not isinstance(layout, dict):
            raise refused(path, value)
        kept = {kind: entry for kind, entry in looks.items() if kind not in PLOTLY_MAPS}
        for kind, entry in kept.items():
            if kind not in PLOTLY_TRACES or not isinstance(entry, list):
                raise refused(f"{path}.data.{kind}", entry)
            self.traces(entry, f"{path}.data.{kind}")
        rest = {key: entry for key, entry in layout.items() if key not in ("geo", "map", "mapbox")}
        self.value(rest, f"{path}.layout")
        return {"data": kept, "layout": rest}

    # ---- words with a meaning of their own ---------------------------------------------------------------------

    def entry(self, key: str, value: Any, path: str) -> None:
        """A key and its value; ``xaxis2`` is an ``xaxis``."""
        base = _NUMBER_AT_END.sub("", key)
        super().entry(base if base in PLOTLY_NUMBERED and key not in self.words else key, value, path)

    def text(self, value: str, path: str) -> None:
        """Texts may hold tags that change the type; a link or a style could lead or load from elsewhere."""
        super().text(value, path)
        if "<" in value and ((found := _TAG_BEGINS.search(_TAGS.sub("", value))) or value.endswith("<")):
            tag = _TAGS.sub("", value)[found.start() :] if found else value
            raise refused(path, tag, "is no tag that texts of charts of nodes may hold: write it as plain text")
        self._dollar = self._dollar or "$" in value
        if "\\" in value and not self._tex and not is_plain_tex(value):
            self._tex = value

    def source(self, value: Any, path: str) -> None:
        """A picture that is in the figure itself, or where the links of a sankey begin."""
        if isinstance(value, str):
            if not _PICTURE.fullmatch(value):
                raise refused(path, value)
        elif isinstance(value, dict):
            self.value(value, path)
        elif not isinstance(value, list) or any(isinstance(entry, dict | list | str) for entry in value):
            raise refused(path, value)

    def font_style(self, value: Any, path: str) -> None:
        """``normal`` or ``italic``."""
        for entry in value if isinstance(value, list) else [value]:
            if entry not in ("normal", "italic", None):
                raise refused(path, entry)

    def arguments(self, value: Any, path: str) -> None:
        """What a button or a slider changes: attributes by their paths, or names of frames."""
        if not isinstance(value, list):
            raise refused(path, value)
        if len(value) > 1 and isinstance(value[0], str):
            self._change(value[0], value[1], f"{path}.{value[0]}")
            value = value[2:]
        for entry in value:
            if isinstance(entry, dict):
                for name, change in entry.items():
                    self._change(name, change, f"{path}.{name}")
            elif isinstance(entry, list):
                if any(isinstance(one, dict | list) for one in entry):
                    raise refused(path, entry)
                self.value(entry, path)
            elif isinstance(entry, str):
                raise refused(path, entry)

    def _change(self, name: str, value: Any, path: str) -> None:
        parts = [part for part in _PART.split(name) if part and not part.isdecimal()]
        for part in parts[:-1]:
            base = _NUMBER_AT_END.sub("", part)
            if part in self.special or not (part in self.words or base in PLOTLY_NUMBERED):
                raise refused(path, value)
        if not parts:
            raise refused(path, value)
        self.entry(parts[-1], value, path)

    special: ClassVar[Mapping[str, Callable[[Any, Any, str], None]]] = {
        "type": ChartReader.kind, "source": source, "style": font_style, "args": arguments, "args2": arguments,
        "customdata": ChartReader.plain, "meta": ChartReader.plain, "labelalias": ChartReader.plain,
    }  # fmt: skip


def _why_no_map(kind: Any) -> str:
    if kind in PLOTLY_MAPS:
        return "is a map, which is loaded from servers: show it as a picture (PNG)"
    return ""
