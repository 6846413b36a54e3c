"""A cluster whose coordinator moves to another machine while it runs: what views ask for, and what the owner's process
says to the coordinator that leads and to the one that shall.

The one that leads stops (``Freeze``), what it has written is copied, then it says in its journal that it leads no more
(``Leave``) and ends; the other one hears which views there are (``TakeView``) and begins (``GoOn``), in a higher
epoch. Until ``Leave`` nothing has happened; after it the one before never leads again.
"""

from typing import Literal

import msgspec

from notebook_cluster.protocol.interaction import InputRequested
from notebook_cluster.protocol.wire import Message

HERE = "local"
"""The owner's machine, as a place to lead from."""
FROZEN_S = 6.0
"""Seconds without another Freeze after which a coordinator that waits for Leave ends, to be started again as it was."""
ViewKind = Literal["magics", "panel", "cli", "server", "client"]


class HandOver(Message, frozen=True):
    """View: lead the cluster from ``to`` from now on, a peer (a name or HOST:PORT; ``code`` pairs with it) or
    ``local``. Reply, when it is led from there: the peer's name, or empty. ``survive``: only when the owner's machine
    is about to sleep, each time (``local``: no more); the reply says from where it is led now."""

    to: str
    code: str = ""
    survive: bool = False


class KeptView(Message, frozen=True):
    """What a coordinator knows of a view that it has not told it. ``answers``: cells whose ``input()`` it answers;
    ``asked``: questions that were put to it."""

    kind: ViewKind = "client"
    live: bool = False
    watching: list[int] = []
    background: list[int] = []
    answers: list[int] = []
    asked: list[int] = []
    widgets: bool = False


class DescribeView(Message, frozen=True):
    """In the place of a view, to a coordinator that is frozen: everything that was for that view was sent before the
    reply. Reply value: KeptView."""


class TakeView(Message, frozen=True):
    """In the place of a view, to a coordinator that has not begun: this view was there already."""

    view: KeptView


class Freeze(Message, frozen=True):
    """Do nothing more, write everything down, make the file that the next one begins from; ``epoch``: of the one that
    is meant; ``room``: bytes that are free for the file. Reply, when that is done: None, or an error, after which all
    is as before. To be said again every few seconds."""

    token: str
    epoch: int
    room: int = 0


class Leave(Message, frozen=True):
    """The cluster is led from ``to`` (for people) from now on. Reply, when that is in the journal: None; the process
    ends after it."""

    to: str
    token: str


class GoOn(Message, frozen=True):
    """All views have come: go on with the cluster. Reply, when it does: None."""


AnyHandingOver = HandOver | DescribeView | TakeView | Freeze | Leave | GoOn


class OpenQuestion(msgspec.Struct):
    """``input()`` that waits for a line: ``incarnation`` is of the node's process."""

    event: InputRequested
    incarnation: int


class Timeout(msgspec.Struct):
    """Of a cell with ``--timeout``, in seconds: as it was said, and what is left of it."""

    seconds: float
    left: float


class OpenWidget(msgspec.Struct):
    """A widget of a node's process as views have it: ``public`` is its id for them, ``state`` msgpack. ``refusal``: why
    a label stands in its place; ``catches``: the message whose output goes into it."""

    node: str
    incarnation: int
    comm_id: str
    public: str
    state: bytes
    refusal: str = ""
    catches: str = ""


class Moved(msgspec.Struct):
    """What a coordinator knows that is in no journal, and that the next one goes on with. Cells are named by number.
    ``addresses``: HOST:PORT of peers by key, as the next one's machine reaches them."""

    token: str = ""
    questions: list[OpenQuestion] = []
    may_ask: list[int] = []
    with_widgets: list[int] = []
    interrupted: list[int] = []
    timeouts: dict[int, Timeout] = {}
    reasons: dict[int, str] = {}
    next_question: int = 1
    open_widgets: list[OpenWidget] = []
    addresses: dict[str, str] = {}
    same_machine: bool = False
    """The hand over has failed."""
