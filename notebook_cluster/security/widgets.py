"""The allow-list for widgets that nodes create: the core controls, each trait checked, nothing that runs script.

A widget is rebuilt rather than filtered: names of model and view come from the table below, and a trait that is not in
it, or has another type than it should, is left out. So no text of a node reaches a view that reads it as HTML:
ipywidgets writes ``value`` of HTML and HTMLMath into the page as it is, and would do so with that of a Text which asks
for the view of HTML.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from notebook_cluster.security.chart_grammar import without_tex
from notebook_cluster.security.sanitise import safe_name
from notebook_cluster.security.widget_checks import (
    REFERENCE,
    Check,
    Reference,
    classes,
    date,
    either,
    flag,
    html,
    matching,
    never_html,
    no_message,
    nothing_uploaded,
    number,
    one_of,
    outputs,
    place,
    raw_bytes,
    referred,
    several,
    style,
    text,
    typeset,
)

BASE, CONTROLS, OUTPUT = "@jupyter-widgets/base", "@jupyter-widgets/controls", "@jupyter-widgets/output"
_VERSIONS = {BASE: "2.0.0", CONTROLS: "2.0.0", OUTPUT: "1.0.0"}
_IMAGE = frozenset(("png", "jpeg", "jpg", "gif", "webp", "bmp"))
"""Not svg+xml: a picture opened in a tab of its own has the notebook's origin, and script in it runs. Not url."""
_MEDIA = frozenset(("mp4", "webm", "ogg", "mpeg", "mp3", "wav", "wave", "x-wav", "aac", "flac"))


@dataclass(frozen=True)
class WidgetKind:
    """A model that is relayed, and what is checked of it.

    Attributes:
        traits: name -> check of every trait that a node may set.
        references: traits that name one other widget (``layout``) or several (``children``).
        numeric: traits that a link between two widgets may carry in the browser: numbers and flags.
    """

    module: str
    model: str
    view: str | None
    view_module: str
    traits: Mapping[str, Check]
    references: frozenset[str] = frozenset()
    numeric: frozenset[str] = frozenset()

    def constants(self) -> dict[str, Any]:
        """The names of model and view, as every state begins."""
        return {
            "_model_module": self.module,
            "_model_module_version": _VERSIONS[self.module],
            "_model_name": self.model,
            "_view_module": self.view_module if self.view else None,
            "_view_module_version": _VERSIONS[self.view_module] if self.view else "",
            "_view_name": self.view,
        }

    def safe_state(self, state: Mapping[str, Any], reference: Callable[[str], Reference]) -> dict[str, Any]:
        """What of ``state`` may be shown, with references as views know them: those of a trait by its ``reference``."""
        safe: dict[str, Any] = {}
        for name, value in state.items():
            check = self.traits.get(name)
            try:
                if name in self.references:
                    safe[name] = referred(value, reference(name))
                elif check is not None:
                    safe[name] = check(value)
            except ValueError:
                continue
        return safe


def may_refer(trait: str, model: str) -> bool:
    """Whether ``trait`` may name a widget with this name of its model: a widget that is its own layout is endless."""
    if trait == "children":
        return not model.endswith(("StyleModel", "LayoutModel"))
    return model == "LayoutModel" if trait == "layout" else model.endswith("StyleModel")


def widget_kind(state: Mapping[str, Any]) -> WidgetKind | None:
    """The kind that a node's ``state`` names, when widgets of that kind are relayed."""
    module, model = state.get("_model_module"), state.get("_model_name")
    kind = KINDS.get((module, model)) if isinstance(module, str) and isinstance(model, str) else None
    if kind is None:
        return None
    version = state.get("_model_module_version")
    wanted = _VERSIONS[kind.module].partition(".")[0]
    return kind if isinstance(version, str) and version.lstrip("^~=v").partition(".")[0] == wanted else None


def refusal(state: Mapping[str, Any]) -> str:
    """Why a widget with this ``state`` is not shown, for people."""
    model = safe_name(state.get("_model_name"), 60) or "unknown"
    module = safe_name(state.get("_model_module"), 60)
    where = f" ({module} {safe_name(state.get('_model_module_version'), 20)})" if module else ""
    hint = ""
    if module == "anywidget":
        hint = "; its script does not run here (of a plotly FigureWidget, go.Figure(it) is shown)"
    return f"a widget of kind {model}{where} is not relayed from nodes{hint}"


