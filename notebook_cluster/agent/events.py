"""What a shared agent tells the person at its machine, as it happens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "code-opened",
    "code-closed",
    "code-dead",
    "attempt",
    "paired",
    "dial",
    "cluster-started",
    "cluster-ended",
    "node-started",
    "node-ended",
    "node-refused",
    "confirm",
    "confirm-over",
    "kept",
    "limit",
    "trust-removed",
    "slept",
    "warning",
]


@dataclass(frozen=True)
class SharingEvent:
    """One thing that happened; ``text`` says all of it in one line, the other fields are for those who want more.

    - ``code-opened``: coordinators may pair with ``code`` on ``port``; ``code-closed``: it was used, or its time is
      over; ``code-dead``: too many wrong tries, a new one must be asked for (:meth:`.service.Agent.new_code`)
    - ``attempt``: somebody tried to pair; ``paired``: with the coordinators of ``owner``
    - ``dial``: a connection to a cluster that this agent makes changed its condition
    - ``cluster-started``, ``cluster-ended``, ``node-started``, ``node-ended``, ``node-refused``: of ``owner``
    - ``confirm``: the person is asked whether ``node`` may start: :meth:`.service.Agent.answer` with ``ticket``, which
      ``confirm-over`` takes back (``text``: why)
    - ``kept``: a checkpoint was kept before kernels end; ``limit``: a limit ended something
    - ``trust-removed``: the kernels of ``owner`` end; ``slept``: this machine was asleep; ``warning``: the rest
    """

    kind: EventKind
    text: str
    owner: str = ""
    """``user@machine``, as paired; this user's own name for clusters of the same user."""
    cluster: str = ""
    node: str = ""
    code: str = ""
    port: int = 0
    ticket: int = 0


Tell = Callable[[SharingEvent], None]
"""Hears what happens, on the agent's loop; must not wait."""
