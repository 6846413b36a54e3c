"""A pairing host with what it was told, and guests that do what no guest of ours would."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import zmq

from notebook_cluster import security
from notebook_cluster.pairing import PairingHost, Partner, pair
from notebook_cluster.protocol import PROTOCOL_VERSION, Message, decode, encode
from notebook_cluster.protocol.pairing import Begin, Challenge, Denied, FromHost, Here, Prove, Who
from notebook_cluster.security.codes import PAIRING_IDENTITY, GuestExchange, guest_proof
from notebook_cluster.sockets import Pump

CODE = "tiger-lamp-42"
WRONG = "tiger-lamp-43"


class Host:
    """A :class:`PairingHost` called mini, what it was told, and the guests' context."""

    def __init__(self, *, endpoint: str = "tcp://127.0.0.1:0", **here: Any) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.guests: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.key = security.new_identity().public_key
        fields: dict[str, Any] = {
            "protocol": PROTOCOL_VERSION,
            "role": "peer",
            "name": "mini",
            "owner": "ann@mini",
            "key": self.key,
            "port": 4711,
        }
        self.here = Here(**(fields | here))
        self.gate = security.Gate(self.context)
        self.paired: list[Partner] = []
        self.lines: list[str] = []
        self.closed: list[str] = []
        self.refuse: Callable[[Partner], str | None] = lambda partner: None
        self.host = PairingHost(
            self.context,
            endpoint,
            gate=self.gate,
            here=lambda: self.here,
            on_paired=self._on_paired,
            on_attempt=self.lines.append,
        )
        self.host.on_closed = self.closed.append

    def open(self, code: str = CODE, single_use: bool = False, valid_s: float | None = None) -> str:
        """Open a code; returns the address."""
        return f"127.0.0.1:{self.host.open(security.OpenCode(code, single_use, valid_s))}"

    async def pair(self, address: str, code: str = CODE, **options: Any) -> Partner:
        """Pair as a cluster called desk, with a new key unless ``identity_key`` is given."""
        settings: dict[str, Any] = {
            "identity_key": security.new_identity().public_key, "role": "cluster", "name": "desk", "owner": "bob@desk",
        }  # fmt: skip
        return await pair(self.guests, address, code, **(settings | options))

    def _on_paired(self, partner: Partner) -> str | None:
        reason = self.refuse(partner)
        if reason is None:
            self.paired.append(partner)
        return reason

    def close(self) -> None:
        self.host.close()
        self.gate.close()
        self.context.destroy(0)
        self.guests.destroy(0)


@contextlib.asynccontextmanager
async def hosting(**options: Any) -> AsyncIterator[Host]:
    """A :class:`Host` that is closed at the end."""
    host = Host(**options)
    try:
        yield host
    finally:
        host.close()


class RawGuest:
    """A connection to a pairing socket that sends what it is told, from the loopback address ``source``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, source: str = "127.0.0.1") -> None:
        socket = context.socket(zmq.DEALER)
        security.dial(socket, security.new_identity(), PAIRING_IDENTITY.public_key)
        socket.setsockopt(zmq.SNDHWM, 0)
        self.answers: asyncio.Queue[bytes] = asyncio.Queue()
        self.pump = Pump(socket, lambda frames: self.answers.put_nowait(frames[0]))
        self.identity_key = security.new_identity().public_key
        socket.connect(f"tcp://{source}:0;{address}")

    def send(self, *frames: bytes | Message) -> None:
        """Queue a message; libzmq sends it once it is connected."""
        parts = [encode(frame) if isinstance(frame, Message) else frame for frame in frames]
        assert self.pump.send(parts)

    async def receive(self) -> Any:
        """The next message of the host."""
        return decode(await asyncio.wait_for(self.answers.get(), 20), FromHost)

    async def ask(self, message: Message) -> Any:
        self.send(message)
        return await self.receive()

    def begin(self, code: str, here: Here, **fields: Any) -> tuple[GuestExchange, Begin]:
        """A first step with ``code``, not sent."""
        exchange = GuestExchange(code, self.identity_key, here.key)
        known: dict[str, Any] = {
            "role": "cluster", "name": "eve", "owner": "eve@eve", "key": self.identity_key, "message": exchange.message,
        }  # fmt: skip
        return exchange, Begin(**(known | fields))

    async def attempt(self, code: str) -> Any:
        """A whole attempt; returns the host's last word."""
        here = await self.ask(Who(protocol=PROTOCOL_VERSION))
        exchange, begin = self.begin(code, here)
        challenge = await self.ask(begin)
        if isinstance(challenge, Denied):
            return challenge
        assert isinstance(challenge, Challenge)
        return await self.ask(self.prove(exchange, challenge, here, begin))

    def prove(self, exchange: GuestExchange, challenge: Challenge, here: Here, begin: Begin) -> Prove:
        """The second step, not sent."""
        secret = exchange.finish(challenge.message)
        return Prove(attempt=challenge.attempt, proof=guest_proof(secret, encode(here), encode(begin)))

    def close(self) -> None:
        self.pump.close()
