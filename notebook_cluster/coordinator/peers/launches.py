"""Hosts that engines start for this cluster: asks for them, lets them in, says how they stand, gives them back."""

import asyncio
import secrets
import time
from pathlib import Path

from notebook_cluster.coordinator.core import Core
from notebook_cluster.coordinator.nodes.membership import Membership
from notebook_cluster.coordinator.peers.invitation import InvitationHost
from notebook_cluster.coordinator.peers.launch_folders import KEY_FILE, forget_key, make_folder
from notebook_cluster.coordinator.peers.launched_hosts import LATE_S, Latecomers, LaunchedHosts
from notebook_cluster.coordinator.peers.links import PeerLinks
from notebook_cluster.discovery import reachable_addresses
from notebook_cluster.journal import events as e
from notebook_cluster.journal.launched import LaunchRecord
from notebook_cluster.launchers import (
    HostState,
    Launch,
    Launcher,
    LaunchError,
    LaunchOrder,
    LaunchState,
    find_launcher,
)
from notebook_cluster.protocol.launches import (
    MAX_HOSTS,
    MAX_NODES_PER_HOST,
    LaunchKey,
    LaunchView,
    ShrinkLaunches,
    StartLaunch,
)
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import Identity, new_identity, owner

STOP_S = 20.0
"""At the end of the cluster, for engines to take back what they were asked for."""
FIRST_PAUSE_S = 0.3
"""Between the first looks at a launch: it may start at once. The pause grows up to the launcher's own."""
_GONE = HostState("ended", "it is gone")
_MOST_SHOWN = 20


