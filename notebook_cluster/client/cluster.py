"""``Cluster``, what people and views call, and the part of it that moves values and files."""

import concurrent.futures
import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from notebook_cluster.client import values
from notebook_cluster.client.benching import Benching
from notebook_cluster.client.collecting import HandedIn, collect_files
from notebook_cluster.client.connection import ClusterError, Connection
from notebook_cluster.client.files import Destination, find_sources, send_files
from notebook_cluster.client.found_peers import nobody_came
from notebook_cluster.client.launching import Launching
from notebook_cluster.client.past import Past
from notebook_cluster.client.requests import RunningCluster, add_request, how_to_join
from notebook_cluster.client.start import (
    DEFAULT_LEASE,
    ensure_coordinator,
    read_connection,
    reopen_window,
    running_clusters,
    was_killed,
)
from notebook_cluster.client.stream import Progress, wait
from notebook_cluster.client.taking_over import TakingOver
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.launches import StartLaunch
from notebook_cluster.protocol.state import ClusterView, NodeView, by_rank

HEARD_S = 3.0
"""For a coordinator that was started again to hear the machines of its nodes, before people are told of these."""


def _quiet(done: int, total: int) -> None:
    """Nobody wants to know how far it is."""


class Moving(RunningCluster):
    """The part of :class:`.cluster.Cluster` that moves values and files. Nothing from a node is unpickled."""

    def push(
        self,
        variables: Mapping[str, Any],
        targets: Sequence[str] = (),
        *,
        on_progress: Progress = _quiet,
    ) -> None:
        """Make ``variables`` (name -> value) variables on ``targets`` (node names; empty: all). Plain data, numpy,
        torch, MLX and pandas, at most 1 GiB each.

        Raises:
            ClusterError: a value does not travel, or a node cannot take it.
        """
        packed = [values.pack(name, value) for name, value in variables.items()]
        nodes = [node.name for node in self._nodes_of(targets)]
        for value in packed:
            if value.is_small:
                source = values.small_source(value)
            else:
                ticket = values.new_ticket()
                values.write_value(self, ticket, value, nodes, on_progress)
                source = values.take_source(value, ticket)
            ended, _ = self.run(source, targets, replay=value.is_small)
            failed = [f"{node}: {result.error_value}" for node, result in ended.results.items() if result.error_name]
            if failed or ended.status != "ok":
                raise ClusterError(f"cannot push {value.name!r} to {'; '.join(failed) or ended.status}")

    def pull(
        self,
        names: Sequence[str],
        targets: Sequence[str] = (),
        *,
        on_progress: Progress = _quiet,
    ) -> dict[str, dict[str, values.Pulled]]:
        """The variables ``names`` of ``targets`` (node names; empty: all): name -> node, in rank order -> what came.

        Raises:
            ClusterError: a node is gone, or what it sent is damaged or does not fit into memory.
        """
        ticket, nodes = values.new_ticket(), [node.name for node in self._nodes_of(targets)]
        ended, _ = self.run(values.give_source(ticket, names), nodes, replay=False)
        if ended.status != "ok":
            raise ClusterError(f"nothing was pulled: the cell that asks for it ended with {ended.status}")
        return values.read_values(self, ticket, names, nodes, on_progress)

    def send_files(
        self,
        path: str,
        targets: Sequence[str] = (),
        *,
        on_progress: Progress = _quiet,
    ) -> list[Destination]:
        """Put a file or folder into the working folder of ``targets`` (node names; empty: all), each folder once; what
        is there already is not sent.

        Raises:
            ClusterError: it does not exist or cannot be read; what fails at one place is in its ``error``.
        """
        return send_files(self, find_sources(path), self._nodes_of(targets), on_progress)

    def collect_files(
        self,
        pattern: str,
        into: str | Path,
        targets: Sequence[str] = (),
        *,
        on_progress: Progress = _quiet,
    ) -> list[HandedIn]:
        """Bring a file, a folder's files, or those that match ``pattern`` (``*``, ``?``, ``**``; relative) from the
        working folder of ``targets`` (node names; empty: all) to ``into/NODE/``. Their kernels may be busy, or dead. A
        file that is there and differs stays under a name with its time.

        Raises:
            ClusterError: ``pattern`` is unusable; what fails at one place is in its ``error``.
        """
        nodes = {node.name: node for node in by_rank(self.state().nodes)}
        if unknown := [name for name in targets if name not in nodes]:
            raise ClusterError(f"there is no node {unknown[0]!r} in cluster {self.name!r}: %cluster status")
        chosen = [node for name, node in nodes.items() if not targets or name in targets]
        return collect_files(self, pattern, Path(into), chosen, on_progress)

    def _nodes_of(self, targets: Sequence[str]) -> list[NodeView]:
        """The nodes with these names, or all that run, in rank order."""
        nodes = [node for node in self.state().nodes if node.rank is not None]
        known = {node.name for node in nodes}
        for name in targets:
            if name not in known:
                raise ClusterError(f"no node {name!r} runs in cluster {self.name!r}: %cluster status")
        if not nodes:
            raise ClusterError(f"cluster {self.name!r} has no running node: %cluster add PEER")
        return by_rank(node for node in nodes if not targets or node.name in targets)


