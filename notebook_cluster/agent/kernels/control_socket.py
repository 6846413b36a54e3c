"""The ipc socket to which the runtimes of one cluster's kernels dial: passes their messages on, unread. Over it nodes
that print more than the link takes are told to wait in ``print()``, and nodes whose kernels are about to end without
being asked to by their coordinator to keep a checkpoint.

Each message is one frame, the encoded struct of :mod:`notebook_cluster.protocol.node`. A runtime's routing id is
``<node>/<incarnation>``; frames with another id are counted and dropped. The socket lies in the agent's 0700 folder,
so only this user's processes reach it.

Nodes wait in ``print()`` only while the coordinator reads. When it is gone nobody may have to wait for it: what is then
printed beyond the outbox is left out, as :mod:`notebook_cluster.link.channel` says.
"""

import asyncio
import glob
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import zmq

from notebook_cluster.link import Session
from notebook_cluster.protocol.node import HoldOutput, KeepCheckpoint, Kept
from notebook_cluster.protocol.peer import KeptCheckpoint, KeptCheckpoints
from notebook_cluster.protocol.wire import MAX_MESSAGE_BYTES, ProtocolError, decode, encode
from notebook_cluster.sockets import Pump

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 16 * 1024 * 1024
"""For a runtime that has not dialled yet; a node that never does must not fill the agent's memory."""


def routing_id(node: str, incarnation: int) -> bytes:
    """How a runtime is addressed on the control socket."""
    return f"{node}/{incarnation}".encode()


class ControlSocket:
    """One ROUTER for all nodes of one cluster on this peer.

    Args:
        context: the agent's context for its kernels.
        path: where to bind (an ipc path of at most 100 bytes).
        on_body: called with (node, incarnation, encoded message) on the loop, in order for each node.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, on_body: Callable[[str, int, bytes], None]):
        self.endpoint = f"ipc://{path}"
        self.dropped = 0
        self._path = path
        self._on_body = on_body
        self._expected: dict[bytes, tuple[str, int]] = {}
        self._held: dict[bytes, list[bytes]] = {}
        self._held_bytes: dict[bytes, int] = {}
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.sndhwm = 0
        socket.rcvhwm = 0
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.bind(self.endpoint)
        self._pump = Pump(socket, self._receive)

    def expect(self, node: str, incarnation: int) -> None:
        """A kernel starts: accept its runtime, and hold what is sent to it until it dials."""
        identity = routing_id(node, incarnation)
        self._expected[identity] = (node, incarnation)
        self._held[identity] = []
        self._held_bytes[identity] = 0

    def forget(self, node: str, incarnation: int) -> None:
        """The kernel is gone."""
        identity = routing_id(node, incarnation)
        self._expected.pop(identity, None)
        self._held.pop(identity, None)
        self._held_bytes.pop(identity, None)

    def has_dialled(self, node: str, incarnation: int) -> bool:
        """Whether the kernel's runtime is there."""
        identity = routing_id(node, incarnation)
        return identity in self._expected and identity not in self._held

    def send(self, node: str, incarnation: int, body: bytes) -> None:
        """Deliver ``body`` in order, after the runtime has dialled. For a kernel that is gone: dropped and counted."""
        identity = routing_id(node, incarnation)
        if identity not in self._expected:
            self.dropped += 1
            return
        held = self._held.get(identity)
        if held is None:
            self._pump.send([identity, body])
        elif self._held_bytes[identity] + len(body) <= MAX_HELD_BYTES:
            held.append(body)
            self._held_bytes[identity] += len(body)
        else:
            self.dropped += 1
            log.warning(
                "a message for %s/%d was dropped: it has not dialled and %d MB wait",
                node,
                incarnation,
                MAX_HELD_BYTES >> 20,
            )

    def close(self) -> None:
        """Unbind and remove the socket's file."""
        self._pump.close()
        self._path.unlink(missing_ok=True)

    def _receive(self, frames: list[bytes]) -> None:
        expected = self._expected.get(frames[0]) if len(frames) == 2 else None
        if expected is None:
            self.dropped += 1
            return
        held = self._held.pop(frames[0], None)
        if held is not None:
            # Its first frame proves that the runtime is there and reads.
            for body in held:
                self._pump.send([frames[0], body])
        self._on_body(*expected, frames[1])


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


