"""View <-> coordinator: the widgets that nodes have open, as a notebook can show them.

A widget is known by its ``model``: an id that the coordinator made of the node's name and the node's own id, so no node
can name the widget of another one, or one of the notebook. References from widget to widget (``IPY_MODEL_<model>``) are
written with such ids too.
"""

from typing import Any, Literal

from notebook_cluster.protocol.wire import Message

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
"""A display of a widget: :func:`view_of_widget`."""
MAX_COMM_BYTES = 6 * 1000 * 1000
"""Data and buffers of one message from the browser to a widget of a node."""


def view_of_widget(model: str) -> dict[str, Any]:
    """What stands under WIDGET_MIME for the widget whose id is ``model``."""
    return {"version_major": 2, "version_minor": 0, "model_id": model}


class WatchWidgets(Message, frozen=True):
    """View: send me NodeComm events. Reply value: None; before it comes one ``open`` for every widget that is open."""


class CommToNode(Message, frozen=True):
    """View: what the browser says to a widget of a node: ``data`` of a comm_msg (methods ``update`` and ``custom``).

    An update that waits for the one before it is merged with those that come later. Reply value: None, at once."""

    model: str
    data: dict[str, Any]
    buffers: list[bytes] = []


class NodeComm(Message, frozen=True):
    """A widget of a node opened, changed or closed; already filtered by the allow-list of widgets.

    ``open``: ``state`` is the whole state, with the names of model and view. ``update``: what changed of it. ``close``:
    the node closed it. ``dead``: the kernel of ``node`` is gone, so none of its widgets acts any more (no ``model``).
    """

    kind: Literal["open", "update", "close", "dead"]
    node: str
    model: str = ""
    state: dict[str, Any] = {}
    buffer_paths: list[list[str | int]] = []
    """Where in ``state`` each of ``buffers`` belongs."""
    buffers: list[bytes] = []
