"""What lives on nodes, for somebody who types or looks: completion and inspection of one node, the variables of all."""

import asyncio
import fnmatch
import itertools
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery, kernel_message
from notebook_cluster.journal.state import Node
from notebook_cluster.protocol.interaction import (
    MOST_INSPECTION,
    MOST_SUGGESTIONS,
    MOST_VARIABLES,
    Complete,
    Completions,
    FetchVariables,
    Inspect,
    Inspection,
    ListVariables,
    NodeVariables,
    Suggestion,
    Variable,
    Variables,
)
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security.sanitise import safe_name, safe_text

ANSWER_S = 0.45
"""Seconds that a node has: somebody is typing."""
SLOW_S = 10.0
"""Seconds in which a node that did not answer is asked only when there is no other."""
MOST_TEXT = 300
"""Characters of one suggestion."""
VARIABLES_S = 2.0
"""Seconds that a node has to tell its variables; one that takes longer is shown with its last answer."""
_MOST_PATTERN = 200
_MOST_VARIABLE_TEXT = 120
_MOST_PENDING = 64
"""Questions of which a late answer is still kept."""
_HASH = re.compile(r"~?[0-9a-f]{1,32}")


class _Type(msgspec.Struct):
    text: str = ""
    type: str | None = ""


class _Metadata(msgspec.Struct):
    types: list[_Type] = msgspec.field(name="_jupyter_types_experimental", default_factory=list)


class _CompleteReply(msgspec.Struct):
    """The fields of a complete_reply that are used; their types are checked while decoding."""

    matches: list[str] = []
    cursor_start: int = 0
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class Inspections:
    """Asks one kernel that can answer, on its subshell, so that one that runs a cell answers too."""

    def __init__(self, core: Core, delivery: Delivery) -> None:
        self._core = core
        self._delivery = delivery
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[str, str], asyncio.Future[dict[str, Any]]] = {}
        self._slow: dict[str, float] = {}

    async def complete(self, request: Complete) -> Completions:
        """Suggestions of one node. RequestError: none can answer, or none did."""
        body = {"code": request.code, "cursor_pos": request.cursor}
        node, content = await self._ask("complete_request", body, request.targets)
        reply = _convert(content, _CompleteReply)
        kinds = {entry.text: entry.type or "" for entry in reply.metadata.types[: 2 * MOST_SUGGESTIONS]}
        start = min(max(reply.cursor_start, 0), request.cursor)
        matches = reply.matches[:MOST_SUGGESTIONS]
        # ``.weight`` from the dot on, as IPython says it without Jedi: ``weight`` after the dot reads better in a list.
        dot = int(request.code[start : start + 1] == "." and all(text.startswith(".") for text in matches))
        suggestions = [
            Suggestion(text=safe_name(text[dot:], MOST_TEXT), kind=safe_name(kinds.get(text, "").strip("<>"), 40))
            for text in matches
        ]
        return Completions(node=node, start=start + dot, suggestions=[found for found in suggestions if found.text])

    async def inspect(self, request: Inspect) -> Inspection:
        """What one node knows about the name at the cursor. RequestError as :meth:`complete`."""
        body = {"code": request.code, "cursor_pos": request.cursor, "detail_level": 1 if request.detail else 0}
        node, content = await self._ask("inspect_request", body, request.targets)
        data = content.get("data")
        text = data.get("text/plain") if isinstance(data, dict) else None
        if content.get("found") is not True or not isinstance(text, str):
            return Inspection(node=node, found=False)
        if len(text) > MOST_INSPECTION:
            text = f"{text[:MOST_INSPECTION]}\n... {len(text) - MOST_INSPECTION} characters left out ..."
        return Inspection(node=node, found=True, text=safe_text(text))

    def on_reply(self, node: str, parent: str, content: dict[str, Any]) -> None:
        """A node has answered; nobody waits for one that is too late, but it can be asked again."""
        self._slow.pop(node, None)
        future = self._waiting.get((node, parent))
        if future is not None and not future.done():
            future.set_result(content)

    async def _ask(self, kind: str, body: dict[str, Any], targets: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """(the node that was asked, the content of its reply)."""
        node = self._choose(targets)
        identity = f"ask-{self._prefix}-{next(self._numbers)}"
        future = self._waiting[node.name, identity] = asyncio.get_running_loop().create_future()
        try:
            parts = kernel_message(kind, identity, self._core.state.cluster_id, body)
            self._delivery.to_kernel(node.name, "shell", parts, subshell=True)
            content = await asyncio.wait_for(future, ANSWER_S)
        except TimeoutError:
            self._slow[node.name] = time.monotonic()
            raise RequestError(f"node {node.name!r} did not answer within {ANSWER_S:g} s") from None
        finally:
            del self._waiting[node.name, identity]
        return node.name, content

    def _choose(self, targets: Sequence[str]) -> Node:
        """The node that can answer best: one that was not slow just now, then an idle one, then the lowest rank."""
        running = self._core.state.running()
        busy = {name for name, status in running.nodes.items() if status == "running"} if running is not None else set()
        now = time.monotonic()
        there = [
            node
            for node in self._core.state.roster_nodes()
            if (not targets or node.name in targets) and self._delivery.is_connected(node.peer)
        ]
        if not there:
            raise RequestError("none of the nodes can be reached now")
        return min(there, key=lambda node: (now - self._slow.get(node.name, -SLOW_S) < SLOW_S, node.name in busy))


def _convert(content: dict[str, Any], kind: type[_CompleteReply]) -> _CompleteReply:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"the node's answer is not readable: {error}") from None


