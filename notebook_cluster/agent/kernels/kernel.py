"""One node on this peer from StartNode to NodeEnded: the kernel's process, its relay, and what waits for them."""

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import zmq

from notebook_cluster.agent.kernels.programs import Programs
from notebook_cluster.agent.kernels.relay import KernelRelay
from notebook_cluster.agent.kernels.supervisor import KernelOptions, KernelProcess
from notebook_cluster.agent.machine import KernelSampler
from notebook_cluster.link import Session
from notebook_cluster.mesh.shared_memory import forget_left_over
from notebook_cluster.protocol.cell_mark import CellMark
from notebook_cluster.protocol.peer import FromKernel, KernelChannel, NodeEnded, NodeStarted

log = logging.getLogger(__name__)

LOG_TAIL_LINES = 20
MAX_EARLY_BYTES = 256 << 20
"""That wait for a kernel which is not up yet; as much as one message of the link may have."""
_DROPPABLE = ("stream", "comm_msg")
"""What a full link may leave out: of a widget the next change says the newest value again."""
_DRAIN_S = 0.05
"""Between the end of the process and the last look at its sockets: its last words may still be on their way."""
_OUTLIVED_S = 10.0
"""After which processes that a killed kernel has left are looked at once more."""


class Kernel:
    """A node of one cluster.

    Attributes:
        node, incarnation, device: as in NodeStarted.
        gone: set when the process is gone and its sockets are closed.
        over: set by the owner when nothing of the node is left: NodeEnded or NodeRefused is sent, the device is free.
        unwanted: set when somebody here wants it to end.
    """

    def __init__(self, node: str, incarnation: int, session: Session, on_printed: Callable[[str, int], None]) -> None:
        """``on_printed`` is called with node and incarnation when text was given to ``session``."""
        self._on_printed = on_printed
        self.node = node
        self.incarnation = incarnation
        self.device = ""
        self.process: KernelProcess | None = None
        self.sampler: KernelSampler | None = None
        self.mark: CellMark | None = None
        self.gone = asyncio.Event()
        self.over = asyncio.Event()
        self.unwanted = asyncio.Event()
        self._end_reason = ""
        self._asked = False
        self._session = session
        self._relay: KernelRelay | None = None
        self._early: list[tuple[KernelChannel, Sequence[bytes], bool]] = []
        self._early_bytes = 0
        self._early_interrupt = False
        self._left_out = 0
        self._left_out_of: Sequence[bytes] = ()

    async def start(
        self, context: zmq.Context[zmq.Socket[bytes]], options: KernelOptions, programs: Programs
    ) -> KernelProcess:
        """Start the process and connect to it; what was sent meanwhile is delivered.

        Raises:
            OSError, ValueError: it could not be started.
        """
        self.process = await KernelProcess.start(options, self._ended, programs)
        self.sampler = KernelSampler(self.process.pid)
        self._relay = KernelRelay(context, self.process.connection, self._deliver, self.process.interrupt)
        early, self._early = self._early, []
        for channel, parts, subshell in early:
            self._relay.send(channel, parts, subshell=subshell)
        if self._early_interrupt:
            self._relay.interrupted()
        return self.process

    def started(self) -> NodeStarted:
        """The message that says that it runs."""
        pid = self.process.pid if self.process is not None else 0
        return NodeStarted(node=self.node, incarnation=self.incarnation, device=self.device, pid=pid)

    @property
    def running(self) -> bool:
        """The process has been started and is not known to have ended."""
        return self.process is not None and not self.process.ended.is_set()

    def send(self, channel: KernelChannel, parts: Sequence[bytes], *, subshell: bool = False) -> None:
        """Deliver a Jupyter message; see :meth:`KernelRelay.send`. A kernel for which too much waits is ended."""
        if self._relay is None or not self._relay.live:
            self._early_bytes += sum(len(part) for part in parts)
            if self._early_bytes > MAX_EARLY_BYTES:
                self._give_up()
                return
        if self._relay is None:
            self._early.append((channel, parts, subshell))
        else:
            self._relay.send(channel, parts, subshell=subshell)

    def interrupt(self) -> None:
        """SIGINT now, and again for a cell that was delivered but has not begun."""
        if self._relay is None or self.process is None:
            self._early_interrupt = True
            return
        if self._relay.live:
            # Earlier it would end the kernel, which ignores SIGINT only once it is set up.
            self.process.interrupt()
        self._relay.interrupted()

    def interrupt_inside(self, cell: int) -> bool:
        """SIGINT if the kernel is inside ``cell``; else nothing, and False."""
        if not self.running or self.mark is None or self.mark.cell() != cell:
            return False
        assert self.process is not None
        self.process.interrupt()
        return True

    def wake(self) -> None:
        """The runtime interrupts the cell itself; see :meth:`KernelProcess.wake`."""
        if self.process is not None:
            self.process.wake()

    async def end(self, reason: str, grace: float, *, asked: bool = True) -> None:
        """End the process: a shutdown_request, SIGKILL after ``grace`` seconds (0: at once). Returns when it is over.

        ``reason`` and ``asked`` (by the coordinator) go into NodeEnded; those of the first call count.
        """
        if not self.unwanted.is_set():
            self._end_reason, self._asked = reason, asked
            self.unwanted.set()
        if self.running:
            assert self.process is not None
            await asyncio.to_thread(self.process.look_below)
            if grace > 0 and self._relay is not None:
                self._relay.ask_to_end()
                try:
                    await asyncio.wait_for(self.process.ended.wait(), grace)
                except TimeoutError:
                    pass
            self.process.kill()
        await self.over.wait()

    def log_lines(self, count: int) -> list[str]:
        """The last lines of its stdout and stderr file."""
        return self.process.log_lines(count) if self.process is not None else []

    def ended_message(self) -> NodeEnded:
        """Why the process is gone, with the last lines of its log."""
        assert self.process is not None
        return NodeEnded(
            node=self.node,
            incarnation=self.incarnation,
            asked=self._asked,
            reason=self._end_reason if self.unwanted.is_set() else self.process.reason(),
            log_tail=self.log_lines(LOG_TAIL_LINES),
            by_itself=not self.unwanted.is_set() and self.process.ended_by_itself(),
        )

    def tell_left_out(self) -> None:
        """The link takes messages again: mark the place in the output where some of this node's are missing."""
        if not self._left_out:
            return
        count, self._left_out = self._left_out, 0
        text = f"[notebook-cluster: {count} messages left out: the link was full]\n"
        marker = FromKernel(node=self.node, incarnation=self.incarnation, channel="iopub")
        self._session.send(marker, _stream(self._left_out_of, text))

    def _give_up(self) -> None:
        """End it, now or as soon as it is started; see :data:`MAX_EARLY_BYTES`."""
        if not self.unwanted.is_set():
            self._end_reason = f"over {MAX_EARLY_BYTES >> 20} MiB were sent to it before it was up: start it again"
            self.unwanted.set()
        self._early.clear()
        if self.process is not None:
            self.process.kill()

    # ---- from the kernel ---------------------------------------------------------------------------------------

    def _ended(self, process: KernelProcess) -> None:
        asyncio.get_running_loop().call_later(_DRAIN_S, self._clean_up, process)

    def _clean_up(self, process: KernelProcess) -> None:
        if self._relay is not None:
            self._relay.close()
        process.remove_files()
        forget_left_over(age=0)  # what it has lent when it was killed, and once more if processes of its own outlive it
        asyncio.get_running_loop().call_later(_OUTLIVED_S, forget_left_over, 0)
        self.gone.set()

    def _deliver(self, channel: KernelChannel, parts: list[bytes], kind: str) -> None:
        message = FromKernel(node=self.node, incarnation=self.incarnation, channel=channel)
        try:
            if not self._session.send(message, parts, droppable=kind in _DROPPABLE):
                self._left_out += 1
                self._left_out_of = parts
            if kind == "stream":
                self._on_printed(self.node, self.incarnation)
        except ValueError as error:
            # Larger than the link takes: say so in the output instead of ending in silence.
            log.warning("a %s of %s was left out: %s", kind, self.node, error)
            self._session.send(message, _stream(parts, f"[notebook-cluster: a {kind} was left out: {error}]\n"))


def _stream(template: Sequence[bytes], text: str) -> list[bytes]:
    """A stream message with the parent of ``template``, so that it appears in the same cell."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "session": "notebook-cluster",
        "username": "notebook-cluster",
        "date": datetime.now(UTC).isoformat(),
        "msg_type": "stream",
        "version": "5.4",
    }
    content = {"name": "stderr", "text": text}
    return [json.dumps(header).encode(), template[1], b"{}", json.dumps(content).encode()]