KEEP_S = 20.0
"""For a node to write its checkpoint."""
_MAX_FOLDERS = 100
_MAX_TEXT = 500
_TOLD_S = 30 * 86400.0
"""For how long coordinators are told what is kept here. It is not deleted then."""
_MOST_TOLD = 16


def kept_checkpoints(work: Path, cluster: str = "*") -> list[KeptCheckpoint]:
    """What nodes have kept in the folders of clusters below ``work``, newest first; of each name the newest.

    ``cluster``: a pattern for the name of such a folder.
    """
    if next(work.glob(f"{cluster}/checkpoints/*-kept"), None) is None:
        return []
    # The whole package first: another thread may import it now, and each would wait for a part of the other's.
    import notebook_cluster.checkpoints  # noqa: F401 - numpy comes with it
    from notebook_cluster.checkpoints.reading import kept_below

    try:
        found = kept_below(work, cluster)
    except OSError as error:
        log.warning("cannot look what is kept below %s: %s", work, error)
        return []
    return [
        KeptCheckpoint(
            name=kept.folder.parent.name,
            job=kept.manifest.job[:_MAX_TEXT],
            round=kept.manifest.round,
            time=kept.manifest.saved_at,
            folder=str(kept.folder)[:_MAX_TEXT],
        )
        for kept in found[:_MOST_TOLD]
        if time.time() - kept.manifest.saved_at < _TOLD_S
    ]


class CheckpointKeeper:
    """Asks the runtimes of one cluster's kernels; ``control`` is their socket."""

    def __init__(self, control: ControlSocket) -> None:
        self._control = control
        self._waiting: dict[tuple[str, int], asyncio.Future[Kept]] = {}

    async def keep(self, nodes: Iterable[tuple[str, int]], reason: str, jobs: Sequence[str] = ()) -> dict[str, Kept]:
        """Let every one of ``nodes`` (name, incarnation) save its training; node -> what it says, or why it does not.
        ``jobs``: only these.

        Takes at most :data:`KEEP_S` seconds. Kernels without a runtime have no training and are left out.
        """
        body = encode(KeepCheckpoint(reason=reason, jobs=list(jobs)))
        asked = [node for node in nodes if node not in self._waiting and self._control.has_dialled(*node)]
        for node in asked:
            self._waiting[node] = asyncio.get_running_loop().create_future()
            self._control.send(*node, body)
        answers = await asyncio.gather(*(self._answer(node) for node in asked))
        return {name: answer for (name, _), answer in zip(asked, answers, strict=True)}

    def take(self, node: str, incarnation: int, body: bytes) -> bool:
        """Whether ``body``, from a runtime, was the answer that is waited for. Other messages are not read."""
        answer = self._waiting.get((node, incarnation))
        if answer is None or answer.done():
            return False
        try:
            kept: Kept = decode(body, Kept)
        except ProtocolError:
            return False
        folders = [folder[:_MAX_TEXT] for folder in kept.folders[:_MAX_FOLDERS]]
        answer.set_result(Kept(folders=folders, error=kept.error[:_MAX_TEXT]))
        return True

    def gone(self, node: str, incarnation: int) -> None:
        """The kernel is gone."""
        answer = self._waiting.get((node, incarnation))
        if answer is not None and not answer.done():
            answer.set_result(Kept(folders=[], error="its kernel ended"))

    async def _answer(self, node: tuple[str, int]) -> Kept:
        try:
            return await asyncio.wait_for(self._waiting[node], KEEP_S)
        except TimeoutError:
            return Kept(folders=[], error=f"it did not answer within {KEEP_S:.0f} s")
        finally:
            del self._waiting[node]


class KeptNews:
    """Tells the coordinator of ``session``, which may go on with it, what was kept here; ``work``: the folders of all
    clusters, also of those that are no more."""

    def __init__(self, session: Session, work: Path) -> None:
        self._session = session
        self._work = work
        self._told: set[Path] = set()

    async def tell(self, folder: Path | None = None) -> None:
        """Of all clusters; or once what lies in ``folder``, in which its owner has nodes work."""
        if folder is None:
            rows = await asyncio.to_thread(kept_checkpoints, self._work)
        elif folder not in self._told:
            self._told.add(folder)
            rows = await asyncio.to_thread(kept_checkpoints, folder.parent, glob.escape(folder.name))
        else:
            return
        if rows:
            self._session.send(KeptCheckpoints(checkpoints=rows))