class Launches:
    """From the request of a view to the end of the last host. What is decided is in the journal: after a restart of the
    coordinator :meth:`recover` goes on with it."""

    def __init__(
        self,
        core: Core,
        *,
        links: PeerLinks,
        membership: Membership,
        invitation: InvitationHost,
        identity: Identity,
        lease: float,
    ) -> None:
        """``lease``: seconds without this coordinator after which a host leaves."""
        self._core = core
        self.hosts = LaunchedHosts(
            core, links=links, membership=membership, is_here=invitation.is_here, revoke=invitation.revoke
        )
        self._invitation = invitation
        self._identity = identity
        self._lease = lease
        self._launchers: dict[str, Launcher] = {}
        self._states: dict[str, LaunchState] = {}
        self._trouble: dict[str, str] = {}
        self._latecomers = Latecomers()

    # ---- requests of views

    async def start(self, request: StartLaunch) -> str:
        """Ask an engine for hosts; returns the launch's name once it has accepted that.

        Raises:
            RequestError: it does not, or some are there already; one line with the way out.
        """
        engine, _, where = request.on.partition(":")
        try:
            launcher = self._launcher(engine)
            hosts = request.hosts or launcher.hosts(where) or 1
        except LaunchError as error:
            raise RequestError(str(error)) from None
        _check(request, hosts)
        there = [record for record in self._alive() if record.engine == engine]
        if there and not request.more:
            more = f"%cluster grow --on {request.on} --hosts {hosts} asks for more, %cluster stop gives all back"
            raise RequestError(f"{self._view(there[-1]).text}: {more}")
        order = self._order(request, where, hosts)
        try:
            launch = await launcher.start(order)
        except Exception as error:
            self._core.record(e.LaunchEnded(launch=order.name, reason=_said(error)))
            # It may have been accepted all the same, when the engine did not answer in time.
            self._core.spawn(self._take_back(engine, Launch(order.name, "", hosts, order.folder)))
            raise RequestError(_said(error)) from None
        self._core.record(e.LaunchAccepted(launch=order.name, handle=launch.handle))
        self._core.tell("info", f"{engine} {launch.handle}: {_hosts(hosts)} asked for")
        self._core.spawn(self._watch(order.name))
        return order.name

    async def shrink(self, request: ShrinkLaunches) -> list[str]:
        """Give hosts back; one text for each.

        Raises:
            RequestError: there are not so many, or an engine does not take them.
        """
        rank = self.hosts.highest_rank
        places = [(record, place) for record in self._alive() for place in record.open_places]
        if not 1 <= request.hosts <= len(places):
            there = (
                f"engines started {_hosts(len(places))} of this cluster"
                if places
                else "no host of this cluster is from an engine"
            )
            raise RequestError(f"%cluster shrink {request.hosts}: {there}; %cluster remove NODE takes one node out")
        # Those that have not come first.
        places.sort(key=lambda row: (rank(row[0], row[1]) is not None, -(rank(*row) or 0), -row[1]))
        chosen: dict[str, list[int]] = {}
        said = []
        for record, place in places[: request.hosts]:
            chosen.setdefault(record.launch, []).append(place)
            host = record.hosts.get(place)
            said.append(host.name if host is not None else f"a host of {_title(record)} that had not come")
            self.hosts.leave(record.launch, place, "given back (%cluster shrink)", given_up=True)
        try:
            for name, given in chosen.items():
                record = self._record(name)
                await self._launcher(record.engine).stop(_launch(record), given)
        except LaunchError as error:
            raise RequestError(f"{', '.join(said)} left the cluster, but the engine goes on: {error}") from None
        finally:
            for name in chosen:
                self._end_if_over(name)
        return said

    def _order(self, request: StartLaunch, where: str, hosts: int) -> LaunchOrder:
        """Write down what is asked for, and the launch's key where its hosts read it."""
        cluster = self._core.state.cluster
        name, pair = f"{cluster[:40]}-{secrets.token_hex(4)}", new_identity()
        key = LaunchKey(
            cluster=cluster, owner=owner(), server_key=self._identity.public_key, public_key=pair.public_key,
            secret_key=pair.secret_key,
        )  # fmt: skip
        try:
            port = self._invitation.listen()
            folder = make_folder(request.folder, name, key)
        except OSError as error:
            raise RequestError(f"no hosts can be asked for: {error}") from None
        self._core.record(
            e.LaunchOrdered(
                launch=name,
                on=request.on,
                hosts=hosts,
                key=pair.public_key,
                folder=str(folder),
                nodes_per_host=request.nodes_per_host,
            )
        )
        addresses = request.address.split(",") if request.address else reachable_addresses()
        dial = ",".join(f"{address}:{port}" for address in addresses)
        argv = ("notebook-cluster", "share", "--dial", dial, "--lease", f"{self._lease:g}")
        return LaunchOrder(
            name=name, where=where, hosts=hosts, argv=argv, secret=folder / KEY_FILE, folder=folder, gpus=request.gpus,
            time=request.time, partition=request.partition, setup=request.setup,
        )  # fmt: skip

    # ---- what is there

    def views(self) -> list[LaunchView]:
        """The launches as panels show them."""
        return [self._view(record) for record in list(self._core.state.launches.values())[-_MOST_SHOWN:]]

    def _view(self, record: LaunchRecord) -> LaunchView:
        wanted, joined = record.open_places, self.hosts.joined(record)
        known = self._states.get(record.launch, LaunchState()).hosts
        running = sum(known.get(place, _GONE).condition == "running" for place in wanted)
        condition, text = "running", ""
        if record.ended is not None:
            condition, text, running, joined = "ended", record.ended, 0, 0
        elif not record.handle:
            condition, text = "starting", f"asked for {_hosts(record.wanted)}"
        else:
            condition = "running" if running == len(wanted) else "pending"
            text = f"{running} running" if running == len(wanted) else f"{running} of {len(wanted)} running"
            pending = [known[place] for place in wanted if place in known and known[place].condition == "pending"]
            if pending:
                reasons = ", ".join(dict.fromkeys(why for why in map(_why, pending) if why))
                text += f", pending: {reasons}" if reasons else ", pending"
            if running > joined:
                text += f", {joined} of them in the cluster"
            if record.launch in self._trouble:
                text += f" ({self._trouble[record.launch]})"
        return LaunchView(
            launch=record.launch, name=_title(record), condition=condition,  # type: ignore[arg-type]
            hosts=len(wanted), running=running, joined=joined, text=f"{_title(record)}: {text}",
        )  # fmt: skip

    def _alive(self) -> list[LaunchRecord]:
        return [record for record in self._core.state.launches.values() if record.ended is None]

    def _record(self, name: str) -> LaunchRecord:
        return self._core.state.launches[name]

    def _launcher(self, engine: str) -> Launcher:
        if engine not in self._launchers:
            self._launchers[engine] = find_launcher(engine)
        return self._launchers[engine]

    # ---- what becomes of it

    async def _watch(self, name: str) -> None:
        """Until the launch is over."""
        record, pause = self._record(name), FIRST_PAUSE_S
        launcher = self._launcher(record.engine)
        while self._record(name).ended is None:
            asked = time.monotonic()
            try:
                state = await launcher.state(_launch(record))
            except Exception as error:
                # Whatever an engine does: its hosts may be well, so it is asked again.
                self._note_trouble(name, _said(error))
            else:
                self._note_trouble(name, "")
                self._look(name, state, asked)
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, launcher.period)

    def _note_trouble(self, name: str, text: str) -> None:
        if text != self._trouble.get(name, ""):
            self._trouble.pop(name, None)
            if text:
                self._trouble[name] = text
                self._core.tell("warning", f"{_title(self._record(name))}: {text}; its hosts may be well")
            self._core.dirty()

    def _look(self, name: str, state: LaunchState, asked: float) -> None:
        """What the engine said when it was ``asked``: hosts that do not run any more have left."""
        record = self._record(name)
        state = self.hosts.placed(record, state)
        if state != self._states.get(name):
            self._states[name] = state
            self._core.dirty()
        ended: dict[str, tuple[list[str], bool]] = {}
        for place in record.open_places:
            now = state.hosts.get(place, _GONE)
            if now.condition == "running":
                continue
            over = now.condition == "ended"
            reason = now.reason.lower() if now.reason.isupper() else now.reason
            if self.hosts.was_in_before(record, place, asked):
                # A controller that was restarted may take a job for pending whose host is well.
                if over or not self.hosts.is_connected(record, place):
                    why = f"{_title(record)} {'has ended there' if over else 'is pending again'}"
                    self.hosts.leave(name, place, f"{why}: {reason}" if reason else why, given_up=over)
            elif over:
                self._core.record(e.HostLeft(launch=name, place=place, given_up=True))
            if over:
                ended.setdefault(reason, ([], now.failed))[0].append(now.host or f"host {place}")
        for reason, (who, failed) in ended.items():
            self._core.tell("error" if failed else "warning", f"{_title(record)}: {_all(who)} ended: {reason}")
        said = [f"{_all(who)}: {reason}" for reason, (who, _) in ended.items()]
        self._end_if_over(name, "; ".join(said if len(ended) > 1 else ended))
        self._name_late_ones(self._record(name), state)

    def _name_late_ones(self, record: LaunchRecord, state: LaunchState) -> None:
        """A host that runs and does not come cannot say why: it does not reach this machine, or is not set up."""
        places = [place for place in record.open_places if place not in record.hosts]
        running = [place for place in places if state.hosts.get(place, _GONE).condition == "running"]
        for place in self._latecomers.look(record.launch, running, time.monotonic()):
            log = Path(record.folder) / f"{place}.log"
            self._core.tell(
                "warning",
                f"{_title(record)}: {state.hosts[place].host or f'host {place}'} has run for {LATE_S:g} s and has not "
                f"come: does it reach port {self._core.state.reception} of this machine (--address names where)? What "
                f"it says is in {log if log.exists() else log.parent}",
            )

    def _end_if_over(self, name: str, reason: str = "") -> None:
        record = self._record(name)
        if record.ended is None and not record.open_places:
            self._core.record(e.LaunchEnded(launch=name, reason=reason or "given back"))
            forget_key(Path(record.folder))

    # ---- start and end of the coordinator

    def recover(self) -> None:
        """After a restart of the coordinator: what its predecessor asked for is still wanted, if it knew what the
        engine calls it."""
        for record in self._alive():
            if record.handle:
                self._core.spawn(self._watch(record.launch))
            else:
                self._core.record(
                    e.LaunchEnded(launch=record.launch, reason="the coordinator ended while it was asked")
                )
                self._core.spawn(self._take_back(record.engine, _launch(record)))

    async def close(self) -> None:
        """The cluster ends: no engine keeps anything of it."""
        await asyncio.gather(*(self._take_back(record.engine, _launch(record)) for record in self._alive()))

    async def _take_back(self, engine: str, launch: Launch) -> None:
        """What fails is said: nobody else looks after it."""
        try:
            async with asyncio.timeout(STOP_S):
                await self._launcher(engine).stop(launch)
        except Exception as error:
            why = f"{engine} has not answered within {STOP_S:g} s" if isinstance(error, TimeoutError) else _said(error)
            self._core.tell("error", f"{engine} {launch.handle or launch.name} may not have been taken back: {why}")
        finally:
            forget_key(launch.folder)


