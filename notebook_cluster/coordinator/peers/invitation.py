"""Where peers come in by themselves: the reception that they dial, and the code that invites them."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import zmq

from notebook_cluster.coordinator.core import Core
from notebook_cluster.discovery import ClusterAdvertiser, reachable_addresses
from notebook_cluster.journal import events as e
from notebook_cluster.link import Enlisting, InboundListener
from notebook_cluster.pairing import PairingHost, Partner
from notebook_cluster.peering.candidates import Trust
from notebook_cluster.protocol import PROTOCOL_VERSION
from notebook_cluster.protocol.pairing import Here
from notebook_cluster.protocol.views import Invitation, Invite, RequestError
from notebook_cluster.security import Gate, Identity, OpenCode, Trusted, new_code, owner, read_code

MOST_MINUTES = 7 * 24 * 60


class InvitationHost:
    """Closed until the first invitation: until then this process listens on loopback only. Both ports are the same for
    the whole run of a cluster, so that those who dialled find a restarted coordinator."""

    def __init__(
        self,
        core: Core,
        context: "zmq.Context[Any]",
        identity: Identity,
        trust: Trust,
        *,
        on_arrival: Callable[[str, str], None],
        enlisting: Callable[[], Enlisting],
    ) -> None:
        """``on_arrival(key, address)``: a trusted peer has dialled in; ``enlisting()`` decides about those that an
        engine has started."""
        self._enlisting = enlisting
        self._core = core
        self._trust = trust
        self._on_arrival = on_arrival
        self._context = context
        self._identity = identity
        self._gate: Gate | None = None
        self._host: PairingHost | None = None
        self._advertiser: ClusterAdvertiser | None = None
        self._port = 0
        self.reception: InboundListener | None = None
        self._early: dict[str, str] | None = {}
        """Key -> address of those that have dialled in before the cluster has begun."""

    def begin(self) -> None:
        """The cluster goes on: whoever has come early is heard now, after all that the journal knows of its nodes."""
        early, self._early = self._early or {}, None
        for key, address in early.items():
            if self.is_here(key):  # else it has left again, and arrives once more
                self._on_arrival(key, address)

    def _arrived(self, key: str, address: str) -> None:
        if self._early is None:
            self._on_arrival(key, address)
        else:
            self._early[key] = address

    def restore(self) -> None:
        """After a restart of the coordinator: listen where those who dialled its predecessor look for it."""
        if not self._core.state.reception or self.reception is not None:
            return  # a head listens already
        try:
            self._listen(self._core.state.reception)
        except OSError as error:
            self._core.tell("error", f"peers that dialled this cluster cannot come back: {error}")

    def _listen(self, port: int) -> None:
        """Bind the reception at ``port``, or (0) at any free one."""
        if self._gate is None:
            self._gate = Gate(self._context)
        reception = InboundListener(
            self._context,
            f"tcp://0.0.0.0:{port}",
            self._identity,
            authorise=self._known,
            on_arrival=self._arrived,
            enlisting=self._enlisting(),
            gate=self._gate,
        )
        self._port = reception.start()
        self.reception = reception

    def _known(self, key: str) -> str | None:
        """Whose key this is, for peers that may come in."""
        if (entry := self._trust.store.find(key)) is not None:
            return entry.name
        return "a launch" if self._enlisting().is_launch(key) else self._trust.launched(key)

    def listen(self) -> int:
        """The port where peers dial in, open from now on.

        Raises:
            OSError: it cannot be had.
        """
        state = self._core.state
        if self.reception is None:
            self._listen(state.reception)
        if self._port != state.reception:
            self._core.record(e.DoorOpened(reception=self._port, pairing=state.pairing))
        return self._port

    def is_here(self, key: str) -> bool:
        """The peer with ``key`` has a connection."""
        return self.reception is not None and self.reception.is_here(key)

    def revoke(self, key: str) -> None:
        """Cut the connection of a peer that is trusted no more."""
        if self.reception is not None:
            self.reception.revoke(key)

    # ---- the invitation

    async def invite(self, request: Invite) -> Invitation:
        """Open a code for peers that dial, or close it.

        Raises:
            RequestError: an unusable code or time, or a port that cannot be had.
        """
        if request.close:
            self.close_invitation()
            return Invitation(addresses=[], code="", minutes=0.0)
        if not (math.isfinite(request.minutes) and 0 < request.minutes <= MOST_MINUTES):
            raise RequestError(f"--minutes {request.minutes:g}: use more than 0 and at most {MOST_MINUTES} (a week)")
        try:
            code = read_code(request.code) if request.code else ""
        except ValueError as error:
            raise RequestError(str(error)) from None
        current = self._host.code if self._host is not None else None
        if current is None or (code and code != current.code):
            try:
                self._open(code or new_code(), request.minutes)
            except OSError as error:
                raise RequestError(f"this cluster cannot invite peers: {error}") from None
        return self._invitation()

    def _open(self, code: str, minutes: float) -> None:
        state = self._core.state
        if self.reception is None:
            self._listen(state.reception)
        if self._host is None:
            self._host = PairingHost(
                self._context,
                f"tcp://0.0.0.0:{state.pairing}",
                gate=self._gate,
                here=self._here,
                on_paired=self._paired,
                on_attempt=lambda line: self._core.tell("info", f"invitation: {line}"),
            )
            self._host.on_closed = self._closed
        pairing = self._host.open(OpenCode(code, single_use=False, valid_s=minutes * 60))
        if (self._port, pairing) != (state.reception, state.pairing):
            self._core.record(e.DoorOpened(reception=self._port, pairing=pairing))
        if self._advertiser is None:
            self._advertiser = ClusterAdvertiser(state.cluster, owner(), self._identity.public_key, self._port, pairing)
            self._advertiser.start()
        self._core.tell("info", f"peers may join with a code for {minutes:g} minutes: %cluster invite shows how")

    def _here(self) -> Here:
        return Here(
            protocol=PROTOCOL_VERSION, role="cluster", name=self._core.state.cluster, owner=owner(),
            key=self._identity.public_key, port=self._port,
        )  # fmt: skip

    def _paired(self, partner: Partner) -> str | None:
        """A peer knew the code: trust it, and let it dial in."""
        store = self._trust.store
        known = store.find(partner.key)
        entry = Trusted(
            partner.name, partner.key, partner.owner, known.address if known is not None else "", time.time()
        )
        try:
            store.add(entry)
        except ValueError as error:
            self._core.tell("error", f"peer {partner.name!r} of {partner.owner} was not let in: {error}")
            return str(error)
        self._core.tell("info", f"paired with {partner.name} of {partner.owner}, which comes from {partner.host}")
        return None

    def _closed(self, reason: str) -> None:
        self._core.tell("info", f"the invitation is over: {reason}. %cluster invite opens another one")
        self._stop_advertising()

    def close_invitation(self) -> None:
        """Let nobody else join; who came stays."""
        if self._host is not None and self._host.is_open:
            self._host.close()
            self._core.tell("info", "the invitation was closed; peers that came stay")
        self._stop_advertising()

    def _stop_advertising(self) -> None:
        advertiser, self._advertiser = self._advertiser, None
        if advertiser is not None:
            self._core.spawn(_in_thread(advertiser))
        self._core.dirty()

    def _invitation(self) -> Invitation:
        code = self._host.code if self._host is not None else None
        if code is None:
            return Invitation(addresses=[], code="", minutes=0.0)
        return Invitation(
            addresses=[f"{address}:{self._core.state.pairing}" for address in reachable_addresses()],
            code=code.code,
            minutes=round((code.seconds_left or 0.0) / 60, 1),
        )

    def view(self) -> str:
        """``HOST:PORT CODE`` while peers may join, else empty."""
        invitation = self._invitation()
        return f"{invitation.addresses[0]} {invitation.code}" if invitation.code else ""

    async def close(self) -> None:
        """Listen no more."""
        if self._host is not None:
            self._host.close()
        if self._advertiser is not None:
            await _in_thread(self._advertiser)
        if self.reception is not None:
            self.reception.close()
        if self._gate is not None:
            self._gate.close()


async def _in_thread(advertiser: ClusterAdvertiser) -> None:
    """Its goodbye takes a moment."""
    await asyncio.to_thread(advertiser.close)
