"""The side of pairing that has a code open: an agent, or a coordinator that invites peers."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import zmq

from notebook_cluster.link.frames import Drops
from notebook_cluster.pairing.port import PairingPort, source_of
from notebook_cluster.protocol import Message, ProtocolError, decode, encode
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.pairing import (
    Accepted,
    Begin,
    Challenge,
    Denied,
    FromGuest,
    Here,
    Prove,
    Who,
)
from notebook_cluster.security import Gate, OpenCode, fingerprint, is_key
from notebook_cluster.security.codes import (
    Attempt,
    BadElement,
    TooManyAttempts,
    answer,
    guest_proof,
    has_form,
    host_proof,
    is_proof,
)
from notebook_cluster.security.trust import check_owner

ATTEMPT_SECONDS = 10.0
"""Seconds between Begin and Prove; after them the attempt is over and stays counted."""
_TICK = 0.25
_QUIET = 5.0
"""Seconds in which further refused attempts of one source become one line in the log."""
_MAX_SOURCES = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partner:
    """Who was paired with, proven to have the same code."""

    role: Literal["peer", "cluster"]
    name: str
    owner: str
    key: str
    host: str
    """IP address of the other side."""
    port: int = 0
    """Port of its link, when it said so (a host does)."""


@dataclass(frozen=True, slots=True)
class _Running:
    """An attempt between Begin and Prove."""

    routing_id: bytes
    partner: Partner
    secret: bytes
    begin: bytes
    counted: Attempt
    ends: float


class PairingHost:
    """Answers guests while a code is open, and listens only then.

    ``here()`` says what this side is; it is asked at each :meth:`open`. ``on_paired(partner)`` is called when a guest
    has proven the code and pins its key; it returns None, or in one line why the guest is refused all the same.
    ``on_attempt(line)`` gets one line for the log about every attempt, a flood of refused ones summed up.
    ``gate`` is the context's ZAP handler when it has one already. Everything runs on the loop of :meth:`open`.

    Attributes:
        on_closed: called with the reason when the code is used up, over or dead and the port was closed; not after
            :meth:`close`.
        attempts: number of attempts by outcome (``right``, ``wrong``, ``refused``), over all codes.
        checked: number of those whose code was checked with SPAKE2.
        dropped: number of frames dropped by cause (``garbage``, ``stale``), and of connections ended by cause (``too
            many`` of one source, ``too long``, ``too much`` sent).
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        *,
        gate: Gate | None,
        here: Callable[[], Here],
        on_paired: Callable[[Partner], str | None],
        on_attempt: Callable[[str], None],
    ) -> None:
        self.dropped = Drops()
        self._port = PairingPort(context, endpoint, gate, self._on_frames, self.dropped)
        self._say_here = here
        self._on_paired = on_paired
        self._on_attempt = on_attempt
        self.on_closed: Callable[[str], None] = lambda reason: None
        self.attempts: Counter[str] = Counter()
        self.checked = 0
        self._code: OpenCode | None = None
        self._running: dict[bytes, _Running] = {}
        self._quiet_ends = 0.0
        self._unsaid: dict[str, int] = {}
        """Source -> refused attempts since the last line about it."""

    @property
    def is_open(self) -> bool:
        """A code is open."""
        return self._code is not None

    @property
    def code(self) -> OpenCode | None:
        """The open code."""
        return self._code

    def open(self, code: OpenCode) -> int:
        """Let guests use ``code``, instead of the one that was open; returns the port. Call inside the running loop.

        Raises:
            OSError: the port is taken or not allowed; the text names it and the way out.
        """
        self._here = self._say_here()
        self._here_frame = encode(self._here)
        if not self.is_open:
            self._loop = asyncio.get_running_loop()
            self._port.listen()
            self._ticker = self._loop.call_later(_TICK, self._tick)
        self._code = code
        self._running.clear()
        return self._port.number

    def close(self) -> None:
        """Close the code and the port now. May be called again."""
        self._close_code()
        self._port.close()

    def _close_code(self) -> None:
        if self._code is not None:
            self._code = None
            self._running.clear()
            self._ticker.cancel()
            self._sum_up()

    # ---- incoming --------------------------------------------------------------------------------------------

    def _on_frames(self, frames: list[zmq.Frame]) -> None:
        code, routing_id = self._code, frames[0].bytes
        if code is None:
            return
        try:
            if len(frames) != 2:
                raise ProtocolError(f"a message in {len(frames) - 1} parts")
            content = frames[1].bytes
            message = decode(content, FromGuest)
            if isinstance(message, Who):
                self._port.send([routing_id, self._here_frame])
            elif isinstance(message, Begin):
                self._begin(code, routing_id, message, content, source_of(frames[1]))
            else:
                self._prove(code, routing_id, message)
        except ProtocolError as error:
            self.dropped.note(
                "garbage", "dropped a frame from %s at the pairing port: %s", source_of(frames[-1]), error
            )
        self._end_if_over()

    def _begin(self, code: OpenCode, routing_id: bytes, begin: Begin, content: bytes, source: str) -> None:
        partner = _partner(begin, source)
        self._give_up(lambda running: running.routing_id == routing_id)
        if begin.role == self._here.role:
            self._deny(routing_id, partner, f"{self._here.name} is a {begin.role} as well: a peer pairs with a cluster")
            return
        try:
            counted = code.begin(source)
        except TooManyAttempts as error:
            self._deny(routing_id, partner, str(error), retry_after=error.retry_after)
            return
        self.checked += 1
        try:
            message, secret = answer(code.code, begin.key, self._here.key, begin.message)
        except BadElement as error:
            code.wrong(counted)
            self._deny_wrong(code, routing_id, partner, str(error))
            return
        attempt = secrets.token_bytes(16)
        ends = self._loop.time() + ATTEMPT_SECONDS
        self._running[attempt] = _Running(routing_id, partner, secret, content, counted, ends)
        self._say(routing_id, Challenge(attempt=attempt, message=message))

    def _prove(self, code: OpenCode, routing_id: bytes, prove: Prove) -> None:
        running = self._running.get(prove.attempt)
        if running is None or running.routing_id != routing_id:
            self.dropped.note("stale", "dropped a proof for no attempt that is under way")
            self._say(routing_id, Denied(reason="this attempt is over: begin again"))
            return
        del self._running[prove.attempt]
        partner = running.partner
        if not is_proof(prove.proof, guest_proof(running.secret, self._here_frame, running.begin)):
            code.wrong(running.counted)
            self._deny_wrong(code, routing_id, partner, "wrong code")
            return
        reason = self._pin(partner)
        code.right(running.counted, used=reason is None)
        if reason is not None:
            self._deny(routing_id, partner, reason)
            return
        self.attempts["right"] += 1
        proof = host_proof(running.secret, self._here_frame, running.begin)
        self._say(routing_id, Accepted(attempt=prove.attempt, proof=proof))
        self._on_attempt(f"{_shown(partner)}: right code, key {fingerprint(partner.key)} is trusted now")

    def _pin(self, partner: Partner) -> str | None:
        try:
            return self._on_paired(partner)
        except Exception as error:
            _log.exception("could not keep %s", _shown(partner))
            return f"{self._here.name} could not keep the key: {error}"

    # ---- outcomes --------------------------------------------------------------------------------------------

    def _say(self, routing_id: bytes, message: Message) -> None:
        self._port.send([routing_id, encode(message)])

    def _deny_wrong(self, code: OpenCode, routing_id: bytes, partner: Partner, cause: str) -> None:
        """Say that the attempt is counted, and how many are left."""
        left = code.tries_left
        if left > 0:
            reason = f"{cause}: {'1 try' if left == 1 else f'{left} tries'} left before it is dead"
        else:
            reason = f"{cause}: it was the last try, the code is dead"
        self.attempts["wrong"] += 1
        self._say(routing_id, Denied(reason=reason, tries_left=left))
        self._on_attempt(f"{_shown(partner)}: {reason}")

    def _deny(self, routing_id: bytes, partner: Partner, reason: str, retry_after: float | None = None) -> None:
        """Say that the attempt is refused without a check; a flood of those from one source is summed up."""
        self.attempts["refused"] += 1
        self._say(routing_id, Denied(reason=reason[:1000], retry_after=retry_after))
        if not self._unsaid:
            self._quiet_ends = self._loop.time() + _QUIET
        source = partner.host if partner.host in self._unsaid or len(self._unsaid) < _MAX_SOURCES else "other sources"
        if source in self._unsaid:
            self._unsaid[source] += 1
        else:
            self._unsaid[source] = 0
            self._on_attempt(f"{_shown(partner)}: refused, {reason}")

    def _sum_up(self) -> None:
        for source, count in self._unsaid.items():
            if count:
                self._on_attempt(f"{source}: {count} more attempts refused")
        self._unsaid.clear()

    def _give_up(self, is_over: Callable[[_Running], bool]) -> None:
        """Attempts without a proof stay counted as wrong."""
        for attempt, running in [item for item in self._running.items() if is_over(item[1])]:
            del self._running[attempt]
            self.attempts["wrong"] += 1
            if self._code is not None:
                self._code.wrong(running.counted)
                self._on_attempt(f"{_shown(running.partner)}: given up, {self._code.tries_left} tries left")

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK, self._tick)
        now = self._loop.time()
        self._port.look()
        self._give_up(lambda running: running.ends <= now)
        if self._unsaid and now >= self._quiet_ends:
            self._sum_up()
        self._end_if_over()

    def _end_if_over(self) -> None:
        reason = self._code.over if self._code is not None else None
        if reason is not None:
            self._close_code()
            self._port.leave()
            self.on_closed(reason)


def _partner(begin: Begin, source: str) -> Partner:
    """The guest as it describes itself; ProtocolError when it is no description."""
    try:
        check_owner(begin.owner)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
    if not is_name(begin.name) or not is_key(begin.key) or not has_form(begin.message, b"A"):
        raise ProtocolError("an unusable name, key or SPAKE2 message")
    return Partner(begin.role, begin.name, begin.owner, begin.key, source)


def _shown(partner: Partner) -> str:
    return f"{partner.host}: {partner.role} {partner.name!r} of {partner.owner!r}"
