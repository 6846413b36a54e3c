"""Hosts that an engine starts, as views ask for them."""

import time
from collections.abc import Callable

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.requests import RunningCluster
from notebook_cluster.client.stream import wait
from notebook_cluster.protocol.launches import LaunchView, ShrinkLaunches, StartLaunch
from notebook_cluster.protocol.state import ClusterView

PENDING_S = 5.0
"""How long hosts that are not running are waited for: they may be pending for days."""
LOOK_S = 0.2
COMING_S = 60.0
"""How long hosts that run are waited for while none of them comes in."""


class Launching(RunningCluster):
    """The part of :class:`.cluster.Cluster` that asks engines for hosts."""

    def grow(
        self,
        on: str,
        hosts: int = 0,
        *,
        gpus: int = 0,
        nodes_per_host: int = 0,
        time: str = "",
        partition: str = "",
        setup: str = "",
        address: str = "",
        folder: str = "",
        on_progress: Callable[[str], None] | None = None,
    ) -> LaunchView:
        """Have an engine start ``hosts`` more hosts, and wait for those that start at once; the others join when they
        do. Returns how it stands then.

        Args:
            on: ``slurm``, ``ssh:gpu1,gpu2`` (names of ~/.ssh/config), or what another package adds.
            hosts: how many; of ssh those that are named.
            gpus: of each host; 0: whole hosts.
            nodes_per_host: on each of them; 0: one for each GPU that it may use, or one on the processor.
            time: how long, as the engine writes it (``2:00:00``); its own default without.
            partition: of the engine.
            setup: a shell line that each host runs first, as ``source ~/venv/bin/activate``.
            address: of this machine, for the hosts; without, they try all that it has.
            folder: one that the hosts share with this machine; without, this user's data folder.
            on_progress: called with one line for each thing that happens.

        Raises:
            ClusterError: the engine does not take it, or all its hosts have ended before one came.
        """
        request = StartLaunch(
            on=on, hosts=hosts, gpus=gpus, time=time, partition=partition, setup=setup, address=address, folder=folder,
            nodes_per_host=nodes_per_host, more=True,
        )  # fmt: skip
        return self._launch(request, on_progress or (lambda text: None))

    def shrink(self, hosts: int) -> list[str]:
        """Give so many hosts back to their engines: those that have not come first, then those of the highest ranks.
        Returns their names."""
        return wait(self._request(ShrinkLaunches(hosts=hosts), list[str]))

    def launches(self) -> list[LaunchView]:
        """What engines were asked for and is not over."""
        return [launch for launch in self.state().launches if launch.condition != "ended"]

    def _launch_once(self, request: StartLaunch, say: Callable[[str], None]) -> None:
        """As :meth:`grow`, unless hosts of this engine are there or on their way: a notebook that is run again."""
        engine = request.on.partition(":")[0]
        there = [launch for launch in self.launches() if launch.name.split()[0] == engine]
        if there:
            say(f"{there[-1].text}: there already, %cluster grow --on {request.on} asks for more")
        else:
            self._launch(request, say)

    def _launch(self, request: StartLaunch, say: Callable[[str], None]) -> LaunchView:
        name: str = wait(self._request(request, str))
        last = self._come_in(name, say)
        if last.condition == "ended":
            raise ClusterError(last.text)
        return last

    def _come_in(self, name: str, say: Callable[[str], None]) -> LaunchView:
        """How the launch stands when nothing more is to be waited for; each change is said."""
        said, changed = "", time.monotonic()
        while True:
            now = self._launch_in(self.state(), name)
            if now.text != said:
                said, changed = now.text, time.monotonic()
                say(now.text)
            patience = COMING_S if now.running > now.joined else PENDING_S
            there = now.condition == "ended" or 0 < now.hosts == now.joined
            if there or time.monotonic() - changed > patience:
                return now
            time.sleep(LOOK_S)

    def _launch_in(self, state: ClusterView, name: str) -> LaunchView:
        return next(launch for launch in state.launches if launch.launch == name)