def _check(request: StartLaunch, hosts: int) -> None:
    """RequestError for values that no engine can use."""
    if not 1 <= hosts <= MAX_HOSTS:
        raise RequestError(f"--hosts {hosts}: use 1 to {MAX_HOSTS}")
    if not 0 <= request.gpus <= 64:
        raise RequestError(f"--gpus {request.gpus}: use 1 to 64 for each host, or leave it out")
    if not 0 <= request.nodes_per_host <= MAX_NODES_PER_HOST:
        raise RequestError(f"--nodes-per-host {request.nodes_per_host}: use 1 to {MAX_NODES_PER_HOST}, or leave it out")
    for option in ("time", "partition", "setup", "address"):
        value = getattr(request, option)
        if not value.isprintable() or len(value) > 2000 or (option != "setup" and (" " in value or value[:1] == "-")):
            form = "one line" if option == "setup" else "one word"
            raise RequestError(f"--{option} {value[:80]!r} cannot be used: it is {form}")


def _said(error: Exception) -> str:
    """What an engine says; of any other error what it is."""
    return str(error) if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"


def _launch(record: LaunchRecord) -> Launch:
    return Launch(record.launch, record.handle, record.wanted, Path(record.folder))


def _title(record: LaunchRecord) -> str:
    return f"{record.engine} {record.handle or record.launch}"


def _why(host: HostState) -> str:
    return f"{host.reason} (expected {host.expected})" if host.expected else host.reason


def _all(hosts: list[str]) -> str:
    return hosts[0] if len(hosts) == 1 else _hosts(len(hosts))


def _hosts(count: int) -> str:
    return f"{count} host{'' if count == 1 else 's'}"
