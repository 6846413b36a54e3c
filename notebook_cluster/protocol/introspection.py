"""Questions about what is in the nodes' namespaces: completion, inspection, the table of variables."""

from typing import Literal

from notebook_cluster.protocol.wire import Message

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
