"""The allow-list for what nodes print and display: no script of a node ever runs in the notebook.

Script runs in JupyterLab from HTML, Markdown and any widget, but not from an SVG shown as ``<img src="data:...">``.
Charts of plotly, Vega and Vega-Lite can load from addresses, with the reader's cookies: they pass when every key of
them is known not to (:func:`safe_chart`).
"""

import base64
import binascii
import html
import json
import re
from collections.abc import Callable
from typing import Any

from notebook_cluster.protocol.interaction import WIDGET_MIME, view_of_widget
from notebook_cluster.security.chart_grammar import ChartRefused, check_bounds, html_without_tex
from notebook_cluster.security.plotly_charts import PlotlyReader
from notebook_cluster.security.vega_charts import EMBED_OPTIONS, VegaLiteReader, VegaReader

MAX_BUNDLE_BYTES = 10 * 1000 * 1000
"""A larger display is replaced by a text that says so, a longer text is cut with a marker."""
MAX_ERROR_CHARACTERS = 200_000
WidgetView = Callable[[Any], str]
"""The id under which views know the widget with this id of the node. ValueError: it is not shown; why, for people."""
_MAX_NAME = 200
_IMAGES = ("image/png", "image/jpeg", "image/gif")
_DATA_IMAGE = re.compile(r"data:image/(png|jpeg|gif|svg\+xml);base64,[A-Za-z0-9+/=\s]*")
_BARE_OBJECT = re.compile(r"\s*<[\w.]+ object(?: at 0x[0-9a-fA-F]+)?>\s*")
"""What Python says of an object that says nothing of itself."""
_SCRIPT = re.compile(r"<script\b", re.IGNORECASE)
_VISIBLE = re.compile(r"<(?:img|hr|table)\b|>[^<>]*[^<>\s]|^[^<>]*[^<>\s]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
_TEXT_CONTROL = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")
"""Kept in text: backspace, tab, newline, carriage return and escape, which progress bars and colours need."""

_TAG_NAMES = (
    "a abbr b blockquote br caption center cite code col colgroup dd del details div dl dt em figcaption figure font "
    "h1 h2 h3 h4 h5 h6 hr i img ins kbd li mark ol p pre q s samp small span strike strong sub summary sup table "
    "tbody td tfoot th thead tr tt u ul var"
)
_ATTRIBUTES = {
    "*": {"style", "title", "dir", "lang", "align", "valign", "width", "height"},
    "a": {"href"},
    "img": {"src", "alt"},
    "font": {"color"},
    "table": {"border", "cellpadding", "cellspacing"},
    "td": {"colspan", "rowspan", "bgcolor"},
    "th": {"colspan", "rowspan", "scope", "bgcolor"},
    "col": {"span"},
    "ol": {"start", "type"},
    "details": {"open"},
}
_CLASSES = {"table": {"dataframe"}}
_STYLE_NAMES = (
    "color background-color font-family font-size font-style font-weight text-align text-decoration text-indent "
    "vertical-align white-space word-break overflow-wrap line-height letter-spacing width height max-width max-height "
    "min-width overflow overflow-x overflow-y padding padding-left padding-right padding-top padding-bottom border "
    "border-top border-bottom border-left border-right border-color border-style border-width border-collapse "
    "border-spacing border-radius display float clear"
)
"""None that takes a URL (it would tell an address that the output was seen) or places things over other things."""


def safe_bundle(data: dict[str, Any], widget_view: WidgetView | None = None) -> dict[str, Any]:
    """The MIME bundle ``data`` of a node, reduced to what may be shown; never empty.

    Kept: text/plain; png, jpeg and gif in base64; HTML without script; SVG as an ``<img>``; charts of plotly and Vega
    that load nothing (of others a line says why they are shown as text). Markdown and LaTeX become text/plain when
    nothing else is there that says more than which object it is. Everything else is left out, and when nothing
    remains, or the bundle is over ``MAX_BUNDLE_BYTES``, a text says so. With ``widget_view`` also the view of a widget.
    """
    size = sum(_size(value) for value in data.values())
    if size > MAX_BUNDLE_BYTES:
        limit = MAX_BUNDLE_BYTES / 1e6
        return _note(f"an output of {size / 1e6:.1f} MB was left out (limit {limit:.0f} MB): save it to a file instead")
    kept: dict[str, Any] = {}
    notes: list[str] = []
    for mime, value in data.items():
        if mime == "text/plain" and (text := _text(value)) is not None:
            kept[mime] = safe_text(text)
        elif mime in _IMAGES and (text := _text(value)) is not None and _is_base64(text):
            kept[mime] = text
        elif mime == "text/html" and (text := _text(value)) is not None:
            cleaned = safe_html(text)
            # A page that is made by its script alone would be an empty place, before the text that says what it is.
            if not _SCRIPT.search(text) or _VISIBLE.search(cleaned):
                kept[mime] = html_without_tex(cleaned)
        elif is_chart(mime):
            try:
                kept[mime] = safe_chart(mime, value)
            except ChartRefused as error:
                notes.append(f"[notebook-cluster: the chart is shown as text: {error}]")
    svg = _text(data.get("image/svg+xml"))
    if svg is not None and "text/html" not in kept:
        encoded = base64.b64encode(svg.encode("utf-8", "replace")).decode("ascii")
        kept["text/html"] = f'<img src="data:image/svg+xml;base64,{encoded}">'
    if WIDGET_MIME in data and widget_view is not None:
        _add_widget(kept, data[WIDGET_MIME], widget_view)
    if not kept.keys() - {"text/plain"} and _says_nothing(kept.get("text/plain", "")):
        kept.update(_instead(data))
    _add_notes(kept, notes)
    return kept or _fallback(data)


def _says_nothing(text: str) -> bool:
    return not text.strip() or _BARE_OBJECT.fullmatch(text) is not None


def _instead(data: dict[str, Any]) -> dict[str, Any]:
    """A text for what is never shown as it is: the source of Markdown and TeX; that script is not run."""
    for mime in ("text/markdown", "text/latex"):
        text = _text(data.get(mime))
        if text is not None:
            return {"text/plain": safe_text(text)}
    if "application/javascript" in data or _SCRIPT.search(_text(data.get("text/html")) or ""):
        return _note("JavaScript was left out: scripts of nodes are not run in the notebook")
    return {}


def _add_notes(kept: dict[str, Any], notes: list[str]) -> None:
    """Lines into the text and, as it is shown instead of the text, into the HTML."""
    if not notes:
        return
    text = "\n".join(notes)
    kept["text/plain"] = "\n".join([*filter(None, [kept.get("text/plain")]), text])
    if "text/html" in kept:
        kept["text/html"] = f"{kept['text/html']}<pre>{html.escape(text)}</pre>"


def _add_widget(kept: dict[str, Any], value: Any, widget_view: WidgetView) -> None:
    """The view of a widget into ``kept``, or into its text why there is none."""
    try:
        model = widget_view(value.get("model_id") if isinstance(value, dict) else None)
        kept[WIDGET_MIME] = view_of_widget(model)
        kept.setdefault("text/plain", "a widget")
    except ValueError as error:
        if not kept.keys() - {"text/plain"}:
            before = [kept["text/plain"]] if kept.get("text/plain") else []
            kept["text/plain"] = "\n".join([*before, f"[notebook-cluster: {error}]"])


def safe_html(text: str) -> str:
    """``text`` without script, without styles that cover other things, without anything loaded from elsewhere."""
    import nh3

    return nh3.clean(
        text,
        tags=set(_TAG_NAMES.split()),
        attributes=_ATTRIBUTES,
        attribute_filter=_keep_attribute,
        allowed_classes=_CLASSES,
        filter_style_properties=set(_STYLE_NAMES.split()),
        url_schemes={"http", "https", "mailto", "data"},
        url_relative="deny",
    )


def safe_text(text: str) -> str:
    """``text`` with ANSI sequences but no other control characters, cut at ``MAX_BUNDLE_BYTES``."""
    if len(text) > MAX_BUNDLE_BYTES:
        text = text[:MAX_BUNDLE_BYTES] + f"\n[notebook-cluster: {len(text) - MAX_BUNDLE_BYTES} characters left out]\n"
    return _TEXT_CONTROL.sub("", text)


def safe_name(text: Any, longest: int = _MAX_NAME) -> str:
    """``text`` on one line, without control characters, at most ``longest`` characters."""
    return _CONTROL.sub("", text if isinstance(text, str) else "")[:longest]


def safe_output(kind: str, content: dict[str, Any], widget_view: WidgetView | None = None) -> dict[str, Any] | None:
    """The content of a Jupyter output message of type ``kind`` as it may be shown, or None when it may not.

    Only known fields survive, each with its type checked; a content that is malformed or of another kind is None.
    """
    if kind == "stream":
        text = content.get("text")
        name = "stderr" if content.get("name") == "stderr" else "stdout"
        return {"name": name, "text": safe_text(text)} if isinstance(text, str) else None
    if kind in ("display_data", "update_display_data", "execute_result"):
        return _safe_display(kind, content, widget_view)
    if kind == "error":
        return {
            "ename": safe_name(content.get("ename")),
            "evalue": _shortened(safe_text(_text(content.get("evalue")) or "")),
            "traceback": _safe_traceback(content.get("traceback")),
        }
    if kind == "clear_output":
        return {"wait": content.get("wait") is True}
    return None


def _safe_display(kind: str, content: dict[str, Any], widget_view: WidgetView | None) -> dict[str, Any] | None:
    data = content.get("data")
    if not isinstance(data, dict) or not all(isinstance(mime, str) for mime in data):
        return None
    bundle = safe_bundle(data, widget_view)
    safe: dict[str, Any] = {"data": bundle, "metadata": _safe_metadata(content.get("metadata"), bundle)}
    if kind == "execute_result":
        count = content.get("execution_count")
        safe["execution_count"] = count if isinstance(count, int) else None
    transient = content.get("transient")
    display_id = safe_name(transient.get("display_id")) if isinstance(transient, dict) else ""
    if kind == "update_display_data" and not display_id:
        return None
    safe["transient"] = {"display_id": display_id} if display_id else {}
    return safe


def _safe_metadata(metadata: Any, bundle: dict[str, Any]) -> dict[str, Any]:
    """Width and height of images: all that notebooks need of it. How charts are embedded is ours to say."""
    safe: dict[str, Any] = {mime: chart_metadata(mime) for mime in bundle if is_chart(mime) and chart_metadata(mime)}
    for mime in bundle if isinstance(metadata, dict) else ():
        sizes = metadata.get(mime)
        if mime in _IMAGES and isinstance(sizes, dict):
            numbers = {key: sizes[key] for key in ("width", "height") if isinstance(sizes.get(key), int | float)}
            if numbers:
                safe[mime] = numbers
    return safe


def _safe_traceback(lines: Any) -> list[str]:
    """The lines as text; of a very long one (deep recursion) the beginning and the end."""
    if not isinstance(lines, list):
        return []
    return _shortened(safe_text("\n".join(line for line in lines if isinstance(line, str)))).split("\n")


def _shortened(text: str) -> str:
    if len(text) <= MAX_ERROR_CHARACTERS:
        return text
    half = MAX_ERROR_CHARACTERS // 2
    return f"{text[:half]}\n[notebook-cluster: {len(text) - 2 * half} characters left out]\n{text[-half:]}"


def _keep_attribute(tag: str, attribute: str, value: str) -> str | None:
    """Links lead to the web or to mail; pictures are in the text itself."""
    if attribute == "href":
        return value if value.lower().startswith(("http://", "https://", "mailto:")) else None
    if attribute == "src":
        return value if tag == "img" and _DATA_IMAGE.fullmatch(value) else None
    return value


def _text(value: Any) -> str | None:
    """A MIME value as text: nbformat allows a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "".join(value)
    return value if isinstance(value, str) else None


def _size(value: Any) -> int:
    """Characters of ``value`` as text or JSON; a value that is not JSON counts as nothing, it is left out anyway."""
    text = _text(value)
    if text is not None:
        return len(text)
    try:
        return len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        return 0


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _fallback(data: dict[str, Any]) -> dict[str, Any]:
    kinds = ", ".join(sorted(safe_name(mime, 60) for mime in data)[:5]) or "nothing"
    return _note(f"an output was left out because it has no safe form ({kinds})")


def _note(text: str) -> dict[str, Any]:
    return {"text/plain": f"[notebook-cluster: {text}]"}


_KINDS = re.compile(r"application/vnd\.(?:(plotly)\.v1|(vega|vegalite)\.v(\d{1,2}))\+json")
_LIBRARIES = {"vega": "vega", "vegalite": "vega-lite"}


def is_chart(mime: str) -> bool:
    """Whether ``mime`` is that of a kind of chart."""
    return _KINDS.fullmatch(mime) is not None


def safe_chart(mime: str, chart: Any) -> dict[str, Any]:
    """``chart`` of this MIME type, which loads nothing and leads nowhere.

    Nothing that draws is changed: where something is not understood the chart is refused. What steers the renderer is
    written here.

    Raises:
        ChartRefused: which key, its value, why, and the way out, on one line.
    """
    kind = _KINDS.fullmatch(mime)
    if kind is None or not isinstance(chart, dict):
        raise ChartRefused("it is no JSON object")
    check_bounds(chart)
    if kind[1]:
        return PlotlyReader().read(chart)
    reader = VegaReader() if kind[2] == "vega" else VegaLiteReader()
    reader.read(chart)
    schema = f"https://vega.github.io/schema/{_LIBRARIES[kind[2]]}/v{int(kind[3])}.json"
    return {**chart, "$schema": schema, "usermeta": {"embedOptions": EMBED_OPTIONS}}


def chart_metadata(mime: str) -> dict[str, Any]:
    """Metadata to display with a safe chart of this MIME type: how JupyterLab embeds it, whatever the chart says."""
    return {} if "plotly" in mime else {"embed_options": EMBED_OPTIONS}
