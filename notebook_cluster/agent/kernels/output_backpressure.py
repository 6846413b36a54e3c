"""Keeps the output that waits for the link small: nodes that print more than the link takes wait in ``print()``.

Only while the coordinator reads. When it is gone nobody may have to wait for it: what is then printed beyond the outbox
is left out, as :mod:`notebook_cluster.link.channel` says.
"""

import asyncio

from notebook_cluster.agent.kernels.control_socket import ControlSocket
from notebook_cluster.link import Session
from notebook_cluster.protocol import encode
from notebook_cluster.protocol.node import HoldOutput

HOLD_BYTES = 16 << 20
"""Unacknowledged; a quarter of what the outbox takes. A held node prints for another moment."""
GO_ON_BYTES = 4 << 20
POLL_S = 0.05
RENEW_S = 2.0
"""A node believes a hold for 10 s: an agent that stands still must not keep it for ever."""


class OutputHolder:
    """For the nodes of one cluster."""

    def __init__(self, session: Session, control: ControlSocket) -> None:
        self._session = session
        self._control = control
        self._held: set[tuple[str, int]] = set()
        self._polls = 0

    def printed(self, node: str, incarnation: int) -> None:
        """A node's text was given to the link."""
        if (node, incarnation) not in self._held and self._session.waiting_bytes > HOLD_BYTES and self._is_read():
            if not self._held:
                self._polls = 0
                asyncio.get_running_loop().call_later(POLL_S, self._poll)
            self._held.add((node, incarnation))
            self._tell(node, incarnation, hold=True)

    def _is_read(self) -> bool:
        return self._session.condition in ("connected", "suspect")

    def _poll(self) -> None:
        self._polls += 1
        over = self._session.waiting_bytes < GO_ON_BYTES or not self._is_read()
        if over or self._polls % round(RENEW_S / POLL_S) == 0:
            for node, incarnation in self._held:
                self._tell(node, incarnation, hold=not over)
        if over:
            self._held.clear()
        else:
            asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _tell(self, node: str, incarnation: int, *, hold: bool) -> None:
        self._control.send(node, incarnation, encode(HoldOutput(hold=hold)))
