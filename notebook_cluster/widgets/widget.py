"""The part of the panel that the browser draws: one anywidget, one comm, one JSON traitlet."""

from pathlib import Path

import anywidget
import traitlets

_HERE = Path(__file__).parent


class PanelWidget(anywidget.AnyWidget):  # type: ignore[misc]
    """Shows ``state`` (:func:`.model.panel_model`, ``answers``, ``notice``) and sends ``{action, target, id}``."""

    _esm = _HERE / "panel.js"
    _css = _HERE / "panel.css"
    state = traitlets.Dict().tag(sync=True)
