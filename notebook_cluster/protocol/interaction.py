"""What nodes and a view have to say to each other: questions of ``input()``, last values, widgets; and what is in the
nodes' namespaces: completion, inspection, the table of variables.

A view asks for last values (``-o``, ``--async``) by :data:`VALUE_KEY` among the cell's user expressions. The node keeps
the value of the cell's last expression then, and answers the expression :data:`VALUE_EXPRESSION` with a bundle that
holds :data:`VALUE_MIME`.

A widget is known by its ``model``: an id that the coordinator made of the node's name and the node's own id, so no node
can name the widget of another one, or one of the notebook. References from widget to widget (``IPY_MODEL_<model>``) are
written with such ids too.
"""

from typing import Any, Literal

from notebook_cluster.protocol.wire import Message

VALUE_KEY = "notebook_cluster_value"
VALUE_EXPRESSION = "__import__('notebook_cluster.node.namespace.last_value', fromlist=['x']).packed()"
VALUE_MIME = "application/vnd.notebook-cluster.value+json"
MOST_VALUE_BYTES = 4 * 1024 * 1024
"""Raw bytes of one node's value."""
MOST_PACKED_BYTES = 6 * 1024 * 1024
"""The same as JSON with base64."""
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
"""A display of a widget: :func:`view_of_widget`."""
MAX_COMM_BYTES = 6 * 1000 * 1000
"""Data and buffers of one message from the browser to a widget of a node."""


class InputRequested(Message, frozen=True):
    """Coordinator, to the view that is to ask: ``node`` waits for a line. Answered by AnswerInput."""

    cell: int
    id: int
    node: str
    rank: int | None
    prompt: str
    password: bool = False
    """What is typed is not to be shown."""


class InputWithdrawn(Message, frozen=True):
    """Coordinator: nobody waits for the answer any more."""

    cell: int
    id: int


class AnswerInput(Message, frozen=True):
    """View. An answer to a question that was withdrawn, or given to another view, is dropped. Reply value: None."""

    id: int
    value: str = ""
    end: bool = False
    """There is no answer: ``input()`` raises EOFError on the node."""


class NodeValue(Message, frozen=True):
    """An event of a cell: the last value on ``node``, when the cell has ended well there."""

    cell: int
    node: str
    rank: int | None
    packed: bytes
    """JSON: ``{"meta": ..., "buffers": [base64, ...]}``, or ``{"kind", "text", "reason"}`` where it cannot travel."""


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


MOST_SUGGESTIONS = 500
MOST_VARIABLES = 500
"""Of one node: the rest is counted."""
MOST_INSPECTION = 64 * 1024
"""Characters."""

# ---- view -> coordinator


class Complete(Message, frozen=True):
    """What may stand at ``cursor`` (characters) in ``code``, asked of one node of ``targets`` (empty: all): the idle
    one with the lowest rank. Reply value: Completions; an error when no node answers within half a second."""

    code: str
    cursor: int
    targets: list[str] = []


class Suggestion(Message, frozen=True):
    text: str
    kind: str = ""
    """``function``, ``instance``, ``module`` ..., or empty."""


class Completions(Message, frozen=True):
    """``suggestions`` replace the characters from ``start`` to the cursor."""

    node: str
    start: int
    suggestions: list[Suggestion]


class Inspect(Message, frozen=True):
    """What is at ``cursor`` in ``code``, asked as Complete. Reply value: Inspection."""

    code: str
    cursor: int
    targets: list[str] = []
    detail: int = 0
    """1: with source code."""


class Inspection(Message, frozen=True):
    node: str
    found: bool
    text: str = ""


class ListVariables(Message, frozen=True):
    """Reply value: list of NodeVariables in rank order. Nodes that run a cell are not asked: their last answer is
    given again."""

    pattern: str = ""
    """As in a shell: ``m*``, ``?``. Empty: all."""
    everything: bool = False
    """Also modules, functions and classes."""


class Variable(Message, frozen=True):
    """One row of a node's namespace. Text is short and on one line."""

    name: str
    kind: str
    shape: str = ""
    """``[64, 10]``, ``850 parameters``, ``3 items``."""
    device: str = ""
    bytes: int | None = None
    hash: str = ""
    """Of the content, 8 hex digits, ``~`` in front when only a sample of it was looked at. Empty: it has none."""
    value: str = ""
    """Of a number, a truth value or a short text."""


class NodeVariables(Message, frozen=True):
    """One column. ``asked`` is None when the node never answered."""

    node: str
    rank: int | None
    status: Literal["ok", "busy", "silent", "lost"]
    variables: list[Variable] = []
    left_out: int = 0
    asked: float | None = None
    """Seconds since the answer was given; 0 for one that is new."""


class NoteEvent(Message, frozen=True):
    """A line for the event list, of the window through which the owner looks. Reply value: None."""

    level: Literal["info", "warning", "error"]
    text: str


AnyInteraction = NoteEvent | Complete | Inspect | ListVariables | AnswerInput | WatchWidgets | CommToNode
"""What a view may ask for."""


# ---- coordinator <-> node


class FetchVariables(Message, frozen=True):
    """Coordinator: answered by Variables as soon as the node's main thread is free."""

    ticket: int
    pattern: str = ""
    everything: bool = False
    seconds: float = 1.5
    """For hashing; rows after that have no hash."""


class Variables(Message, frozen=True):
    ticket: int
    variables: list[Variable]
    left_out: int = 0
