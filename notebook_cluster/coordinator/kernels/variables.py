"""The table of variables: every idle node is asked at once; of the others the last answer is given again."""

import asyncio
import fnmatch
import itertools
import re
import time
from typing import TYPE_CHECKING

import msgspec

from notebook_cluster.journal.state import Node
from notebook_cluster.protocol.introspection import (
    MOST_VARIABLES,
    FetchVariables,
    ListVariables,
    NodeVariables,
    Variable,
    Variables,
)
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security.sanitise import safe_name

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

ANSWER_S = 2.0
"""Seconds that a node has; one that takes longer is shown with its last answer."""
_MOST_PATTERN = 200
_MOST_TEXT = 120
_MOST_PENDING = 64
"""Questions of which a late answer is still kept."""
_HASH = re.compile(r"~?[0-9a-f]{1,32}")


class _Answer(msgspec.Struct):
    request: ListVariables
    message: Variables
    time: float


class VariableTable:
    """Asks nodes for their variables and keeps what each of them said last."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._tickets = itertools.count(1)
        self._asked: dict[int, tuple[str, int, ListVariables]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._answers: dict[tuple[str, int], list[_Answer]] = {}

    async def columns(self, request: ListVariables) -> list[NodeVariables]:
        """A column for each node of the cluster, in rank order. RequestError: the pattern is none."""
        if len(request.pattern) > _MOST_PATTERN:
            raise RequestError(f"a pattern of {len(request.pattern)} characters is too long (at most {_MOST_PATTERN})")
        nodes = sorted(self._hub.state.nodes.values(), key=lambda node: node.order)
        self._forget({(node.name, node.incarnation) for node in nodes})
        running = self._hub.state.running()
        busy = {name for name, status in running.nodes.items() if status == "running"} if running is not None else set()
        busy |= set(self._hub.replay.names())
        there = {node.name for node in nodes if node.is_in and self._is_connected(node)}
        asked = {node.name: self._ask(node, request) for node in nodes if node.name in there and node.name not in busy}
        if asked:
            await asyncio.wait(asked.values(), timeout=ANSWER_S)
        columns = []
        for node in nodes:
            if node.name in asked:
                status = "ok" if asked[node.name].done() else "silent"
            else:
                status = "busy" if node.name in there else "lost"
            columns.append(self._column(node, status, request))
        return columns

    def on_answer(self, node: str, incarnation: int, message: Variables) -> None:
        """A node has answered, perhaps so late that only the next table shows it."""
        asked = self._asked.pop(message.ticket, None)
        if asked is None or asked[:2] != (node, incarnation):
            return
        kept = Variables(
            ticket=message.ticket,
            variables=[checked(row) for row in message.variables[:MOST_VARIABLES]],
            left_out=max(message.left_out, 0),
        )
        answers = self._answers.setdefault((node, incarnation), [])
        # One for each way of asking; the newest last.
        answers[:] = [answer for answer in answers if answer.request != asked[2]][-3:]
        answers.append(_Answer(asked[2], kept, time.monotonic()))
        future = self._waiting.pop(message.ticket, None)
        if future is not None and not future.done():
            future.set_result(None)

    def _ask(self, node: Node, request: ListVariables) -> "asyncio.Future[None]":
        ticket = next(self._tickets)
        self._asked[ticket] = (node.name, node.incarnation, request)
        while len(self._asked) > max(_MOST_PENDING, len(self._hub.state.nodes)):
            oldest = next(iter(self._asked))
            del self._asked[oldest]
            self._waiting.pop(oldest, None)
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        message = FetchVariables(ticket=ticket, pattern=request.pattern, everything=request.everything)
        self._hub.members.send(node.name, message)
        return future

    def _column(self, node: Node, status: str, request: ListVariables) -> NodeVariables:
        answer, rows = self._last(node, request)
        return NodeVariables(
            node=node.name,
            rank=self._hub.state.rank(node.name),
            status=status,  # type: ignore[arg-type]
            variables=rows,
            left_out=answer.message.left_out if answer is not None else 0,
            asked=time.monotonic() - answer.time if answer is not None else None,
        )

    def _last(self, node: Node, request: ListVariables) -> tuple[_Answer | None, list[Variable]]:
        """What the node said last to this question, or to one that was wider."""
        answers = self._answers.get((node.name, node.incarnation), [])
        fitting = [a for a in answers if a.request.everything == request.everything]
        fitting = [a for a in fitting if a.request.pattern in ("", request.pattern)]
        if not fitting:
            return None, []
        rows = fitting[-1].message.variables
        if request.pattern:
            rows = [row for row in rows if fnmatch.fnmatchcase(row.name, request.pattern)]
        return fitting[-1], rows

    def _is_connected(self, node: Node) -> bool:
        link = self._hub.peers.links.get(node.peer)
        return link is not None and link.condition == "connected"

    def _forget(self, there: set[tuple[str, int]]) -> None:
        for gone in [key for key in self._answers if key not in there]:
            del self._answers[gone]


def checked(row: Variable) -> Variable:
    """``row`` with short, printable text; a hash that is none is left out."""
    return Variable(
        name=safe_name(row.name, _MOST_TEXT),
        kind=safe_name(row.kind, _MOST_TEXT),
        shape=safe_name(row.shape, _MOST_TEXT),
        device=safe_name(row.device, _MOST_TEXT),
        bytes=row.bytes if row.bytes is not None and row.bytes >= 0 else None,
        hash=row.hash if _HASH.fullmatch(row.hash) else "",
        value=safe_name(row.value, _MOST_TEXT),
    )
