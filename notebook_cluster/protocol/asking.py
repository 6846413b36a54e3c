"""``input()`` and ``getpass()`` on a node, asked where somebody can answer."""

from notebook_cluster.protocol.wire import Message


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