def label_state(text: str) -> dict[str, Any]:
    """The state of a Label that says ``text``: what stands where a widget is not relayed."""
    return {**KINDS[CONTROLS, "LabelModel"].constants(), "value": without_tex(f"[notebook-cluster: {text}]")}


# ---- the table -------------------------------------------------------------------------------------------------

_word = matching(re.compile(r"[ -~]{0,100}"))
"""Choices (``vertical``), number formats: printable ASCII for places that show it as text or compare it."""
_icon = matching(re.compile(r"[a-zA-Z0-9 -]{0,100}"))
_index = either(number, several(number))
_tags = several(either(number, text))

_DOM: dict[str, Check] = {"_dom_classes": classes, "tabbable": flag, "tooltip": text}
_DESCRIBED: dict[str, Check] = {
    **_DOM, "description": typeset, "description_allow_html": never_html, "disabled": flag, "placeholder": text,
}  # fmt: skip
_RANGE: dict[str, Check] = {**_DESCRIBED, "min": number, "max": number, "step": number, "value": number}
_TYPED: dict[str, Check] = {**_RANGE, "continuous_update": flag}
_SLIDER: dict[str, Check] = {
    **_TYPED, "behavior": _word, "orientation": _word, "readout": flag, "readout_format": _word, "base": number,
}  # fmt: skip
_PROGRESS: dict[str, Check] = {**_RANGE, "bar_style": _word, "orientation": _word}
_WRITTEN: dict[str, Check] = {**_DESCRIBED, "value": text, "continuous_update": flag, "rows": number}
_PICKED: dict[str, Check] = {
    **_DESCRIBED, "_options_labels": several(typeset), "index": _index, "rows": number, "orientation": _word,
    "continuous_update": flag, "readout": flag, "behavior": _word,
}  # fmt: skip
_TAGS: dict[str, Check] = {
    **_DESCRIBED, "value": _tags, "allowed_tags": _tags, "allow_duplicates": flag, "tag_style": _word,
    "format": _word, "min": number, "max": number,
}  # fmt: skip
_BUTTON: dict[str, Check] = {**_DESCRIBED, "button_style": _word, "icon": _icon}
_BOX: dict[str, Check] = {**_DOM, "box_style": _word}
_PAGES: dict[str, Check] = {**_BOX, "selected_index": number, "titles": several(typeset)}
_DATES: dict[str, Check] = {
    **_DESCRIBED, "value": date, "min": date, "max": date, "step": either(number, _word),
}  # fmt: skip
_FILM: dict[str, Check] = {
    **_DOM, "value": raw_bytes, "format": one_of(_MEDIA), "autoplay": flag, "loop": flag, "controls": flag,
    "width": _word, "height": _word,
}  # fmt: skip
_PLAY: dict[str, Check] = {**_RANGE, "interval": number, "playing": flag, "repeat": flag, "show_repeat": flag}
_LAYOUT = (
    "align_content align_items align_self border_bottom border_left border_right border_top display flex flex_flow "
    "grid_area grid_auto_columns grid_auto_flow grid_auto_rows grid_column grid_gap grid_row grid_template_areas "
    "grid_template_columns grid_template_rows height justify_content justify_items max_height max_width min_height "
    "min_width object_fit object_position order overflow padding visibility width"
)
_PLACES = "bottom left margin right top"
_STYLES = (
    "background bar_color button_color button_width description_width font_family font_size font_style font_variant "
    "font_weight handle_color text_color text_decoration"
)

