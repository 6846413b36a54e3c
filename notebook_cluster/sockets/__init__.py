"""The two loops on which this package's ZeroMQ sockets are read: whoever owns a socket uses one of them.

- :mod:`.io_thread`: :class:`IOThread`, a thread with a poll loop of its own, for processes whose main thread is the
  user's (a node, a view): the thread owns every socket, and other threads hand it calls
- :mod:`.pump`: :class:`Pump`, one socket on a running asyncio loop, for processes that are a loop from beginning to end
  (agent, coordinator)

The two stay apart: a pump must run between the other callbacks of a loop that also serves processes, timers and files,
while the poll loop must not need asyncio, which a kernel's main thread has for itself, and polls many sockets at once.

May import: nothing of this package. Called by: ``mesh``, ``node`` and ``client`` (IOThread); ``link``, ``pairing``,
``agent`` and ``coordinator`` (Pump).
"""

from notebook_cluster.sockets.io_thread import RECEIVING, SENDING, IOThread
from notebook_cluster.sockets.pump import UNACKNOWLEDGED, Pump, give_up_unacknowledged, keep_alive, plain_context

__all__ = [
    "RECEIVING", "SENDING", "UNACKNOWLEDGED", "IOThread", "Pump", "give_up_unacknowledged", "keep_alive",
    "plain_context",
]  # fmt: skip
