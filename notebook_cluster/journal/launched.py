"""What the cluster's state has of launches: hosts that engines were asked for, and who has come."""

import msgspec

from notebook_cluster.journal import events as e

LaunchEvent = e.LaunchOrdered | e.LaunchAccepted | e.HostEnlisted | e.HostLeft | e.LaunchEnded


class LaunchedHost(msgspec.Struct, frozen=True):
    """The agent that has a place of a launch."""

    name: str
    key: str
    start: int


class LaunchRecord(msgspec.Struct, frozen=True):
    """One launch. ``handle`` is empty until its engine has accepted it, ``ended`` until it is over."""

    launch: str
    on: str
    wanted: int
    """Hosts that were asked for."""
    key: str
    folder: str
    nodes_per_host: int = 0
    handle: str = ""
    hosts: dict[int, LaunchedHost] = {}
    """Place -> who has it."""
    given_up: tuple[int, ...] = ()
    """Places that nobody takes any more."""
    ended: str | None = None

    @property
    def engine(self) -> str:
        """``slurm`` of ``slurm``, ``ssh`` of ``ssh:gpu1,gpu2``."""
        return self.on.partition(":")[0]

    @property
    def open_places(self) -> list[int]:
        """Those that are still wanted."""
        return [place for place in range(self.wanted) if place not in self.given_up]


def apply_to_launches(launches: dict[str, LaunchRecord], event: LaunchEvent) -> dict[str, LaunchRecord]:
    """``launches`` after ``event``. Pure; see :func:`.state.apply`."""
    if isinstance(event, e.LaunchOrdered):
        ordered = LaunchRecord(event.launch, event.on, event.hosts, event.key, event.folder, event.nodes_per_host)
        return {**launches, event.launch: ordered}
    before = launches[event.launch]
    match event:
        case e.LaunchAccepted():
            after = msgspec.structs.replace(before, handle=event.handle)
        case e.HostEnlisted():
            host = LaunchedHost(event.name, event.key, event.start)
            after = msgspec.structs.replace(before, hosts={**before.hosts, event.place: host})
        case e.HostLeft():
            hosts = {place: host for place, host in before.hosts.items() if place != event.place}
            given_up = before.given_up
            if event.given_up and event.place not in given_up:
                given_up = (*given_up, event.place)
            after = msgspec.structs.replace(before, hosts=hosts, given_up=given_up)
        case e.LaunchEnded():
            after = msgspec.structs.replace(before, ended=event.reason, hosts={})
    return {**launches, event.launch: after}