_VIEWS: list[tuple[str, dict[str, Check]]] = [
    ("Checkbox", {**_DESCRIBED, "value": flag, "indent": flag}),
    ("ToggleButton", {**_BUTTON, "value": flag}),
    ("Valid", {**_DESCRIBED, "value": flag, "readout": typeset}),
    ("Button", _BUTTON),
    ("IntText", _TYPED),
    ("FloatText", _TYPED),
    ("IntSlider", _SLIDER),
    ("FloatSlider", _SLIDER),
    ("FloatLogSlider", _SLIDER),
    ("IntRangeSlider", {**_SLIDER, "value": several(number)}),
    ("FloatRangeSlider", {**_SLIDER, "value": several(number)}),
    ("Play", _PLAY),
    ("Text", _WRITTEN),
    ("Textarea", _WRITTEN),
    ("Password", _WRITTEN),
    ("Combobox", {**_WRITTEN, "options": several(text), "ensure_option": flag}),
    ("Label", {**_DESCRIBED, "value": typeset}),
    ("HTML", {**_DESCRIBED, "value": html}),
    ("HTMLMath", {**_DESCRIBED, "value": html}),
    ("Dropdown", _PICKED),
    ("RadioButtons", _PICKED),
    ("Select", _PICKED),
    ("SelectMultiple", _PICKED),
    ("SelectionSlider", _PICKED),
    ("SelectionRangeSlider", _PICKED),
    ("ToggleButtons", {**_PICKED, "icons": several(_icon), "tooltips": several(text), "button_style": _word}),
    ("TagsInput", _TAGS),
    ("IntsInput", _TAGS),
    ("FloatsInput", _TAGS),
    ("ColorsInput", {**_TAGS, "value": several(style), "allowed_tags": several(style)}),
    ("ColorPicker", {**_DESCRIBED, "value": style, "concise": flag}),
    ("DatePicker", _DATES),
    ("Datetime", _DATES),
    ("Time", _DATES),
    ("FileUpload", {**_BUTTON, "value": nothing_uploaded, "accept": _word, "multiple": flag, "error": text}),
    ("Image", {**_DOM, "value": raw_bytes, "format": one_of(_IMAGE), "width": _word, "height": _word}),
    ("Audio", _FILM),
    ("Video", _FILM),
    ("Box", _BOX),
    ("HBox", _BOX),
    ("VBox", _BOX),
    ("GridBox", _BOX),
    ("Accordion", _PAGES),
    ("Tab", _PAGES),
    ("Stack", _PAGES),
]
_OTHER_VIEWS: list[tuple[str, str, dict[str, Check]]] = [
    ("BoundedIntText", "IntText", _TYPED),
    ("BoundedFloatText", "FloatText", _TYPED),
    ("IntProgress", "Progress", _PROGRESS),
    ("FloatProgress", "Progress", _PROGRESS),
    ("NaiveDatetime", "Datetime", _DATES),
]
_STYLED = "Button Checkbox Description HTML HTMLMath Label Progress Slider Text ToggleButton ToggleButtons"


def _numeric(traits: Mapping[str, Check]) -> frozenset[str]:
    return frozenset(name for name, check in traits.items() if check in (number, flag, _index))


def _kind(name: str, view: str, traits: dict[str, Check]) -> WidgetKind:
    references = {"layout"}
    if traits is not _BOX and traits is not _PAGES:
        references.add("style")
    else:
        references.add("children")
    return WidgetKind(
        CONTROLS, f"{name}Model", f"{view}View", CONTROLS, traits, frozenset(references), _numeric(traits)
    )


def _table() -> dict[tuple[str, str], WidgetKind]:
    kinds = [_kind(name, name, traits) for name, traits in _VIEWS]
    kinds += [_kind(*row) for row in _OTHER_VIEWS]
    styles = dict.fromkeys(_STYLES.split(), style)
    kinds += [WidgetKind(CONTROLS, f"{name}StyleModel", "StyleView", BASE, styles) for name in _STYLED.split()]
    layout = dict.fromkeys(_LAYOUT.split(), style) | dict.fromkeys(_PLACES.split(), place)
    kinds.append(WidgetKind(BASE, "LayoutModel", "LayoutView", BASE, layout))
    output = {**_DOM, "msg_id": no_message, "outputs": outputs}
    kinds.append(WidgetKind(OUTPUT, "OutputModel", "OutputView", OUTPUT, output, frozenset(("layout",))))
    kinds += [WidgetKind(CONTROLS, f"{name}Model", None, CONTROLS, {}) for name in ("Link", "DirectionalLink")]
    return {(kind.module, kind.model): kind for kind in kinds}


KINDS = _table()
LINKS = frozenset(("LinkModel", "DirectionalLinkModel"))


def safe_link(state: Mapping[str, Any], kind_of: Callable[[str], tuple[str, WidgetKind] | None]) -> dict[str, Any]:
    """``source`` and ``target`` of a link between two widgets, which the browser follows by itself: only between
    numbers and flags, or text would get from a Text into an HTML widget without being looked at.

    Args:
        state: of the link, as the node says it.
        kind_of: the id for views and the kind of the widget with this id of the node; None when it is not relayed.

    Raises:
        ValueError: an end of the link is something else.
    """
    ends: dict[str, Any] = {}
    for end in ("source", "target"):
        value = state.get(end)
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
            raise ValueError(end)
        found = kind_of(value[0].removeprefix(REFERENCE))
        if found is None or value[1] not in found[1].numeric:
            raise ValueError(end)
        ends[end] = [REFERENCE + found[0], value[1]]
    return ends
