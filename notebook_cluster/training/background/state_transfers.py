"""States for nodes that join or were late, on the runtime's thread of a job: fetched from a holder, and served."""

import time
from typing import TYPE_CHECKING, NamedTuple

from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.rounds.member import events_effects as types
from notebook_cluster.training.background.transfer import Fetch, TransferError, snapshot_frames
from notebook_cluster.training.checkpointing.emergency_checkpoint import StateRequest
from notebook_cluster.training.runtime import Payload

if TYPE_CHECKING:
    from notebook_cluster.training.background.job import Job

MAX_WAITING_REQUESTS = 64


class _Pushed(NamedTuple):
    """What was pushed to a node last: the state after which round, and how many times one was."""

    incarnation: int
    round: int
    times: int


class StateTransfers:
    """Both ends of the transfers of one job's state."""

    def __init__(self, job: "Job") -> None:
        self.part: bytes | None = None
        """The optimiser's state of this node, or of all, that came with the state fetched last; None: none was."""
        self._job = job
        self._fetch: Fetch | None = None
        self._fetching: types.FetchState | None = None
        self._pushed: dict[str, _Pushed] = {}
        self._waiting: dict[str, JobFrame] = {}
        """Requests for a state that is not here yet."""

    # ---- fetching

    def fetch(self, effect: types.FetchState) -> None:
        """Ask the source, instead of the one that was asked before."""
        job = self._job
        assert job.member.theta is not None
        self._fetching = effect
        self._fetch = Fetch(
            job.name, effect.source, job.runtime.incarnation, effect.round, job.member.theta.size, time.monotonic()
        )
        job.runtime.send_mesh(effect.source, self._fetch.request())

    def cancel(self) -> None:
        """The state is no longer wanted."""
        self._fetch = self._fetching = None

    def take(self, sender: str, header: JobFrame, payload: Payload) -> None:
        """A frame of the state.

        Raises:
            TransferError: sizes that cannot be this model's.
        """
        fetch, fetching = self._fetch, self._fetching
        if fetch is None or fetching is None or (sender, header.incarnation) != (fetching.source, fetching.incarnation):
            return
        if not fetch.add(header, payload, time.monotonic()):
            return
        self.cancel()
        fragments = self._job.member.fragments
        try:
            theta, momentum, part = fetch.result(fragments is not None and fragments.gradients)
        except TransferError as error:
            self._job.handle(types.FetchFailed(source=sender, reason=str(error)))
            return
        self.part = part
        self._job.handle(types.StateFetched(fetch.round, theta, momentum, fetch.state_hash))

    def sent(self, sender: str, header: JobFrame) -> None:
        """The source says that it pushed everything before this: ask for what is lost."""
        fetch, fetching = self._fetch, self._fetching
        if fetch is None or fetching is None or (sender, header.incarnation) != (fetching.source, fetching.incarnation):
            return
        try:
            again = fetch.sent(header, time.monotonic())
        except TransferError as error:
            self._failed(str(error))
        else:
            if again is not None:
                self._job.runtime.send_mesh(sender, again)

    def tick(self, now: float) -> None:
        """Ask again, and give a silent source up."""
        if self._fetch is None:
            return
        try:
            again = self._fetch.retry(now)
        except TransferError as error:
            fragments = self._job.member.fragments
            if fragments is not None and fragments.advances and self._fetching is not None:
                self.fetch(self._fetching)  # its main thread may be in a long step; a source that is gone is told
            else:
                self._failed(str(error))
        else:
            if again is not None:
                self._job.runtime.send_mesh(self._fetch.source, again)

    def on_roster(self, incarnations: dict[str, int]) -> None:
        """Membership changed: the source may be gone."""
        self._pushed = {node: last for node, last in self._pushed.items() if incarnations.get(node) == last.incarnation}
        fetching = self._fetching
        if fetching is not None and incarnations.get(fetching.source) != fetching.incarnation:
            self._failed(f"{fetching.source!r} left")

    def _failed(self, reason: str) -> None:
        fetching = self._fetching
        self.cancel()
        if fetching is not None:
            self._job.handle(types.FetchFailed(source=fetching.source, reason=reason))

    # ---- serving

    def serve(self, sender: str, header: JobFrame) -> None:
        """Push the newest state to ``sender``, or keep its request until the round that it wants is here. One that is
        on its way is not pushed again."""
        if self._is_on_its_way(sender, header):
            return
        job, state = self._job, self._job.member
        if not state.holds or not state.advanced or state.round < header.round:
            if len(self._waiting) < MAX_WAITING_REQUESTS:
                self._waiting[sender] = header
            return
        round, resting = state.round, job.resting_part
        if state.fragments is None or not state.fragments.gradients:
            self._push(sender, header, round, job.saved_part_for(sender))
        elif state.fragments.central_optimizer:  # the node that steps keeps it; before its first step it is on disk
            self._push(sender, header, round, job.restored_optimizer(state.state_hash) or b"")
        elif resting is not None:
            self._push(sender, header, round, resting())
        else:  # the optimiser's state after that round, which the main thread has
            job.notify(
                StateRequest(lambda part: job.runtime.call_soon(lambda: self._push(sender, header, round, part)))
            )

    def serve_waiting(self) -> None:
        """Something changed: look at the requests that wait."""
        waiting, self._waiting = self._waiting, {}
        for sender, header in waiting.items():
            self.serve(sender, header)

    def _is_on_its_way(self, sender: str, header: JobFrame) -> bool:
        """True when what ``header`` asks for was pushed since the SENT that it names; then SENT is sent, behind it."""
        last = self._pushed.get(sender)
        if last is None or last.incarnation != header.incarnation:
            return False
        if header.ticket >= last.times or last.round < header.round:
            return False
        self._say_sent(sender, last)
        return True

    def _say_sent(self, node: str, last: _Pushed) -> None:
        runtime = self._job.runtime
        sent = JobFrame(
            job=self._job.name, incarnation=runtime.incarnation, kind="sent", name="state", round=last.round,
            ticket=last.times,
        )  # fmt: skip
        runtime.send_mesh(node, sent)

    def _push(self, sender: str, header: JobFrame, round: int, part: bytes) -> None:
        """The state after ``round`` with an optimiser's state; nothing where that is no longer here: the other node
        asks again."""
        if self._is_on_its_way(sender, header):
            return
        job, state = self._job, self._job.member
        if state.round != round or not state.advanced or state.theta is None or state.momentum is None:
            return
        arrays: dict[str, Payload] = {
            "theta": state.theta.data,
            "momentum": state.momentum.data,
            "optimizer": part,
        }
        frames = snapshot_frames(job.name, job.runtime.incarnation, state.round, state.state_hash, arrays, header)
        for frame, payload in frames:
            job.runtime.send_mesh(sender, frame, payload)
        last = self._pushed.get(sender)
        times = last.times if last is not None and last.incarnation == header.incarnation else header.ticket
        self._pushed[sender] = _Pushed(header.incarnation, state.round, times + 1)
        self._say_sent(sender, self._pushed[sender])
