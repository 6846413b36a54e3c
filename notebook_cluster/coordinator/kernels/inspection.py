"""What lives on a node, for somebody who types: completion and inspection, asked of one node that can answer."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from notebook_cluster.coordinator import jupyter
from notebook_cluster.journal.state import Node
from notebook_cluster.protocol.introspection import (
    MOST_INSPECTION,
    MOST_SUGGESTIONS,
    Complete,
    Completions,
    Inspect,
    Inspection,
    Suggestion,
)
from notebook_cluster.protocol.peer import ToKernel
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security.sanitise import safe_name, safe_text

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

ANSWER_S = 0.45
"""Seconds that a node has: somebody is typing."""
SLOW_S = 10.0
"""Seconds in which a node that did not answer is asked only when there is no other."""
MOST_TEXT = 300
"""Characters of one suggestion."""
REPLIES = frozenset(("complete_reply", "inspect_reply"))


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
    """Asks kernels on their subshells, so that one that runs a cell answers too."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
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
        message = ToKernel(node=node.name, incarnation=node.incarnation, channel="shell", subshell=True)
        try:
            parts = jupyter.message(kind, identity, self._hub.state.cluster_id, body)
            self._hub.peers.send(node.peer, message, parts)
            content = await asyncio.wait_for(future, ANSWER_S)
        except TimeoutError:
            self._slow[node.name] = time.monotonic()
            raise RequestError(f"node {node.name!r} did not answer within {ANSWER_S:g} s") from None
        finally:
            del self._waiting[node.name, identity]
        return node.name, content

    def _choose(self, targets: Sequence[str]) -> Node:
        """The node that can answer best: one that was not slow just now, then an idle one, then the lowest rank."""
        running = self._hub.state.running()
        busy = {name for name, status in running.nodes.items() if status == "running"} if running is not None else set()
        links, now = self._hub.peers.links, time.monotonic()
        there = [
            node
            for node in self._hub.state.roster_nodes()
            if (not targets or node.name in targets)
            and (link := links.get(node.peer)) is not None
            and link.condition == "connected"
        ]
        if not there:
            raise RequestError("none of the nodes can be reached now")
        return min(there, key=lambda node: (now - self._slow.get(node.name, -SLOW_S) < SLOW_S, node.name in busy))


def _convert(content: dict[str, Any], kind: type[_CompleteReply]) -> _CompleteReply:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"the node's answer is not readable: {error}") from None
