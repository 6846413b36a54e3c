"""Values, files and logs between views and nodes: each request is passed on, its answer handed back.

Nothing is kept here but the questions that are open: the view asks for the next piece when it has an answer, which
bounds what is on its way. A link that breaks delays the answer; it is given up when it can never come.
"""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.journal.state import Node
from notebook_cluster.protocol import transfers as t
from notebook_cluster.protocol.peer import LogLines, ReadLog
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import Message

LOOK_EVERY = 0.5
"""Seconds between two looks whether an answer can still come."""
ANSWER_S = 600.0
"""For an answer while the link stands: an agent may have to hash what lies there already."""
LOG_S = 10.0
"""For the lines of a log."""
_MOST_TEXT = 500


class Transfers:
    """The questions that are open."""

    def __init__(self, core: Core, delivery: Delivery) -> None:
        self._core = core
        self._delivery = delivery
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[object, asyncio.Future[Any]]] = {}
        """Request -> (who may answer it, the answer)."""
        self._waiting_logs: dict[str, list[asyncio.Future[list[str]]]] = {}

    async def handle(self, body: t.AnyTransfer) -> Any:
        """The answer to a view's request.

        Raises:
            RequestError: there is no such node, it is gone, or it cannot do that; one line.
        """
        match body:
            case t.ReadValue():
                return await self._read(body)
            case t.WriteValue():
                reasons = await asyncio.gather(*(self._write(node, body) for node in body.nodes))
                return dict(zip(body.nodes, reasons, strict=True))
            case t.ForgetValue():
                for name in body.nodes:
                    self._delivery.to_node(name, t.ForgetTicket(ticket=body.ticket))
                return None
            case _:
                return await self._ask_agent(body)

    def on_node(self, node: Node, answer: t.ValuePart | t.PartWritten) -> None:
        """``node``, as it is known from its link, answers."""
        self._answered(answer.request, (node.name, node.incarnation), answer)

    def on_agent(self, peer: str, answer: t.FilesAnswer) -> None:
        """The agent of ``peer`` answers."""
        self._answered(answer.request, peer, answer)

    def _answered(self, request: int, who: object, answer: Message) -> None:
        expected, future = self._open.get(request, (None, None))
        if future is not None and who == expected and not future.done():
            future.set_result(answer)

    # ---- values ------------------------------------------------------------------------------------------------

    async def _read(self, body: t.ReadValue) -> t.ValuePart:
        node = self._there(body.node)
        part = t.ReadPart(request=0, ticket=body.ticket, name=body.name, offset=body.offset, size=body.size)
        answer: t.ValuePart = await self._ask_node(node, part)
        if len(answer.data) > body.size:
            raise RequestError(f"{node.name} sent {len(answer.data)} bytes where {body.size} were asked for")
        return answer

    async def _write(self, name: str, body: t.WriteValue) -> str:
        """Why the node does not take the bytes; empty when it does."""
        part = t.WritePart(request=0, ticket=body.ticket, total=body.total, offset=body.offset, data=body.data)
        try:
            answer: t.PartWritten = await self._ask_node(self._there(name), part)
        except RequestError as error:
            return str(error)
        return _line(answer.error)

    async def _ask_node(self, node: Node, message: t.ReadPart | t.WritePart) -> Any:
        return await self._ask(
            (node.name, node.incarnation),
            lambda request: self._delivery.to_node(node.name, replace(message, request=request)),
            lambda: self._gone(node),
            node.name,
        )

    def _there(self, name: str) -> Node:
        """The node when its runtime can be asked, now or when its link is back."""
        node = self._core.known_node(name)
        if not node.is_in and node.condition != "lost":
            raise RequestError(f"node {name!r} is {node.condition}: %cluster restart {name}")
        return node

    def _gone(self, node: Node) -> str:
        """Why this incarnation of ``node`` will never answer; empty when it may."""
        now = self._core.state.nodes.get(node.name)
        if now is None:
            return f"node {node.name!r} was removed"
        if now.incarnation != node.incarnation:
            return f"node {node.name!r} was restarted"
        return f"node {node.name!r} is dead ({now.reason})" if now.condition == "dead" else ""

    # ---- files -------------------------------------------------------------------------------------------------

    async def _ask_agent(self, body: t.FilesBody) -> t.FilesAnswer:
        node = self._core.known_node(body.node)
        buffers = []
        if isinstance(body, t.WriteFile):
            body, buffers = replace(body, data=b""), [body.data]
        if node.peer not in self._delivery.links:
            raise RequestError(f"peer {node.peer!r} of node {node.name!r} is not used any more")
        answer: t.FilesAnswer = await self._ask(
            node.peer,
            lambda request: self._delivery.to_agent(node.peer, t.FilesRequest(request=request, body=body), buffers),
            lambda: "" if self._is_served(node.peer) else f"peer {node.peer!r} of node {node.name!r} is gone",
            node.peer,
        )
        if answer.error:
            raise RequestError(f"{node.name}: {_line(answer.error)}")
        if len(answer.data) > t.CHUNK_BYTES or len(answer.files) > t.MOST_FILES:
            raise RequestError(f"{node.name} sent more than it was asked for")
        return answer

    def _is_served(self, peer: str) -> bool:
        link = self._delivery.links.get(peer)
        return link is not None and link.condition != "refused" and not link.released.is_set()

    # ---- logs --------------------------------------------------------------------------------------------------

    async def read_log(self, name: str, lines: int) -> list[str]:
        """The last lines that a node's kernel wrote to its terminal.

        Raises:
            RequestError: there is no such node, or its peer does not answer.
        """
        node = self._core.known_node(name)
        future: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._waiting_logs.setdefault(name, []).append(future)
        self._delivery.to_agent(node.peer, ReadLog(node=name, lines=lines))
        try:
            return await asyncio.wait_for(future, LOG_S)
        except TimeoutError:
            raise RequestError(f"peer {node.peer!r} did not send the log of {name!r}: is it lost?") from None

    def on_log_lines(self, message: LogLines) -> None:
        """An agent has read the log of a node's kernel."""
        for future in self._waiting_logs.pop(message.node, []):
            if not future.done():
                future.set_result(message.lines)

    # ---- waiting -----------------------------------------------------------------------------------------------

    async def _ask(self, who: object, send: Callable[[int], None], gone: Callable[[], str], name: str) -> Any:
        """The answer of ``who`` to what ``send(number)`` sends. RequestError when it cannot come any more."""
        request = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[request] = (who, future)
        end = asyncio.get_running_loop().time() + ANSWER_S
        try:
            send(request)
            while not future.done():
                await asyncio.wait([future], timeout=LOOK_EVERY)
                if not future.done() and (reason := gone()):
                    raise RequestError(reason)
                if not future.done() and asyncio.get_running_loop().time() > end:
                    raise RequestError(f"{name} did not answer within {ANSWER_S / 60:.0f} minutes: %cluster doctor")
            return future.result()
        finally:
            del self._open[request]


def _line(text: str) -> str:
    """Text of a peer for people: one line, not too long."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_TEXT])
