"""The socket that views dial, as a coordinator has it; all but a few requests go to the head as they are."""

import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.protocol import encode
from notebook_cluster.protocol.hand_over import AnyHandingOver, HandOver
from notebook_cluster.protocol.views import Closing, LeaveCluster, Reply, Request, RequestError

log = logging.getLogger(__name__)

OWN_VIEW = 1
"""Number of the window's own view of the head."""


class WindowViews(ViewServer):
    """Passes requests on and answers back.

    Args:
        prepare: does what this machine has to do for a request of the types in ``here``, and returns the request that
            the head shall answer in its place; RequestError: the view gets that.
        send: takes (number of a view, one message of the view protocol, or None: it is gone; is it its first word) to
            the head.
        trouble: why nothing can be asked now, or empty.
    """

    def __init__(
        self,
        prepare: Callable[[Any], Awaitable[Any]],
        here: tuple[type, ...],
        send: Callable[[int, bytes | None, bool], None],
        trouble: Callable[[], str],
    ) -> None:
        super().__init__(self._nobody_asks, lambda view, clean: self._has_gone(view))
        self._prepare = prepare
        self._here = here
        self._send = send
        self._trouble = trouble
        self._numbers = itertools.count(OWN_VIEW + 1)
        self._number_of: dict[bytes, int] = {}
        self._view_of: dict[int, View] = {}

    def number_of(self, view: View) -> int:
        """Under which the head knows ``view``."""
        number = self._number_of.get(view.identity)
        if number is None:
            number = self._number_of[view.identity] = next(self._numbers)
            self._view_of[number] = view
        return number

    def known(self) -> list[tuple[View, int]]:
        """The views that the head knows, and under which number."""
        return [(view, number) for number, view in self._view_of.items()]

    def _pass_on(self, view: View, data: bytes) -> None:
        opens = view.identity not in self._number_of
        self._send(self.number_of(view), data, opens)

    def from_head(self, number: int, data: bytes) -> None:
        """What the head says to a view."""
        view = self._view_of.get(number)
        if view is not None:
            self._put([view.identity, data])

    def close_one(self, number: int, reason: str) -> None:
        """The head does not know this view any more, but goes on."""
        view = self._view_of.get(number)
        if view is not None:
            self.send(view, Closing(reason=reason, away=True))
            self._forget(view)
            self.views.pop(view.identity, None)

    def close_all(self, reason: str, *, away: bool) -> None:
        """The head cannot be reached any more (``away``), or is no more."""
        for view in list(self.views.values()):
            self.send(view, Closing(reason=reason, away=away))
            self._forget(view)
        self.views.clear()

    def _take(self, view: View, request: Request, data: bytes) -> None:
        if isinstance(request.body, AnyHandingOver) and not isinstance(request.body, HandOver):
            self.refuse(view, request, "only the window itself says that")
            return
        if isinstance(request.body, (HandOver, *self._here)) or self._trouble():
            super()._take(view, request, data)
            return
        self._pass_on(view, data)
        if isinstance(request.body, LeaveCluster):
            super()._take(view, request, data)

    async def _answer(self, view: View, request: Request) -> None:
        if isinstance(request.body, LeaveCluster):
            await super()._answer(view, request)
            return
        try:
            if trouble := self._trouble():
                raise RequestError(trouble)
            body = await self._prepare(request.body)
        except RequestError as error:
            self._put([view.identity, encode(Reply(id=request.id, error=str(error)))])
        except Exception as error:
            log.exception("request %s failed", type(request.body).__name__)
            self._put([view.identity, encode(Reply(id=request.id, error=f"{type(error).__name__}: {error}"))])
        else:
            self._pass_on(view, encode(Request(id=request.id, body=body)))

    @staticmethod
    async def _nobody_asks(view: View, body: Any) -> Any:
        raise RequestError(f"a window does not answer {type(body).__name__}")

    def _has_gone(self, view: View) -> None:
        number = self._forget(view)
        if number is not None:
            self._send(number, None, False)

    def _forget(self, view: View) -> int | None:
        number = self._number_of.pop(view.identity, None)
        if number is not None:
            del self._view_of[number]
        return number
