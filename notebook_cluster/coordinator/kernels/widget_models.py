"""The widgets that one kernel has open: their state as views may show it, within bounds, and what Output widgets catch.
No I/O."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from notebook_cluster.protocol.hand_over import OpenWidget
from notebook_cluster.protocol.interaction import NodeComm
from notebook_cluster.security import WidgetView
from notebook_cluster.security.sanitise import safe_output
from notebook_cluster.security.widget_checks import REFERENCE, Reference
from notebook_cluster.security.widgets import LINKS, WidgetKind, label_state, may_refer, refusal, safe_link, widget_kind

MOST_MODELS = 3000
"""Open at one time; a slider is three: itself, its layout and its style."""
MOST_BYTES = 16 * 1000 * 1000
"""States of all widgets of a kernel."""
MOST_MODEL_BYTES = 4 * 1000 * 1000
MOST_VIEWS = 2000
"""That one box may show with everything in it: two boxes that hold each other twice would be endless."""
MOST_OUTPUTS = 200
"""That one Output widget shows."""
MOST_CAPTURED_CHARACTERS = 50_000
"""Of text in a row in an Output widget; the beginning is left out, with a word."""
_CUT_TEXT = "[notebook-cluster: the beginning was left out]\n"
_CONTAINER = "children"


@dataclass(eq=False)
class Model:
    """One open widget. ``public``: its id for views; ``refusal``: why a Label stands in its place, or empty."""

    node: str
    comm_id: str
    public: str
    kind: WidgetKind | None
    state: dict[str, Any]
    refusal: str = ""
    sizes: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    """Traits that views have not been told of yet."""

    def event(self, kind: Literal["open", "update", "close"], state: dict[str, Any]) -> NodeComm:
        """What views are told: ``state`` with its bytes beside it."""
        binary = [name for name, value in state.items() if isinstance(value, bytes)]
        return NodeComm(
            kind=kind,
            node=self.node,
            model=self.public,
            state={name: value for name, value in state.items() if name not in binary},
            buffer_paths=[[name] for name in binary],
            buffers=[state[name] for name in binary],
        )


class NodeModels:
    """Open widgets of ``node`` in its ``incarnation``; ``salt`` makes their ids differ from those of other clusters."""

    def __init__(self, node: str, incarnation: int, salt: str) -> None:
        self.node = node
        self.incarnation = incarnation
        self._salt = salt
        self._models: dict[str, Model] = {}
        self._bytes = 0
        self._left_out = 0
        self._containers: dict[str, Model] = {}

    def all(self) -> Iterable[Model]:
        """In the order in which they were opened."""
        return self._models.values()

    def get(self, comm_id: str) -> Model | None:
        return self._models.get(comm_id)

    def open(self, comm_id: str, state: dict[str, Any]) -> Model | None:
        """A widget opened with ``state``, or opened again. None when there are too many."""
        self.close(comm_id)
        if len(self._models) >= MOST_MODELS:
            self._left_out += 1
            return None
        kind = widget_kind(state)
        model = Model(self.node, comm_id, self._public_id(comm_id, kind), kind, {})
        self._models[comm_id] = model
        safe = self._safe(model, state)
        if model.kind is None or safe is None or not self._fits(model, safe):
            too_large = model.kind is not None and safe is not None
            model.refusal = "a widget over 4 MB is not relayed" if too_large else refusal(state)
            model.kind, safe = None, label_state(model.refusal)
        self._keep(model, safe if model.kind is None else {**model.kind.constants(), **safe})
        return model

    def restore(self, widget: OpenWidget) -> Model:
        """One that was open when another coordinator led, as views have it."""
        state = msgspec.msgpack.decode(widget.state, type=dict[str, Any])
        kind = None if widget.refusal else widget_kind(state)
        model = Model(self.node, widget.comm_id, widget.public, kind, {}, widget.refusal)
        self._models[widget.comm_id] = model
        self._keep(model, state)
        return model

    def update(self, comm_id: str, state: dict[str, Any]) -> tuple[Model, set[str]] | None:
        """The widget that changed, and which of its traits; None when nothing of it may be shown."""
        model = self._models.get(comm_id)
        if model is None or model.kind is None:
            return None
        safe = self._safe(model, state)
        if not safe or not self._fits(model, safe):
            return None
        self._keep(model, safe)
        return model, set(safe)

    def set(self, model: Model, state: dict[str, Any]) -> bool:
        """Change ``model`` to what is checked already; False when there is no room for it."""
        if not self._fits(model, state):
            return False
        self._keep(model, state)
        return True

    def close(self, comm_id: str) -> Model | None:
        """The widget that is closed now, if it was open."""
        model = self._models.pop(comm_id, None)
        self._containers.pop(comm_id, None)
        if model is not None:
            self._bytes -= sum(model.sizes.values())
        return model

    def view(self, comm_id: Any) -> str:
        """The id for views of a widget that is to be displayed.

        Raises:
            ValueError: it cannot be; the text says why.
        """
        model = self._models.get(comm_id) if isinstance(comm_id, str) else None
        if model is None:
            if self._left_out:
                raise ValueError(f"over {MOST_MODELS} widgets are open on {self.node}: close() those no longer needed")
            raise ValueError(f"this widget is not open on {self.node}")
        if model.refusal:
            raise ValueError(model.refusal)
        return model.public

    def _public_id(self, comm_id: str, kind: WidgetKind | None) -> str:
        # With the kind: what refers to a slider must not find an HTML widget that was opened under its id later.
        words = (self._salt, self.node, self.incarnation, kind.model if kind is not None else "", comm_id)
        named = "\0".join(map(str, words)).encode("utf-8", "replace")
        return f"nbc-{hashlib.blake2b(named, digest_size=16).hexdigest()}"

    def _reference(self, trait: str) -> Reference:
        def refer(comm_id: str) -> str | None:
            model = self._models.get(comm_id)
            return model.public if model is not None and may_refer(trait, model.state["_model_name"]) else None

        return refer

    def _safe(self, model: Model, state: dict[str, Any]) -> dict[str, Any] | None:
        """What of ``state`` may be shown; None when the widget cannot be relayed at all."""
        if model.kind is None:
            return None
        if model.kind.model in LINKS:
            try:
                return safe_link({**model.state, **state}, self._kind_of)
            except ValueError:
                return None
        safe = model.kind.safe_state(state, self._reference)
        if _CONTAINER in safe and not self._is_bounded(model, safe[_CONTAINER] or []):
            del safe[_CONTAINER]
        return safe

    def _kind_of(self, comm_id: str) -> tuple[str, WidgetKind] | None:
        # A link says its ends again with every change; those that it has are written as views know them.
        model = self._models.get(comm_id) or next((m for m in self._models.values() if m.public == comm_id), None)
        return None if model is None or model.kind is None else (model.public, model.kind)

    def _is_bounded(self, changed: Model, children: Sequence[str]) -> bool:
        """With these children of ``changed`` no box shows itself, nor more than MOST_VIEWS widgets."""
        held = {REFERENCE + model.public: model.state.get(_CONTAINER) or [] for model in self._containers.values()}
        held[REFERENCE + changed.public] = children
        counts: dict[str, int] = {}

        def count(name: str, depth: int) -> int:
            if name not in counts:
                counts[name] = MOST_VIEWS + 1  # what is found again while it is counted holds itself
                total = 1
                for child in held.get(name, ()):
                    total += count(child, depth + 1) if depth < 50 else MOST_VIEWS
                    if total > MOST_VIEWS:
                        break
                counts[name] = total
            return counts[name]

        return all(count(name, 0) <= MOST_VIEWS for name in held)

    def _fits(self, model: Model, state: dict[str, Any]) -> bool:
        added = sum(_size(value) - model.sizes.get(name, 0) for name, value in state.items())
        return sum(model.sizes.values()) + added <= MOST_MODEL_BYTES and self._bytes + added <= MOST_BYTES

    def _keep(self, model: Model, state: dict[str, Any]) -> None:
        for name, value in state.items():
            size = _size(value)
            self._bytes += size - model.sizes.get(name, 0)
            model.sizes[name] = size
            model.state[name] = value
        if _CONTAINER in state:
            self._containers[model.comm_id] = model


def _size(value: Any) -> int:
    return len(value) if isinstance(value, bytes | str) else len(msgspec.msgpack.encode(value))


class OutputCaptures:
    """Which Output widget catches the output of which message: while code runs in ``with output:`` what it prints and
    displays goes into the widget.

    In a notebook the browser does this: an Output widget names a message whose output it catches. The browser never
    sees the messages of a node, so it is done here, and views get the caught outputs as the widget's state.
    ``changed(model, outputs)`` is called with the outputs as notebooks store them.
    """

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

    def message_of(self, model: Model) -> str:
        """The message whose output ``model`` catches, or empty."""
        return next((message for (_, message), models in self._listening.items() if model in models), "")

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
            _append_output(outputs, {"output_type": kind, **safe})
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


def _append_output(outputs: list[dict[str, Any]], new: dict[str, Any]) -> None:
    last = outputs[-1] if outputs else {}
    if new["output_type"] == "stream" == last.get("output_type") and last.get("name") == new["name"]:
        text = last["text"] + new["text"]
        if len(text) > MOST_CAPTURED_CHARACTERS:
            text = _CUT_TEXT + text[-MOST_CAPTURED_CHARACTERS:]
        outputs[-1] = {**last, "text": text}
    else:
        outputs.append(new)
