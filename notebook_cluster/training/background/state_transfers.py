"""States for nodes that join or were late, on the runtime's thread of a job: fetched from a holder, and served.

On a slow link nothing may come for seconds though everything is on its way. So a state is not pushed a second time
because it is asked for again. Behind it comes SENT, also as the answer to who asks again: what has not come by then is
lost (a connection broke), and only that is sent again. The member's ``retransmission`` does the same with slices.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from notebook_cluster.codecs import Vector
from notebook_cluster.collectives.chunked_messages import reserve
from notebook_cluster.memory.nameless import file_of
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.rounds.member import events_effects as types
from notebook_cluster.rounds.member.state import MemberState
from notebook_cluster.rounds.numerics.momentum import NOT_KEPT, zeros
from notebook_cluster.rounds.numerics.outer import state_hash
from notebook_cluster.rounds.numerics.vectors import like
from notebook_cluster.training.checkpointing.saving import MAX_PART_BYTES, Pieces, TransferError, frames_of
from notebook_cluster.training.runtime import Payload, Runtime

RETRY_SECONDS = 3.0
"""A fetch that hears nothing for this long asks again; after ``RETRIES`` of them its source is given up."""

RETRIES = 3

MAX_WAITING_REQUESTS = 64


class _Pushed(NamedTuple):
    """What was pushed to a node last: the state after which round, and how many times one was."""

    incarnation: int
    round: int
    times: int


class StateTransfers:
    """Both ends of the transfers of one job's state."""

    def __init__(
        self,
        runtime: Runtime,
        job: str,
        *,
        member: Callable[[], MemberState],
        apply_event: Callable[[types.Event], None],
        optimizer_bytes: Callable[[str, Callable[[bytes], None]], None],
    ) -> None:
        """``member``: this node's side of the rounds now; ``apply_event`` takes what happened. ``optimizer_bytes``
        gives the optimiser's state that goes with the state held here to the node named, now or later."""
        self.optimizer_bytes: bytes | None = None
        """The optimiser's state of this node, or of all, that came with the state fetched last; None: none was."""
        self._runtime, self._job = runtime, job
        self._member, self._apply_event, self._optimizer_bytes_for = member, apply_event, optimizer_bytes
        self._fetch: Fetch | None = None
        self._fetching: types.FetchState | None = None
        self._pushed: dict[str, _Pushed] = {}
        self._waiting: dict[str, JobFrame] = {}
        """Requests for a state that is not here yet."""

    # ---- fetching

    def fetch(self, effect: types.FetchState) -> None:
        """Ask the source, instead of the one that was asked before."""
        theta, momentum, incarnation = self._member().theta, self._member().momentum, self._runtime.incarnation
        assert theta is not None
        assert momentum is not None
        self._fetching = effect
        sizes = {"theta": theta.nbytes, "momentum": momentum.nbytes}

        def room(size: int) -> memoryview:  # in a file where the state is in one
            return like(theta, size, np.uint8).data if file_of(theta) is not None else reserve(size)

        self._fetch = Fetch(self._job, effect.source, incarnation, effect.round, sizes, time.monotonic(), room)
        self._runtime.send_mesh(effect.source, self._fetch.request())

    def cancel(self) -> None:
        """The state is no longer wanted."""
        self._fetch = self._fetching = None

    def on_frame(self, sender: str, header: JobFrame, payload: Payload) -> None:
        """A frame of the state.

        Raises:
            TransferError: sizes that cannot be this model's.
        """
        fetch, fetching = self._fetch, self._fetching
        if fetch is None or fetching is None or (sender, header.incarnation) != (fetching.source, fetching.incarnation):
            return
        if not fetch.add_frame(header, payload, time.monotonic()):
            return
        self.cancel()
        fragments = self._member().fragments
        try:
            theta, momentum, part = fetch.result(fragments is not None and fragments.gradients)
        except TransferError as error:
            self._apply_event(types.FetchFailed(source=sender, reason=str(error)))
            return
        self.optimizer_bytes = part
        self._apply_event(types.StateFetched(fetch.round, theta, momentum, fetch.state_hash))

    def on_sent(self, sender: str, header: JobFrame) -> None:
        """The source says that it pushed everything before this: ask for what is lost."""
        fetch, fetching = self._fetch, self._fetching
        if fetch is None or fetching is None or (sender, header.incarnation) != (fetching.source, fetching.incarnation):
            return
        try:
            again = fetch.on_sent(header, time.monotonic())
        except TransferError as error:
            self._failed(str(error))
        else:
            if again is not None:
                self._runtime.send_mesh(sender, again)

    def on_tick(self, now: float) -> None:
        """Ask again, and give a silent source up."""
        if self._fetch is None:
            return
        try:
            again = self._fetch.retry(now)
        except TransferError as error:
            fragments = self._member().fragments
            if fragments is not None and fragments.advances and self._fetching is not None:
                self.fetch(self._fetching)  # its main thread may be in a long step; a source that is gone is told
            else:
                self._failed(str(error))
        else:
            if again is not None:
                self._runtime.send_mesh(self._fetch.source, again)

    def on_roster(self, incarnations: dict[str, int]) -> None:
        """Membership changed: the source may be gone, or who was sent the state."""
        for node, last in self._pushed.items():
            if incarnations.get(node) != last.incarnation:
                self._apply_event(types.Served(node, -1))
        self._pushed = {node: last for node, last in self._pushed.items() if incarnations.get(node) == last.incarnation}
        fetching = self._fetching
        if fetching is not None and incarnations.get(fetching.source) != fetching.incarnation:
            self._failed(f"{fetching.source!r} left")

    def _failed(self, reason: str) -> None:
        fetching = self._fetching
        self.cancel()
        if fetching is not None:
            self._apply_event(types.FetchFailed(source=fetching.source, reason=reason))

    # ---- serving

    def on_request(self, sender: str, header: JobFrame) -> None:
        """Push the newest state to ``sender``, or keep its request until the round that it wants is here. One that is
        on its way is not pushed again."""
        if self._is_on_its_way(sender, header):
            return
        state = self._member()
        if not state.holds or not state.advanced or state.round < header.round:
            if len(self._waiting) < MAX_WAITING_REQUESTS:
                self._waiting[sender] = header
            return
        round = state.round
        self._optimizer_bytes_for(sender, lambda optimizer: self._push(sender, header, round, optimizer))

    def serve_waiting(self) -> None:
        """Something changed: look at the requests that wait."""
        waiting, self._waiting = self._waiting, {}
        for sender, header in waiting.items():
            self.on_request(sender, header)

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
        sent = JobFrame(
            job=self._job, incarnation=self._runtime.incarnation, kind="sent", name="state", round=last.round,
            ticket=last.times,
        )  # fmt: skip
        self._runtime.send_mesh(node, sent)

    def _push(self, sender: str, header: JobFrame, round: int, optimizer: bytes) -> None:
        """The state after ``round`` with an optimiser's state; nothing where that is no longer here: the other node
        asks again."""
        if self._is_on_its_way(sender, header):
            return
        state = self._member()
        if state.round != round or not state.advanced or state.theta is None or state.momentum is None:
            return
        arrays: dict[str, Payload] = {
            "theta": state.theta.data,
            "momentum": state.momentum.data,
            "optimizer": optimizer,
        }
        incarnation = self._runtime.incarnation
        for frame, payload in snapshot_frames(self._job, incarnation, state.round, state.state_hash, arrays, header):
            self._runtime.send_mesh(sender, frame, payload)
        last = self._pushed.get(sender)
        times = last.times if last is not None and last.incarnation == header.incarnation else header.ticket
        self._pushed[sender] = _Pushed(header.incarnation, state.round, times + 1)
        self._apply_event(types.Served(sender, state.round))
        self._say_sent(sender, self._pushed[sender])