class _Answer(msgspec.Struct):
    request: ListVariables
    message: Variables
    time: float


class VariableTable:
    """The variables of all nodes: every idle one is asked at once; of the others the last answer is given again."""

    def __init__(self, core: Core, delivery: Delivery, *, replaying: Callable[[], list[str]]) -> None:
        """``replaying()``: the nodes that replay earlier cells, and so do not answer."""
        self._core = core
        self._delivery = delivery
        self._replaying = replaying
        self._tickets = itertools.count(1)
        self._asked: dict[int, tuple[str, int, ListVariables]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._answers: dict[tuple[str, int], list[_Answer]] = {}

    async def columns(self, request: ListVariables) -> list[NodeVariables]:
        """A column for each node of the cluster, in rank order. RequestError: the pattern is none."""
        if len(request.pattern) > _MOST_PATTERN:
            raise RequestError(f"a pattern of {len(request.pattern)} characters is too long (at most {_MOST_PATTERN})")
        nodes = sorted(self._core.state.nodes.values(), key=lambda node: node.order)
        self._forget({(node.name, node.incarnation) for node in nodes})
        running = self._core.state.running()
        busy = {name for name, status in running.nodes.items() if status == "running"} if running is not None else set()
        busy |= set(self._replaying())
        there = {node.name for node in nodes if node.is_in and self._delivery.is_connected(node.peer)}
        asked = {node.name: self._ask(node, request) for node in nodes if node.name in there and node.name not in busy}
        if asked:
            await asyncio.wait(asked.values(), timeout=VARIABLES_S)
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
        while len(self._asked) > max(_MOST_PENDING, len(self._core.state.nodes)):
            oldest = next(iter(self._asked))
            del self._asked[oldest]
            self._waiting.pop(oldest, None)
        future = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        message = FetchVariables(ticket=ticket, pattern=request.pattern, everything=request.everything)
        self._delivery.to_node(node.name, message)
        return future

    def _column(self, node: Node, status: str, request: ListVariables) -> NodeVariables:
        answer, rows = self._last(node, request)
        return NodeVariables(
            node=node.name,
            rank=self._core.state.rank(node.name),
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

    def _forget(self, there: set[tuple[str, int]]) -> None:
        for gone in [key for key in self._answers if key not in there]:
            del self._answers[gone]


def checked(row: Variable) -> Variable:
    """``row`` with short, printable text; a hash that is none is left out."""
    return Variable(
        name=safe_name(row.name, _MOST_VARIABLE_TEXT),
        kind=safe_name(row.kind, _MOST_VARIABLE_TEXT),
        shape=safe_name(row.shape, _MOST_VARIABLE_TEXT),
        device=safe_name(row.device, _MOST_VARIABLE_TEXT),
        bytes=row.bytes if row.bytes is not None and row.bytes >= 0 else None,
        hash=row.hash if _HASH.fullmatch(row.hash) else "",
        value=safe_name(row.value, _MOST_VARIABLE_TEXT),
    )