class Cluster(Past, Moving, Launching, Benching, TakingOver):
    """A running cluster, as one view sees it. Every method blocks until the coordinator has answered and raises
    :class:`ClusterError` with one line that names the thing and the way out."""

    # ---- where clusters come from

    @classmethod
    def start(
        cls,
        name: str = "cluster",
        *,
        local: int | None = None,
        peers: Sequence[str] = (),
        nodes: int = 0,
        code: str = "",
        invite: bool = False,
        on: str = "",
        hosts: int = 0,
        gpus: int = 0,
        nodes_per_host: int = 0,
        time: str = "",
        partition: str = "",
        setup: str = "",
        address: str = "",
        folder: str = "",
        known: Sequence[str] | None = None,
        head: str = "",
        fresh: bool = False,
        directory: str | None = None,
        kind: str = "client",
        lease: float = DEFAULT_LEASE,
        agent_lease: float = 600.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> "Cluster":
        """Start cluster ``name``, or attach to it when it runs.

        Args:
            local: nodes on this machine; default 1 (with ``on`` 0), and none are added to a cluster that runs.
            peers: names, ``HOST:PORT``, or ``all`` for every trusted peer found over mDNS, also those found later.
            nodes: at least so many nodes in all; local ones fill up.
            code: pairs with peers that share with this code and are not trusted yet; alone it means ``peers`` all, with
                ``head`` that one.
            invite: also let peers join by themselves, with ``code`` (or one that is made): see :meth:`invite`.
            on, hosts, gpus, nodes_per_host, time, partition, setup, address, folder: have an engine start hosts, see
                :meth:`grow`; those that a cluster has from it already are enough.
            known: names or ``HOST:PORT`` of peers to know of without mDNS; default: NOTEBOOK_CLUSTER_PEERS.
            head: the peer (a name or ``HOST:PORT``) on which the coordinator runs, so that the cluster goes on without
                this machine; paired with ``code`` where that is needed.
            fresh: end a running cluster of this name first; clean kernels.
            directory: working directory of local nodes; default: the current one.
            lease, agent_lease: seconds, see the coordinator's settings.
            on_progress: called with one line for each thing that happens.

        Raises:
            ClusterError: what did not start, and why.
        """
        say = on_progress or (lambda text: None)
        if local is not None and not 0 <= local <= 64:
            raise ClusterError(f"--local {local}: use 0 to 64 local nodes")
        if nodes < 0 or nodes > 256:
            raise ClusterError(f"--nodes {nodes}: use 1 to 256")
        if fresh:
            file = read_connection(name)
            with contextlib.suppress(ClusterError):  # a journal that cannot be read tells of no nodes
                file = file or reopen_window(name)
                if file is None and was_killed(name):
                    # Nobody else would tell its nodes that it is over before their lease is.
                    say(f"the coordinator of cluster {name!r} was killed: ending what it left")
                    file, _ = ensure_coordinator(name, directory or os.getcwd())
            if file is not None:
                running = cls(Connection(file, kind, live=False), attached=True)
                wait(running.connection.attached)
                running.stop()
        start = functools.partial(
            ensure_coordinator, name, directory or os.getcwd(), lease=lease, agent_lease=agent_lease,
            known=None if known is None else ",".join(known), head=head, code=code if head else "", on_progress=say,
        )  # fmt: skip
        cluster = cls._attached(*start(fresh=fresh), kind)
        if cluster.attached and cluster.connection.closed is not None:
            # It was just ending, or had just been killed.
            cluster.connection.wait_closed()
            cluster = cls._attached(*start(), kind)
        with cluster.ended_on_error():
            state = wait(cluster.connection.attached)
            if cluster.attached:
                with contextlib.suppress(TimeoutError):  # where it was killed, its machines may have been as well
                    cluster.wait_until(_has_heard_machines, HEARD_S)
            if invite:
                say(how_to_join(cluster.invite(code)))
            if on and local is None:
                local = 0
            cluster._fill(state, local, peers or (("all",) if code and not head else ()), nodes, code, say)
            if on:
                request = StartLaunch(
                    on=on, hosts=hosts, gpus=gpus, time=time, partition=partition, setup=setup, address=address,
                    folder=folder, nodes_per_host=nodes_per_host,
                )  # fmt: skip
                cluster._launch_once(request, say)
        return cluster

    @classmethod
    def _attached(cls, file: v.ConnectionFile, ran: bool, kind: str) -> "Cluster":
        """A view of the coordinator that has answered, or whose connection is closed."""
        cluster = cls(Connection(file, kind), attached=ran)
        with cluster.ended_on_error(), contextlib.suppress(ClusterError):
            wait(cluster.connection.attached)
        return cluster

    def _fill(
        self,
        state: ClusterView,
        local: int | None,
        peers: Sequence[str],
        nodes: int,
        code: str,
        say: Callable[[str], None],
    ) -> None:
        present = {node.peer for node in state.nodes}
        wanted = [peer for peer in peers if peer not in present]
        count = local if local is not None else (0 if self.attached else 1)
        count -= sum(node.peer == "local" for node in state.nodes)
        pending: dict[str, concurrent.futures.Future[list[str]]] = {}
        if count > 0:
            pending["local"] = self._request(v.AddNodes(peer="local", count=count), list[str])
        expect = nodes - len(state.nodes) - max(count, 0)
        for peer in wanted:
            pending[peer] = self._request(add_request(peer, 0, code, max(expect, 0)), list[str])
        for peer, future in pending.items():
            added = wait(future)
            if added or peer != "all":
                where = "peers that were found" if peer == "all" else peer
                say(f"{where}: {', '.join(added) or 'no node came'}")
            else:
                say(nobody_came(self.state().peers, bool(code)))
        # Also those that were found late, or joined by themselves.
        there = len(self.state().nodes) if nodes else 0
        if nodes > there:
            added = self.add("local", nodes - there)
            say(f"local, to make {nodes} nodes: {', '.join(added)}")

    @classmethod
    def attach(cls, name: str | None = None, kind: str = "client", *, live: bool = True) -> "Cluster":
        """Attach to a running cluster; without ``name`` to the only one there is. ``NAME@PEER``: to one that is led
        from there."""
        if name is None:
            running = running_clusters()
            if len(running) != 1:
                what = f"running clusters are {', '.join(running)}: name one" if running else "no cluster runs"
                raise ClusterError(f"{what} (%cluster start)" if not running else what)
            name = running[0]
        name, _, head = name.partition("@")
        file = read_connection(name) or reopen_window(name, head)
        if file is None:
            running = running_clusters()
            known = f"running: {', '.join(running)}" if running else "none runs"
            raise ClusterError(f"no cluster {name!r} runs on this machine ({known}): %cluster start {name}")
        cluster = cls(Connection(file, kind, live=live), attached=True)
        wait(cluster.connection.attached)
        return cluster


def _has_heard_machines(state: ClusterView) -> bool:
    """Every machine with nodes has said which of them are still there, or cannot be reached."""
    used = {node.peer for node in state.nodes}
    return not any(peer.name in used and peer.condition == "connecting" for peer in state.peers)
