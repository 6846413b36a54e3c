"""The agent: one long-lived process on a peer that serves the clusters of trusted coordinators."""

import asyncio
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.host import GRACE_S, ClusterHost, Resources
from notebook_cluster.agent.leases import DeviceLeases
from notebook_cluster.agent.machine import describe, machine_id, package_versions
from notebook_cluster.agent.sampling import MachineSample
from notebook_cluster.agent.settings import AgentSettings, Ready, lock_data_folder
from notebook_cluster.agent.watchdog import Watchdog
from notebook_cluster.link import Condition, LinkSettings, Listener, Session
from notebook_cluster.protocol.peer import Farewell, PeerInfo, Released
from notebook_cluster.security import (
    announce,
    load_identity,
    new_identity,
    private_directory,
    private_socket_directory,
    runtime_directory,
    same_user_keys,
    withdraw,
)

if TYPE_CHECKING:
    from notebook_cluster.discovery import Advertiser

log = logging.getLogger(__name__)

_SAMPLE_S = 1.0
_LOOK_EVERY = 5
"""Samples between two looks at what changes rarely: addresses, leases of other agents, mDNS."""


class Agent:
    """Starts with :meth:`run`, ends with :meth:`stop` (or by itself when it is private and has no cluster left)."""

    def __init__(
        self, settings: AgentSettings, link_settings: LinkSettings | None = None, devices: Devices | None = None
    ) -> None:
        self._settings = settings
        self._devices = devices or Devices()
        self._link_settings = link_settings
        self._hosts: dict[str, ClusterHost] = {}
        self._hosts_made = 0
        self._sent: dict[str, PeerInfo] = {}
        self._packages: dict[str, str] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._sampling: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._reason = ""
        self._advertiser: Advertiser | None = None
        self._problem = ""
        self._empty_since = time.monotonic()

    async def run(self, on_ready: Callable[[Ready], None]) -> str:
        """Serve until stopped; returns the reason of the end.

        Raises:
            OSError: the port is taken, or an agent of this name runs on this machine; one line with the way out.
        """
        settings = self._settings
        private_directory(settings.directory)
        lock = None if settings.private else lock_data_folder(settings)
        identity = new_identity() if settings.private else load_identity(settings.directory)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._listener = Listener(
            context,
            f"tcp://{settings.bind}:{settings.port}",
            identity,
            authorise=lambda key: same_user_keys("coordinator").get(key),
            on_session=self._new_session,
            settings=self._link_settings,
        )
        port = self._listener.start()
        sockets = private_socket_directory()
        self._resources = self._make_resources(sockets)
        announcement = announce("agent", identity.public_key, settings.name)
        advertising: asyncio.Task[None] | None = None
        try:
            on_ready(Ready(public_key=identity.public_key, port=port, pid=os.getpid(), name=settings.name))
            await self._warm_up()
            if not settings.private:
                advertising = asyncio.create_task(self._advertise(identity.public_key, port))
            self._sampling = asyncio.create_task(self._sample_always())
            await self._stopping.wait()
        finally:
            withdraw(announcement)
            await asyncio.gather(self._end_everything(), self._withdraw_from_network(advertising))
            self._resources.watchdog.close()
            self._resources.leases.close()
            # Kernels that had to be killed leave sockets behind.
            shutil.rmtree(sockets, ignore_errors=True)
            self._resources.context.destroy(linger=0)
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

    # ---- start and end -----------------------------------------------------------------------------------------

    def _make_resources(self, sockets: Path) -> Resources:
        # The kernels' sockets have a context of their own: one I/O thread less in the way of the link.
        return Resources(
            peer=self._settings.name,
            devices=self._devices,
            devices_known=asyncio.Event(),
            leases=DeviceLeases(runtime_directory() / "leases", machine_id()),
            watchdog=Watchdog(sockets),
            context=zmq.Context(),
            sockets=sockets,
            directory=self._settings.directory,
            leases_changed=self._tell_peer_info,
        )

    async def _warm_up(self) -> None:
        """What the first node needs, done after the agent can be reached: look for devices, load jupyter_client."""
        await asyncio.to_thread(self._look_around)
        log.info("devices: %s", self._devices.summary())
        self._resources.devices_known.set()
        self._tell_peer_info()

    def _look_around(self) -> None:
        self._devices.probe()
        import jupyter_client.manager  # noqa: F401

        self._packages = package_versions()

    async def _advertise(self, public_key: str, port: int) -> None:
        """Say on the network that this peer is here. A network without mDNS must not end the sharing."""

        def start() -> "Advertiser":
            from notebook_cluster.discovery import Advertiser

            advertiser = Advertiser(self._settings.name, public_key, port, self._devices.summary())
            advertiser.start()
            return advertiser

        try:
            self._advertiser = await asyncio.to_thread(start)
        except Exception as error:
            log.warning("this machine is not announced over mDNS: %s", error)

    def _check_visibility(self) -> None:
        problem = self._advertiser.problem if self._advertiser is not None else ""
        if problem and problem != self._problem:
            log.warning("this machine cannot be seen over mDNS: %s", problem)
        self._problem = problem

    async def _withdraw_from_network(self, advertising: "asyncio.Task[None] | None") -> None:
        if advertising is not None:
            await advertising
        if self._advertiser is not None:
            await asyncio.to_thread(self._advertiser.close)

    async def _end_everything(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
        # Clusters that are being ended already.
        await asyncio.gather(*self._ending, return_exceptions=True)
        hosts = list(self._hosts.values())
        for host in hosts:
            host.session.send(Farewell(reason=self._reason or "the agent ended"))
        await asyncio.gather(*(host.end_kernels("agent ended", asked=False, grace=GRACE_S / 2) for host in hosts))
        await self._listener.close(flush=1.0)
        for host in hosts:
            host.close()

    # ---- sessions ----------------------------------------------------------------------------------------------

    def _new_session(self, session: Session) -> None:
        self._hosts_made += 1
        host = ClusterHost(session, self._resources, self._hosts_made, self._released)
        self._hosts[session.cluster] = host
        session.on_message = host.handle
        session.on_condition = lambda condition, reason: self._condition(host, condition, reason)
        session.on_restart = lambda: self._introduce(host)
        log.info("cluster %s of %s is served", host.name, same_user_keys("coordinator").get(session.key, "its user"))
        self._introduce(host)

    def _introduce(self, host: ClusterHost) -> None:
        """What a coordinator that knows nothing yet must hear first."""
        host.session.send(host.inventory())
        self._sent.pop(host.session.cluster, None)
        self._tell_peer_info()

    def _condition(self, host: ClusterHost, condition: Condition, reason: str) -> None:
        log.info("cluster %s is %s%s", host.name, condition, f": {reason}" if reason else "")
        if condition == "connected" and host.was_silent:
            # The coordinator may have counted this peer's nodes as lost: say which are still here.
            self._introduce(host)
        host.was_silent = condition != "connected"

    def _released(self, host: ClusterHost) -> None:
        self._end_soon(host, "stopped", asked=True)

    def _end_soon(self, host: ClusterHost, reason: str, *, asked: bool) -> None:
        task = asyncio.create_task(self._end_cluster(host, reason, asked=asked))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_cluster(self, host: ClusterHost, reason: str, *, asked: bool) -> None:
        if self._hosts.pop(host.session.cluster, None) is not host:
            return
        self._sent.pop(host.session.cluster, None)
        await host.end_kernels(reason, asked=asked)
        host.close()
        log.info("cluster %s is over here: %s", host.name, reason)
        if asked:
            host.session.send(Released())
            await host.session.conversation.flushed(1.0)
        host.session.close()
        self._empty_since = time.monotonic()
        if self._settings.private and not self._hosts:
            self.stop("its cluster is over")

    # ---- what coordinators are told ----------------------------------------------------------------------------

    def _tell_peer_info(self) -> None:
        """PeerInfo to every coordinator that has not heard exactly this."""
        if not self._resources.devices_known.is_set():
            return
        info = describe(
            self._settings.name, self._devices, self._packages, self._resources.leases.holders(self._accelerators())
        )
        for cluster, host in self._hosts.items():
            if self._sent.get(cluster) != info:
                self._sent[cluster] = info
                host.session.send(info)

    def _accelerators(self) -> list[str]:
        return [device.id for device in self._devices.accelerators()]

    async def _sample_always(self) -> None:
        round_number = 0
        while True:
            await asyncio.sleep(_SAMPLE_S)
            self._check_leases()
            round_number += 1
            if round_number % _LOOK_EVERY == 0:
                self._tell_peer_info()
                self._check_visibility()
            listening = [host for host in self._hosts.values() if host.session.condition == "connected"]
            if not listening:
                continue
            try:
                machine = await asyncio.to_thread(MachineSample, self._devices)
                for host in listening:
                    host.session.send(host.sample(machine), droppable=True)
            except Exception:
                # A sample that fails (a device unplugged) must not end the ones after it.
                log.exception("could not sample this machine")

    def _check_leases(self) -> None:
        """The monotonic clock stands still while a machine sleeps, so this counts awake time only."""
        now = time.monotonic()
        for host in list(self._hosts.values()):
            silent = now - host.session.last_heard
            if silent > self._settings.lease:
                log.warning(
                    "cluster %s: no word from its coordinator for %.0f s, its kernels are ended", host.name, silent
                )
                self._end_soon(host, "its coordinator was silent for longer than the lease", asked=False)
        if self._settings.private and not self._hosts and now - self._empty_since > self._settings.lease:
            self.stop("no coordinator came within the lease")


def run_agent(settings: AgentSettings, on_ready: Callable[[Ready], None]) -> str:
    """Run an agent in this process until SIGTERM, SIGINT or SIGHUP, or its own end; returns the reason.

    Raises as :meth:`Agent.run`.
    """

    async def serve() -> str:
        agent = Agent(settings)
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            # nohup ignores it, so that sharing goes on after the terminal was closed.
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, agent.stop, f"stopped by {number.name}")
        return await agent.run(on_ready)

    return asyncio.run(serve())