# ---- one fetch, pure: frames in, frames out ------------------------------------------------------------------


class Fetch:
    """One attempt to get (theta, momentum, the node's saved optimiser state) from ``source``.

    The source pushes a snapshot; what arrives is checked against the hash that its frames announce.
    """

    def __init__(
        self,
        job: str,
        source: str,
        incarnation: int,
        wanted: int,
        sizes: dict[str, int],
        now: float,
        room: Callable[[int], memoryview] = reserve,
    ) -> None:
        """``incarnation`` is this node's; ``wanted`` the oldest round that is good enough; ``sizes``: bytes of
        theta and momentum; ``room``: where they are put together."""
        self.job, self.source, self.incarnation, self.wanted, self._sizes = job, source, incarnation, wanted, sizes
        self.round, self.state_hash, self._room = -1, "", room
        self._pieces: dict[str, Pieces] = {}
        self._asked_at, self._asked = now, 1
        self._passed = 0
        """Number of the last push that is over."""
        self._in_vain = 0
        """Pushes one after the other of which nothing came."""
        self._came = False

    def request(self) -> JobFrame:
        """Ask the source for its newest snapshot, as soon as that is of the wanted round or later; of one that is here
        in part, from the first piece on that is missing."""
        name = next((name for name, pieces in self._pieces.items() if not pieces.complete), "")
        return JobFrame(
            job=self.job, incarnation=self.incarnation, kind="state_request", round=self.wanted, ticket=self._passed,
            name=name, offset=self._pieces[name].first_missing if name else 0, state_hash=self.state_hash,
        )  # fmt: skip

    def on_sent(self, header: JobFrame, now: float) -> JobFrame | None:
        """The source says that all it ever pushed came before this: a request for what is lost, or None.

        Raises:
            TransferError: nothing of the last ``RETRIES`` pushes came.
        """
        if header.ticket <= self._passed:
            return None
        self._in_vain = 0 if self._came else self._in_vain + 1
        if self._in_vain >= RETRIES:
            raise TransferError(f"nothing of the state that {self.source!r} sent {RETRIES} times has come")
        self._passed, self._came = header.ticket, False
        self._asked_at, self._asked = now, 1
        return self.request()

    def retry(self, now: float) -> JobFrame | None:
        """A request to send again after ``RETRY_SECONDS`` without progress, or None.

        Raises:
            TransferError: the source did not answer ``RETRIES`` times in a row.
        """
        if now - self._asked_at < RETRY_SECONDS:
            return None
        if self._asked >= RETRIES:
            raise TransferError(f"{self.source!r} sent no state for {RETRY_SECONDS * RETRIES:.0f} s")
        self._asked_at, self._asked = now, self._asked + 1
        return self.request()

    def add_frame(self, header: JobFrame, payload: Payload, now: float) -> bool:
        """Take one ``state`` frame of the source; True when the snapshot is whole.

        Raises:
            TransferError: sizes that cannot be this model's.
        """
        if (header.round, header.state_hash) != (self.round, self.state_hash):
            if header.round < max(self.round, self.wanted):
                return False
            self.round, self.state_hash = header.round, header.state_hash
            self._pieces = {name: Pieces(size, self._room) for name, size in self._sizes.items()}
            self._pieces["optimizer"] = Pieces(MAX_PART_BYTES)
        pieces = self._pieces.get(header.name)
        if pieces is None or self._sizes.get(header.name, header.total) != header.total:
            raise TransferError(f"{self.source!r} sent {header.total} bytes of {header.name!r}")
        if pieces.add_piece(header.offset, header.total, payload):
            self._asked_at, self._asked, self._came = now, 1, True
        return all(piece.complete for piece in self._pieces.values())

    def result(self, gradients: bool = False) -> tuple[Vector, Vector, bytes]:
        """theta, momentum and the optimiser's part (empty: none). ``gradients``: the hash may be that of momentum only.

        Raises:
            TransferError: the arrays do not have the announced hash.
        """
        theta = np.frombuffer(self._pieces["theta"].data, np.float32)
        size = self._sizes["momentum"]
        kind = np.uint16 if 0 < size < self._sizes["theta"] else np.float32
        momentum: Vector = np.frombuffer(self._pieces["momentum"].data, kind) if size else zeros(0, NOT_KEPT)
        of_mean = gradients and state_hash(theta[:0], momentum) == self.state_hash
        if not of_mean and state_hash(theta, momentum) != self.state_hash:
            raise TransferError(
                f"the state of round {self.round} from {self.source!r} does not have the hash it announced"
            )
        return theta, momentum, bytes(self._pieces["optimizer"].data)


def snapshot_frames(
    job: str, incarnation: int, round: int, hash: str, arrays: dict[str, Payload], wanted: JobFrame | None = None
) -> Iterator[tuple[JobFrame, memoryview]]:
    """Every ``state`` frame of a snapshot, in order. ``arrays`` must not be written to afterwards. ``wanted``: a
    request; of a snapshot that its sender has in part, what is before its first gap is left out."""
    names = list(arrays)
    first, begin = 0, 0
    if wanted is not None and wanted.state_hash == hash and wanted.name in names:
        first, begin = names.index(wanted.name), wanted.offset
    for place, name in enumerate(names):
        for offset, total, payload in frames_of(arrays[name]):
            if (place, offset) < (first, begin):
                continue
            header = JobFrame(
                job=job, incarnation=incarnation, kind="state", round=round, name=name,
                offset=offset, total=total, state_hash=hash,
            )  # fmt: skip
            yield header, payload
