"""The agent: one long-lived process on a peer that serves the clusters of trusted coordinators."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from notebook_cluster.agent.clusters import Clusters
from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.events import AgentReady, SharingEvent, Tell
from notebook_cluster.agent.heads import Heads
from notebook_cluster.agent.kernels.programs import Watchdog
from notebook_cluster.agent.limits import SharingLimits
from notebook_cluster.agent.machine import host_addresses, package_versions
from notebook_cluster.agent.resources import Resources
from notebook_cluster.agent.settings import AgentSettings, lock_data_folder
from notebook_cluster.agent.sharing.admission import Admission
from notebook_cluster.agent.sharing.coordinators import Coordinators
from notebook_cluster.agent.sharing.presence import Presence, Sensors, SleepWatch
from notebook_cluster.agent.sharing.service import SharingService
from notebook_cluster.link import DialOut, LinkSettings, Listener
from notebook_cluster.pairing import PairingError
from notebook_cluster.security import (
    Gate,
    Identity,
    Trusted,
    announce,
    fingerprint,
    load_identity,
    new_identity,
    private_directory,
    private_socket_directory,
    withdraw,
)

log = logging.getLogger(__name__)

_SERIOUS = ("attempt", "code-dead", "trust-removed", "limit", "warning")
_TRUST_S = 0.5
"""Between two looks at whom the agent trusts."""
_SAMPLE_S = 1.0
_LOOK_EVERY = 5
"""Samples between two looks at what changes rarely: addresses, leases of other agents, mDNS."""


class Agent:
    """Starts with :meth:`run`, ends with :meth:`stop` (or by itself when it is private and has no cluster left).

    Args:
        on_event: hears what happens; see :class:`.events.SharingEvent`.
        devices, sensors, sleep: what this machine has and tells; given by tests.
    """

    def __init__(
        self,
        settings: AgentSettings,
        link_settings: LinkSettings | None = None,
        devices: Devices | None = None,
        *,
        on_event: Tell = lambda event: None,
        sensors: Sensors | None = None,
        sleep: SleepWatch | None = None,
    ) -> None:
        self._settings = settings
        self._devices = devices or Devices()
        self._link_settings = link_settings
        self._on_event = on_event
        self._sensors = sensors or Sensors()
        self._sleep = sleep or SleepWatch()
        self._presence = Presence(self._sensors)
        self._admission = Admission(settings.name, settings.limits, self._presence, self._tell)
        self._watching: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._reason = ""
        self._sharing: SharingService | None = None
        self._sharing_limits: SharingLimits | None = None
        self._leaving = False
        self._to_head: DialOut | None = None

    async def run(self, on_ready: Callable[[AgentReady], None]) -> str:
        """Serve until stopped; returns the reason of the end.

        Raises:
            OSError: a port is taken, an agent of this name runs on this machine, or the cluster to go to cannot be
                joined; one line with the way out.
            ValueError: the code is unusable, or the key of the cluster to go to has changed.
        """
        settings = self._settings
        private_directory(settings.directory)
        lock = None if settings.serves_one else lock_data_folder(settings)
        identity = new_identity() if settings.serves_one else load_identity(settings.directory)
        self._coordinators = Coordinators(settings.directory, head_key=settings.head_key)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        gate = Gate(context)
        self._listener = Listener(
            context,
            f"tcp://{settings.bind}:{settings.port}",
            identity,
            authorise=self._coordinators.authorise,
            on_session=lambda session: self._clusters.new_session(session),
            settings=self._link_settings,
            gate=gate,
            objection=self._coordinators.objection,
            succeeds=self._coordinators.succeeds,
        )
        try:
            port = self._listener.start()
            await self._serve(identity, context, gate, port, on_ready)
        finally:
            gate.close()
            context.destroy(linger=0)
            if lock is not None:
                lock.close()
        return self._reason

    def stop(self, reason: str) -> None:
        """End: say farewell to every coordinator, end all kernels."""
        if not self._stopping.is_set():
            self._reason = reason
            log.info("ends: %s", reason)
            self._stopping.set()

    def leave(self, reason: str) -> None:
        """End as :meth:`stop`, after a checkpoint; told twice, without."""
        if self._leaving or self._sharing_limits is None:
            self.stop(reason)
        else:
            self._leaving = True
            self._sharing_limits.leave(reason)

    # ---- for the person at this machine --------------------------------------------------------------------------

    def answer(self, ticket: int, allowed: bool) -> bool:
        """Say whether the node of a ``confirm`` event may start; False when nobody waits for it any more."""
        return self._admission.answer(ticket, allowed)

    def new_code(self) -> str:
        """Open a fresh code, for one coordinator, in the place of the one that is open; returns it.

        Raises:
            OSError: the pairing port is taken.
            RuntimeError: this agent is private, or has ended.
        """
        return self._shared().codes.new()

    async def join(self, address: str, code: str = "") -> Trusted:
        """Go to the cluster at ``address`` ("HOST:PORT") and serve it from here on; ``code`` may be empty when it was
        paired before. Returns whose it is.

        Raises:
            PairingError: it cannot be reached, the code is wrong, or it is not known and there is no code.
            ValueError: its owner is known with another key, or ``address`` is none.
            RuntimeError: this agent is private, or has ended.
        """
        return await self._shared().join(address, code)

    def _shared(self) -> SharingService:
        if self._sharing is None or self._stopping.is_set():
            raise RuntimeError(f"{self._settings.name} is not shared: start 'notebook-cluster share' first")
        return self._sharing

    # ---- start and end -----------------------------------------------------------------------------------------

    async def _serve(
        self,
        identity: Identity,
        context: "zmq.Context[zmq.Socket[bytes]]",
        gate: Gate,
        port: int,
        on_ready: Callable[[AgentReady], None],
    ) -> None:
        """From the open port to the end of the last kernel."""
        settings = self._settings
        sockets = private_socket_directory()
        self._resources = self._make_resources(sockets)
        self._heads = None if settings.serves_one else Heads(self._resources, self._coordinators)
        self._clusters = Clusters(
            self._resources, self._coordinators, self._cluster_ended, self._heads,
            self._follow if settings.private else None,
        )  # fmt: skip
        sharing_limits = SharingLimits(
            self._clusters, self._resources, self._presence, lease=settings.lease, keep_after=settings.keep_after,
            stop=self.stop,
        )  # fmt: skip
        announcement = None
        if settings.launch is None:
            announcement = announce("agent", identity.public_key, settings.name)
        try:
            if not settings.private:
                self._sharing = SharingService(
                    settings,
                    identity,
                    context,
                    coordinators=self._coordinators,
                    listener=self._listener,
                    port=port,
                    gate=gate,
                    devices=self._devices,
                    tell=self._tell,
                )
                if not await self._open_to_others(self._sharing):
                    return
            self._sharing_limits = sharing_limits
            on_ready(self._ready(identity.public_key, port))
            await self._warm_up()
            if self._sharing is not None and settings.launch is None:
                self._sharing.announcer.start()
            watches = (self._watch_trust(), self._watch_machine(sharing_limits))
            self._watching = [asyncio.create_task(watch) for watch in watches]
            if self._heads is not None:
                await self._heads.recover()
            if settings.head_key:
                self._follow(settings.head_key, settings.dial)
            await self._stopping.wait()
        finally:
            if announcement is not None:
                withdraw(announcement)
            sharing_limits.close()
            sharing = [self._sharing.close()] if self._sharing is not None else []
            await asyncio.gather(self._end_everything(), *sharing)
            self._resources.close()

    async def _open_to_others(self, sharing: SharingService) -> bool:
        """False: it was to end before it could begin."""
        starting = asyncio.ensure_future(sharing.start())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            return False
        try:
            starting.result()
        except PairingError as error:
            raise OSError(str(error)) from None
        return True

    def _ready(self, public_key: str, port: int) -> AgentReady:
        codes = self._sharing.codes if self._sharing is not None else None
        return AgentReady(
            public_key=public_key,
            port=port,
            pid=os.getpid(),
            name=self._settings.name,
            pairing_port=codes.port if codes is not None else 0,
            code=codes.code if codes is not None else "",
            hosts=host_addresses(),
            fingerprint=fingerprint(public_key),
        )

    def _make_resources(self, sockets: Path) -> Resources:
        return Resources(
            peer=self._settings.name,
            devices=self._devices,
            watchdog=Watchdog(sockets),
            sockets=sockets,
            directory=self._settings.directory,
            leases_changed=lambda: self._clusters.tell_peer_info(),
            admission=self._admission,
            tell=self._tell,
        )

    async def _warm_up(self) -> None:
        """What the first node needs, done after the agent can be reached: look for devices, load jupyter_client."""
        await asyncio.to_thread(self._look_around)
        log.info("devices: %s", self._devices.summary())
        self._resources.devices_known.set()
        self._clusters.tell_peer_info()

    def _look_around(self) -> None:
        self._devices.probe()
        import jupyter_client.manager  # noqa: F401

        self._clusters.packages = package_versions()
        self._clusters.portable = self._sensors.battery() is not None

    async def _end_everything(self) -> None:
        for task in self._watching:
            task.cancel()
        if self._heads is not None:
            await self._heads.close()
        await self._clusters.end_all(self._reason or "the agent ended")
        await self._listener.close(flush=1.0)
        self._clusters.close()

    def _follow(self, key: str, address: str) -> None:
        """Of a private agent: the coordinator with ``key`` is this user's head, and has its reception at ``address``;
        empty: there is none. ValueError: it is no address."""
        before, self._to_head = self._to_head, self._listener.dial_out(address, key) if key else None
        self._coordinators.follow(key)
        if before is not None:
            before.close()

    def _cluster_ended(self) -> None:
        if self._settings.serves_one and not self._clusters.hosts():
            self.stop("its cluster is over")

    # ---- what happens by the clock -----------------------------------------------------------------------------

    async def _watch_trust(self) -> None:
        """A removed trust is in force at once, whatever else takes its time."""
        while True:
            await asyncio.sleep(_TRUST_S)
            try:
                self._check_trust()
            except Exception:
                log.exception("could not look whom this machine trusts")

    async def _watch_machine(self, sharing_limits: SharingLimits) -> None:
        look = 0
        while True:
            await asyncio.sleep(_SAMPLE_S)
            look += 1
            try:
                self._check_sleep()
                await sharing_limits.check()
                await self._clusters.sample()
                if look % _LOOK_EVERY == 0:
                    self._clusters.tell_peer_info()
                    await asyncio.to_thread(self._resources.programs.sweep)
                    if self._sharing is not None and self._settings.launch is None:
                        self._sharing.announcer.check()
            except Exception:
                # One look that fails (a device unplugged) must not end the ones after it.
                log.exception("could not look after this machine")
            if self._settings.serves_one and not self._clusters.hosts() and self._is_alone():
                self.stop("no coordinator came within the lease")

    def _is_alone(self) -> bool:
        """The monotonic clock stands still while a machine sleeps, so this counts awake time only."""
        return time.monotonic() - self._clusters.empty_since > self._settings.lease

    def _check_trust(self) -> None:
        for entry, reason in self._coordinators.take_removed():
            self._tell(SharingEvent("trust-removed", f"{reason}: its kernels are ended", owner=entry.owner))
            self._listener.revoke(entry.key)
            if self._sharing is not None:
                self._sharing.forget(entry.key)
            self._clusters.end_those_of(entry.key, reason)
            if self._heads is not None:
                self._heads.end_soon_those_of(entry.key)

    def _check_sleep(self) -> None:
        seconds = self._sleep.check()
        if seconds:
            self._tell(SharingEvent("slept", f"this machine was asleep for {seconds:.0f} s"))
            self._clusters.tell_slept(seconds)

    def _tell(self, event: SharingEvent) -> None:
        log.log(logging.WARNING if event.kind in _SERIOUS else logging.INFO, "%s", event.text)
        try:
            self._on_event(event)
        except Exception:
            # A terminal that is gone must not end the sharing.
            log.exception("could not show: %s", event.text)
