"""Pairing over the network: :class:`PairingHost` has a code open, :func:`pair` is the guest who was told it.

The messages and their order: :mod:`notebook_cluster.protocol.pairing`.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Sequence
from typing import Any, Literal, TypeVar

import zmq

from notebook_cluster.link.connection import DialledConnection
from notebook_cluster.link.tcp import host_port, read_host_port
from notebook_cluster.pairing.host import PairingHost, Partner
from notebook_cluster.protocol import PROTOCOL_VERSION, Message, ProtocolError, decode, encode
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.pairing import (
    MAX_PAIRING_BYTES,
    Accepted,
    Begin,
    Challenge,
    Denied,
    FromHost,
    Here,
    Prove,
    Who,
)
from notebook_cluster.protocol.wire import mismatch
from notebook_cluster.security import fingerprint, is_key, new_identity, read_code
from notebook_cluster.security.codes import (
    PAIRING_IDENTITY,
    BadElement,
    GuestExchange,
    guest_proof,
    host_proof,
    is_proof,
)
from notebook_cluster.security.sanitise import safe_name
from notebook_cluster.security.trust import check_owner
from notebook_cluster.sockets import plain_context

__all__ = ["PairingError", "PairingHost", "Partner", "ask", "first_that_answers", "pair"]

_LAST_WORDS = 0.3
"""Seconds in which an answer may still be read after the end of its connection was seen."""
_MAX_REASON = 500
_NO_CODE = "no code is open there (it was used, or its time is over): ask for a new one"
_NOTHING_THERE = (
    "nothing listens there (connection refused): run `notebook-cluster share` there, or %cluster invite in a cluster's "
    f"notebook, and use the port that it shows. If it is that one, a firewall refuses you, or {_NO_CODE}"
)
_NO_PAIRING_PORT = "it does not answer as a machine that pairs: is this the port that it shows with its code?"

T = TypeVar("T")


class PairingError(Exception):
    """Not paired. One line with the way out; ``tries_left``: wrong codes until the code is dead, None when the code was
    not the trouble."""

    def __init__(self, text: str, tries_left: int | None = None) -> None:
        super().__init__(text)
        self.tries_left = tries_left


class _AnyHere(Message, frozen=True, tag="Here"):
    """What Here has in every version."""

    protocol: int


async def ask(context: zmq.Context[Any], address: str, *, timeout: float = 5.0) -> Here:
    """What is at the pairing socket ``address`` (``HOST:PORT``); a claim that nobody has proven.

    Raises:
        PairingError: nothing answers there, no code is open, or it speaks another protocol.
    """
    async with _Guest(context, address, timeout) as guest:
        return (await guest.who())[0]


async def first_that_answers(
    context: zmq.Context[Any], hosts: Sequence[str], port: int, key: str, *, timeout: float = 5.0
) -> str:
    """The first of ``hosts`` at whose pairing socket ``port`` somebody answers who says to have ``key``. ``timeout``
    is for each.

    Raises:
        PairingError: there is none.
    """
    trouble: PairingError | None = None
    for host in hosts:
        try:
            here = await ask(context, f"{host}:{port}", timeout=timeout)
        except PairingError as error:
            trouble = trouble or error
            continue
        if here.key == key:
            return host
        trouble = PairingError(f"somebody else answers at {host}:{port}")
    raise trouble or PairingError("it said no address: use HOST:PORT")


async def pair(
    context: zmq.Context[Any],
    address: str,
    code: str,
    *,
    identity_key: str,
    role: Literal["peer", "cluster"],
    name: str,
    owner: str,
    expect_key: str = "",
    timeout: float = 10.0,
) -> Partner:
    """Prove ``code`` to the pairing socket ``address`` (``HOST:PORT``), and let it prove it; returns who that is.

    The other side has pinned ``identity_key`` then; the caller pins the partner's. ``role``, ``name`` and ``owner`` are
    what this side is. ``expect_key``: the key that was advertised, another one is refused before the code is used.

    Raises:
        PairingError: not paired.
    """
    try:
        code = read_code(code)
    except ValueError as error:
        raise PairingError(str(error)) from None
    async with _Guest(context, address, timeout) as guest:
        here, here_frame = await guest.who()
        if expect_key and here.key != expect_key:
            raise PairingError(
                f"{here.name} at {address} has key {fingerprint(here.key)}, but {fingerprint(expect_key)} was "
                "advertised: somebody may pretend to be it, not paired. Look for it again, or pair by its HOST:PORT"
            )
        if here.role == role:
            raise PairingError(f"{here.name} at {address} is a {role} as well: a cluster pairs with a peer")
        while True:
            exchange = GuestExchange(code, identity_key, here.key)
            begin = Begin(role=role, name=name, owner=owner, key=identity_key, message=exchange.message)
            answer = await guest.prove(exchange, begin, here_frame)
            if answer is None:
                return Partner(here.role, here.name, here.owner, here.key, guest.host, here.port)
            if answer.retry_after is None or not guest.has_time(answer.retry_after):
                raise _denied(answer, code, here.name)
            # Others pair at this moment. Not all of those who wait come back at once.
            await asyncio.sleep(max(answer.retry_after, 0.1) * (1 + secrets.randbelow(1000) / 1000))


def _denied(answer: Denied, code: str, host: str) -> PairingError:
    reason = safe_name(answer.reason, _MAX_REASON)
    if answer.tries_left is None:
        return PairingError(f"{host} refuses: {reason}")
    if answer.tries_left <= 0:
        return PairingError(f"the code {code!r} is wrong at {host}, and now dead: ask for a new one", 0)
    tries = "1 try" if answer.tries_left == 1 else f"{answer.tries_left} tries"
    return PairingError(
        f"the code {code!r} is wrong at {host}: {tries} left before it is dead, compare it with the one shown there",
        answer.tries_left,
    )


class _Guest:
    """One connection to a pairing socket, for at most ``timeout`` seconds."""

    def __init__(self, context: zmq.Context[Any], address: str, timeout: float) -> None:
        self._context = plain_context(context)
        self._address = address
        self._timeout = timeout
        self._stage = "nothing answers there: is that machine on this network, and is its firewall open?"
        self._frames: asyncio.Queue[bytes | PairingError] = asyncio.Queue(16)
        self._connection: DialledConnection | None = None
        self._was_up = False
        self.host = ""

    async def __aenter__(self) -> "_Guest":
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + self._timeout
        self.host, port = await self._in_time(self._reach())
        self._connection = DialledConnection(
            self._context,
            f"tcp://{host_port(self.host, port)}",
            PAIRING_IDENTITY.public_key,
            new_identity(),
            on_frames=self._on_frames,
            on_up=self._on_up,
            on_down=self._on_down,
            on_refused=lambda: self._fail(_NO_CODE),
        )
        self._stage = _NO_PAIRING_PORT
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def has_time(self, seconds: float) -> bool:
        """True when there are ``2 * seconds`` left."""
        return self._loop.time() + 2 * seconds < self._deadline

    async def who(self) -> tuple[Here, bytes]:
        """Here, and as it was on the wire."""
        frame = await self._request(Who(protocol=PROTOCOL_VERSION))
        try:
            here = decode(frame, _AnyHere)
            if (versions := mismatch(self._address, here.protocol)) is not None:
                raise PairingError(versions)
            here = decode(frame, Here)
            check_owner(here.owner)
        except ValueError as error:
            raise self._error(f"it does not say who it is ({error})") from None
        if not is_name(here.name) or not is_key(here.key) or not 0 <= here.port < 65536:
            raise self._error("it has no usable name, key or port")
        self._stage = f"{here.name} fell silent: try again"
        return here, frame

    async def prove(self, exchange: GuestExchange, begin: Begin, here_frame: bytes) -> Denied | None:
        """One attempt; None when both sides have proven the code."""
        begin_frame = encode(begin)
        challenge = self._read(await self._request(begin))
        if isinstance(challenge, Denied):
            return challenge
        if not isinstance(challenge, Challenge):
            raise self._error("it does not answer as pairing asks for")
        try:
            secret = exchange.finish(challenge.message)
        except BadElement as error:
            raise self._error(str(error)) from None
        proof = guest_proof(secret, here_frame, begin_frame)
        outcome = self._read(await self._request(Prove(attempt=challenge.attempt, proof=proof)))
        if isinstance(outcome, Denied):
            return outcome
        expected = host_proof(secret, here_frame, begin_frame)
        if not isinstance(outcome, Accepted) or not is_proof(outcome.proof, expected):
            raise PairingError(
                f"whoever answers at {self._address} does not know the code: somebody between it and this machine "
                "pretends to be it, not paired. Use another network, or a new code"
            )
        return None

    async def _reach(self) -> tuple[str, int]:
        """The address of the other side and the port. A plain connection says why there is none, libzmq would not."""
        if (place := read_host_port(self._address)) is None:
            raise PairingError(f"{self._address[:200]!r} is no address: write it as HOST:PORT")
        host, port = place
        try:
            _, writer = await asyncio.open_connection(host.strip("[]"), port)
        except ConnectionRefusedError:
            raise self._error(_NOTHING_THERE) from None
        except (OSError, UnicodeError) as error:
            raise self._error(f"it cannot be reached ({error})") from None
        remote = writer.get_extra_info("peername")
        writer.close()
        return str(remote[0]), port

    async def _request(self, message: Message) -> bytes:
        assert self._connection is not None
        # Without a connection nothing is queued.
        while not self._connection.send([encode(message)]):
            await self._in_time(asyncio.sleep(0.01))
            if not self._frames.empty():
                break
        answer = await self._in_time(self._frames.get())
        if isinstance(answer, PairingError):
            raise answer
        return answer

    async def _in_time(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await work
        except TimeoutError:
            raise self._error(f"no answer within {self._timeout:g} s, {self._stage}") from None

    def _on_frames(self, frames: list[bytes]) -> None:
        self._put(frames[0] if len(frames) == 1 and len(frames[0]) <= MAX_PAIRING_BYTES else self._error("garbage"))

    def _on_up(self) -> None:
        self._was_up = True

    def _on_down(self, trouble: str, answered: bool) -> None:
        closed = "it closed the connection: was the code used, or is its time over?"
        self._fail(closed if self._was_up else _NO_PAIRING_PORT)

    def _fail(self, trouble: str) -> None:
        self._loop.call_later(_LAST_WORDS, self._put, self._error(trouble))

    def _put(self, answer: bytes | PairingError) -> None:
        if not self._frames.full():
            self._frames.put_nowait(answer)

    def _read(self, frame: bytes) -> Any:
        try:
            return decode(frame, FromHost)
        except ProtocolError as error:
            raise self._error(f"it does not answer as pairing asks for ({error})") from None

    def _error(self, trouble: str) -> PairingError:
        return PairingError(f"cannot pair with {self._address}: {trouble}")
