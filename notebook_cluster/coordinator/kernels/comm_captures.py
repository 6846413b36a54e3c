"""Output widgets of nodes: while code runs in ``with output:`` what it prints and displays goes into the widget.

In a notebook the browser does this: an Output widget names a message whose output it catches. The browser never sees
the messages of a node, so it is done here, and views get the caught outputs as the widget's state.
"""

from collections.abc import Callable
from typing import Any

from notebook_cluster.coordinator.kernels.widget_models import Model
from notebook_cluster.security import WidgetView
from notebook_cluster.security.sanitise import safe_output

MOST_OUTPUTS = 200
MOST_CHARACTERS = 50_000
"""Of text in a row; the beginning is left out, with a word."""
_CUT = "[notebook-cluster: the beginning was left out]\n"


class OutputCaptures:
    """Which Output widget catches the output of which message. ``changed(model, outputs)`` is called with the outputs
    as notebooks store them."""

    def __init__(self, changed: Callable[[Model, list[dict[str, Any]]], None]) -> None:
        self._changed = changed
        self._listening: dict[tuple[str, str], list[Model]] = {}
        self._clear_at_next: set[str] = set()
        self._said: dict[str, list[dict[str, Any]]] = {}
        """Public id -> outputs that the node itself has put into the widget."""

    def listen(self, model: Model, message_id: str) -> None:
        """``model`` catches what belongs to message ``message_id`` of its node from now on; empty: nothing."""
        self._stop(model)
        if message_id and model.kind is not None and model.kind.model == "OutputModel":
            # The innermost ``with`` block comes last.
            self._listening.setdefault((model.node, message_id), []).append(model)

    def forget(self, model: Model) -> None:
        """It is closed."""
        self._stop(model)
        self._clear_at_next.discard(model.public)
        self._said.pop(model.public, None)

    def take(self, node: str, message_id: str, kind: str, content: dict[str, Any], view: WidgetView) -> bool:
        """Catch one output message; False when nothing listens for it."""
        models = self._listening.get((node, message_id))
        if not models:
            return False
        model = models[-1]
        safe = safe_output(kind, content, view)
        if safe is None or kind == "update_display_data":
            return True
        outputs = list(model.state.get("outputs") or [])
        if kind == "clear_output":
            if safe["wait"]:
                self._clear_at_next.add(model.public)
                return True
            outputs = []
        else:
            if model.public in self._clear_at_next:
                self._clear_at_next.discard(model.public)
                outputs = []
            safe.pop("transient", None)
            _append(outputs, {"output_type": kind, **safe})
        self._changed(model, outputs[-MOST_OUTPUTS:])
        return True

    def merged(self, model: Model, shown: list[dict[str, Any]], said: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What ``model`` shows when its node sets its outputs to ``said`` while it shows ``shown``: a node that appends
        knows nothing of what was caught here."""
        before, self._said[model.public] = self._said.get(model.public, []), said
        return [*shown, *said[len(before) :]] if said and said[: len(before)] == before else said

    def _stop(self, model: Model) -> None:
        for key, models in list(self._listening.items()):
            if model in models:
                models.remove(model)
                if not models:
                    del self._listening[key]


def _append(outputs: list[dict[str, Any]], new: dict[str, Any]) -> None:
    last = outputs[-1] if outputs else {}
    if new["output_type"] == "stream" == last.get("output_type") and last.get("name") == new["name"]:
        text = last["text"] + new["text"]
        outputs[-1] = {**last, "text": text if len(text) <= MOST_CHARACTERS else _CUT + text[-MOST_CHARACTERS:]}
    else:
        outputs.append(new)
