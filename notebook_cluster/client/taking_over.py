"""A new cluster that goes on from what one before it, whose coordinator is gone, has left on its owner's machines."""

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Self

from notebook_cluster.client.connection import ClusterError, Connection, is_alive
from notebook_cluster.client.led_elsewhere import agent_of_window, close_window, given_up
from notebook_cluster.client.requests import RunningCluster, add_request
from notebook_cluster.client.start import ensure_coordinator, killed_journal, read_connection
from notebook_cluster.client.stream import wait
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.clock import clock
from notebook_cluster.protocol.kept import FindKept, FoundKept, TakenJob, TakeOver
from notebook_cluster.protocol.names import check_name
from notebook_cluster.security import runtime_directory


class TakingOver(RunningCluster):
    """The part of :class:`.cluster.Cluster` that begins one where another has ended without its owner."""

    @classmethod
    def take_over(
        cls,
        name: str,
        *,
        local: int = 1,
        peers: Sequence[str] = ("all",),
        nodes: int = 0,
        known: Sequence[str] | None = None,
        directory: str | None = None,
        kind: str = "client",
        lease: float = 600.0,
        agent_lease: float = 600.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> Self:
        """Begin a new cluster ``name`` on the machines that are there, from the newest state that they keep of a
        cluster of this name and owner whose coordinator is gone; what that one has left on them is ended. A training
        cell of the same job then goes on from that state.

        Args:
            local: nodes on this machine.
            peers: names, ``HOST:PORT``, or ``all`` for every peer that this user trusts and that answers.
            nodes: at least so many nodes in all; local ones fill up.
            known: names or ``HOST:PORT`` of peers to know of without mDNS; default: NOTEBOOK_CLUSTER_PEERS.
            directory: working directory of local nodes; default: the current one.
            lease, agent_lease: seconds, see the coordinator's settings.
            on_progress: called with one line for each thing that happens.

        Raises:
            ClusterError: the cluster still runs, nothing is kept of it, or no machine that keeps it can be used. Where
                its coordinator was killed on this machine, ``Cluster.start`` goes on with it then as before.
        """
        say = on_progress or (lambda text: None)
        if not 0 <= local <= 64:
            raise ClusterError(f"--local {local}: use 0 to 64 local nodes")
        if not 0 <= nodes <= 256:
            raise ClusterError(f"--nodes {nodes}: use 1 to 256")
        try:
            check_name(name, "cluster")
        except ValueError as error:
            raise ClusterError(str(error)) from None
        if (before := read_connection(name)) is not None and not before.head:
            raise ClusterError(f"cluster {name!r} runs on this machine: %cluster attach {name} goes on with it")
        if before is not None:
            close_window(before)
        own = agent_of_window(name) or _agent_before(name)
        with given_up(name), killed_journal(name):
            file, ran = ensure_coordinator(
                name, directory or os.getcwd(), fresh=True, lease=lease, agent_lease=agent_lease,
                known=None if known is None else ",".join(known), on_progress=say,
            )  # fmt: skip
            wanted = [*peers, *(["local"] if local or nodes else [])]
            return cls._began(Connection(file, kind), ran, FindKept(peers=wanted, own=own), local, nodes, say)

    @classmethod
    def _began(
        cls, connection: Connection, ran: bool, request: FindKept, local: int, nodes: int, say: Callable[[str], None]
    ) -> Self:
        """The cluster, once it has taken over; one that cannot is ended."""
        name = connection.file.cluster
        cluster = cls(connection, attached=ran)
        with cluster.ended_on_error():
            wait(cluster.connection.attached)
            if ran:
                raise ClusterError(f"cluster {name!r} runs on this machine: %cluster attach {name} goes on with it")
            cluster._take_over(request, local, nodes, say)
        return cluster

    def _take_over(self, request: FindKept, local: int, nodes: int, say: Callable[[str], None]) -> None:
        say(f"asking machines what they keep of cluster {self.name!r} ...")
        found: FoundKept = wait(self._request(request, FoundKept))
        for line in found.lines:
            say(line)
        self._add_nodes(found.peers, local, nodes, say)
        taken: list[TakenJob] = wait(self._request(TakeOver(), list[TakenJob]))
        for job in taken:
            if job.line:
                say(job.line)
            say(
                f"took over training {job.job!r} after round {job.round}, which {' and '.join(map(_shown, job.peers))} "
                f"kept {clock(job.time)}: run the cells again, the training goes on from round {job.round} "
                "(fresh=True begins anew)"
            )

    def _add_nodes(self, peers: Sequence[str], local: int, nodes: int, say: Callable[[str], None]) -> None:
        """A peer that gives no node now is named, and left out."""
        pending: dict[str, concurrent.futures.Future[list[str]]] = {}
        if local:
            pending["local"] = self._request(v.AddNodes(peer="local", count=local), list[str])
        for peer in peers:
            pending[peer] = self._request(add_request(peer, 0, ""), list[str])
        for peer, future in pending.items():
            try:
                added = wait(future)
                say(f"{_shown(peer)}: {', '.join(added) or 'no node came'}")
            except ClusterError as error:
                say(f"{_shown(peer)} gives no node: {error}")
        there = len(self.state().nodes)
        if nodes > there:
            say(f"local, to make {nodes} nodes: {', '.join(self.add('local', nodes - there))}")


def _shown(peer: str) -> str:
    return "this machine" if peer == "local" else peer


def _agent_before(name: str) -> tuple[str, str] | None:
    """Address and key of the agent that the last coordinator of cluster ``name`` had on this machine, if that still
    runs: its nodes wait there."""
    from notebook_cluster.journal.reading import recover
    from notebook_cluster.journal.store import journal_path

    folder = runtime_directory() / "clusters" / name
    if not folder.is_dir():
        return None
    try:
        local = recover(journal_path(folder)).state.peers.get("local")
    except (ValueError, OSError):
        return None
    alive = local is not None and local.pid is not None and is_alive(local.pid)
    return (local.address, local.key) if local is not None and alive else None
