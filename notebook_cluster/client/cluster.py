"""``Cluster``: what people and views call."""

import concurrent.futures
import contextlib
import functools
import os
import queue
from collections.abc import Callable, Sequence
from typing import Any

from notebook_cluster.client.connection import ClusterError, Connection
from notebook_cluster.client.moving import Moving
from notebook_cluster.client.past import Past
from notebook_cluster.client.peers import nobody_came
from notebook_cluster.client.start import ensure_coordinator, read_connection, running_clusters
from notebook_cluster.client.stream import CellStream, wait
from notebook_cluster.protocol import comms, introspection
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.asking import AnswerInput
from notebook_cluster.protocol.collecting import VALUE_EXPRESSION, VALUE_KEY
from notebook_cluster.protocol.history import GetHistory, RunHistory
from notebook_cluster.protocol.state import CellView, ClusterView, Series

ANSWER_TIMEOUT = 0.5
"""Seconds that completion and inspection wait."""


def add_request(peer: str, count: int, code: str, expect: int = 0) -> v.AddNodes:
    """The request for nodes of ``peer``; with ``all`` also of peers that are found later, and of ``expect`` at least
    if they are found soon."""
    return v.AddNodes(peer=peer, count=count, code=code, follow=peer == "all", expect=expect if peer == "all" else 0)


def how_to_join(invitation: v.Invitation) -> str:
    """What to type on a machine that shall join."""
    first, *others = invitation.addresses
    elsewhere = f" (this machine is also {', '.join(others)})" if others else ""
    return (
        f"machines join with: notebook-cluster share --dial {first} --code {invitation.code}{elsewhere}; "
        f"the code is valid for {invitation.minutes:g} minutes"
    )


class Cluster(Past, Moving):
    """A running cluster, as one view sees it. Every method blocks until the coordinator has answered and raises
    :class:`ClusterError` with one line that names the thing and the way out."""

    def __init__(self, connection: Connection, *, attached: bool) -> None:
        self.connection = connection
        self.attached = attached
        """True when the cluster ran before."""

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
        known: Sequence[str] | None = None,
        fresh: bool = False,
        directory: str | None = None,
        kind: str = "client",
        lease: float = 600.0,
        agent_lease: float = 600.0,
        on_progress: Callable[[str], None] | None = None,
    ) -> "Cluster":
        """Start cluster ``name``, or attach to it when it runs.

        Args:
            local: nodes on this machine; default 1, and none are added to a cluster that runs.
            peers: names, ``HOST:PORT``, or ``all`` for every trusted peer found over mDNS, also those found later.
            nodes: at least so many nodes in all; local ones fill up.
            code: pairs with peers that share with this code and are not trusted yet; alone it means ``peers`` all.
            invite: also let peers join by themselves, with ``code`` (or one that is made): see :meth:`invite`.
            known: names or ``HOST:PORT`` of peers to know of without mDNS; default: NOTEBOOK_CLUSTER_PEERS.
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
            if file is not None:
                running = cls(Connection(file, kind, live=False), attached=True)
                running.stop()
        start = functools.partial(
            ensure_coordinator, name, directory or os.getcwd(), lease=lease, agent_lease=agent_lease,
            known=None if known is None else ",".join(known), on_progress=say,
        )  # fmt: skip
        cluster = cls._attached(*start(fresh=fresh), kind)
        if cluster.attached and cluster.connection.closed is not None:
            # It was just ending, or had just been killed.
            cluster.connection.wait_closed()
            cluster = cls._attached(*start(), kind)
        try:
            state = wait(cluster.connection.attached)
            if invite:
                say(how_to_join(cluster.invite(code)))
            cluster._fill(state, local, peers or (("all",) if code else ()), nodes, code, say)
        except BaseException:
            if not cluster.attached:
                with contextlib.suppress(Exception):
                    cluster.stop()
            cluster.close()
            raise
        return cluster

    @classmethod
    def _attached(cls, file: v.ConnectionFile, ran: bool, kind: str) -> "Cluster":
        """A view of the coordinator that has answered, or whose connection is closed."""
        cluster = cls(Connection(file, kind), attached=ran)
        try:
            with contextlib.suppress(ClusterError):
                wait(cluster.connection.attached)
        except BaseException:
            if not ran:
                with contextlib.suppress(Exception):
                    cluster.stop()
            cluster.close()
            raise
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
        """Attach to a running cluster; without ``name`` to the only one there is."""
        if name is None:
            running = running_clusters()
            if len(running) != 1:
                what = f"running clusters are {', '.join(running)}: name one" if running else "no cluster runs"
                raise ClusterError(f"{what} (%cluster start)" if not running else what)
            name = running[0]
        file = read_connection(name)
        if file is None:
            running = running_clusters()
            known = f"running: {', '.join(running)}" if running else "none runs"
            raise ClusterError(f"no cluster {name!r} runs on this machine ({known}): %cluster start {name}")
        cluster = cls(Connection(file, kind, live=live), attached=True)
        wait(cluster.connection.attached)
        return cluster

    # ---- looking

    @property
    def name(self) -> str:
        return self.connection.file.cluster

    @property
    def connected(self) -> bool:
        """False when the coordinator has ended or was lost: attach again."""
        return self.connection.closed is None

    @property
    def latest(self) -> ClusterView | None:
        """The newest state that was received, without asking."""
        return self.connection.latest

    def _request(self, body: Any, kind: Any = Any, **options: Any) -> "concurrent.futures.Future[Any]":
        return self.connection.request(body, kind, **options)  # type: ignore[no-any-return]

    def state(self) -> ClusterView:
        """Everything a panel shows, except the curves."""
        state: ClusterView = wait(self._request(v.GetState(), ClusterView))
        return state

    def text_file(self, cell: int, node: str) -> str:
        """Path of the file, on this machine, with everything that ``node`` printed in ``cell``."""
        folder = os.path.dirname(self.connection.file.run_log)
        return os.path.join(folder, "cells", f"{cell:06d}", f"{node}.txt")

    def series(self) -> list[Series]:
        """All curves so far."""
        return wait(self._request(v.GetSeries(), list[Series]))

    def history(self) -> RunHistory:
        """What has happened since the start: rounds, checkpoints, cells; and the versions of the connected peers."""
        history: RunHistory = wait(self._request(GetHistory(), RunHistory))
        return history

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call ``callback(event)`` on the I/O thread for StateChanged, SeriesAdded and Closing. Returns how to stop."""
        return self.connection.subscribe(callback)

    def logs(self, node: str, lines: int = 100) -> list[str]:
        """The last lines that the node's kernel wrote to its terminal."""
        return wait(self._request(v.ReadNodeLog(node=node, lines=lines), list[str]))

    # ---- cells

    def execute(
        self,
        source: str,
        targets: Sequence[str] = (),
        *,
        replay: bool = True,
        timeout: float | None = None,
        user_expressions: dict[str, str] | None = None,
        notebook_names: Sequence[str] = (),
        collect: bool = False,
        canary: str = "",
        background: bool = False,
        stdin: bool = False,
        widgets: bool = False,
    ) -> CellStream:
        """Run a cell on ``targets`` (node names; empty: all) and stream what happens.

        ``collect``: the stream also has a NodeValue with the last value of each node where the cell ended well.
        ``canary``: this node runs it first, the others only when it ended well there.
        ``background``: nobody waits for it, which is said to who queues behind it.
        ``stdin``: the stream has an InputRequested when a node calls ``input()``; see :meth:`answer_input`.
        ``widgets``: this view shows widgets of nodes, so progress bars may be some.
        """
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked = {VALUE_KEY: VALUE_EXPRESSION} if collect else {}
        request = v.Execute(
            source=source, targets=list(targets), replay=replay, timeout=timeout, canary=canary, background=background,
            user_expressions=asked | (user_expressions or {}), notebook_names=list(notebook_names), watch=True,
            stdin=stdin, widgets=widgets,
        )  # fmt: skip
        cell = wait(self._request(request, int, queue_for_cell=events))
        return CellStream(self.connection, events, cell)

    def watch(self, cell: int, *, background: bool = False, stdin: bool = False) -> CellStream:
        """Stream a cell from its beginning, also one that another view started. ``background``: nobody waits for it,
        so that :meth:`detach` leaves the stream alone. ``stdin``: questions of nodes may come here."""
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.connection.watch_queue(cell, events)
        wait(self._request(v.Watch(cell=cell, background=background, stdin=stdin), CellView))
        return CellStream(self.connection, events, cell)

    def run(self, source: str, targets: Sequence[str] = (), **options: Any) -> tuple[v.CellEnded, list[v.Output]]:
        """Run a cell to its end; returns its end and everything it put out."""
        stream = self.execute(source, targets, **options)
        outputs: list[v.Output] = []
        while True:
            event = stream.get(0.2)
            if isinstance(event, v.CellOutput):
                outputs += event.outputs
            elif isinstance(event, v.CellEnded):
                return event, outputs

    def answer_input(self, question: int, value: str = "", *, end: bool = False) -> None:
        """Answer the InputRequested with this id; ``end``: there is no answer, the node gets EOFError."""
        wait(self._request(AnswerInput(id=question, value=value, end=end)))

    def interrupt(self, force: bool = False, cell: int = 0) -> list[str]:
        """SIGINT to every node of the running cell; ``force`` kills and respawns the still busy ones. Returns the
        names of nodes that were still busy. What waits in the queue is cancelled; with ``cell`` only that cell is
        meant, wherever it is."""
        return wait(self._request(v.Interrupt(force=force, cell=cell), list[str]))

    def detach(self) -> None:
        """Free every view that waits for a cell; the cell goes on."""
        wait(self._request(v.Detach()))

    # ---- what lives on the nodes

    def complete(
        self, code: str, cursor: int, targets: Sequence[str] = (), *, timeout: float = ANSWER_TIMEOUT
    ) -> introspection.Completions | None:
        """What may stand at ``cursor`` in ``code`` on one of ``targets``; None when none answers in time."""
        request = introspection.Complete(code=code, cursor=cursor, targets=list(targets))
        return self._soon(request, introspection.Completions, timeout)  # type: ignore[no-any-return]

    def inspect(
        self, code: str, cursor: int, targets: Sequence[str] = (), *, detail: int = 0, timeout: float = ANSWER_TIMEOUT
    ) -> introspection.Inspection | None:
        """What stands at ``cursor`` in ``code`` on one of ``targets``; None when none answers in time."""
        request = introspection.Inspect(code=code, cursor=cursor, targets=list(targets), detail=detail)
        return self._soon(request, introspection.Inspection, timeout)  # type: ignore[no-any-return]

    def variables(self, pattern: str = "", *, everything: bool = False) -> list[introspection.NodeVariables]:
        """What is in the namespace of each node, in rank order; names like ``pattern`` (``m*``). A node that runs a
        cell gives its last answer again."""
        request = introspection.ListVariables(pattern=pattern, everything=everything)
        return wait(self._request(request, list[introspection.NodeVariables]))

    def _soon(self, request: Any, kind: Any, timeout: float) -> Any:
        """The answer for somebody who types, or None: late and failed ones are nothing to tell them of."""
        try:
            return self._request(request, kind).result(timeout)
        except (ClusterError, concurrent.futures.TimeoutError):
            return None

    # ---- widgets of nodes

    def watch_widgets(self, timeout: float = 5.0) -> bool:
        """Have NodeComm events sent to what :meth:`subscribe` was given; True when those of all that are open have
        come, False when the cluster has ended or does not answer in time."""
        try:
            self._request(comms.WatchWidgets()).result(timeout)
        except (ClusterError, concurrent.futures.TimeoutError):
            return False
        return True

    def send_to_widget(self, model: str, data: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """What the browser says to a widget of a node; returns at once. A widget that is gone hears nothing."""
        with contextlib.suppress(ClusterError):
            self._request(comms.CommToNode(model=model, data=data, buffers=list(buffers)))

    # ---- membership

    def add(self, peer: str, count: int = 0, *, code: str = "") -> list[str]:
        """Add the nodes of ``peer``, a name, ``HOST:PORT``, ``local`` or ``all`` (``count`` 0: one per accelerator);
        ``code`` pairs with it when it is not trusted yet. Returns their names once they answer."""
        return wait(self._request(add_request(peer, count, code), list[str]))

    def invite(self, code: str = "", minutes: float = 120.0) -> v.Invitation:
        """Let peers join by themselves for ``minutes``, also from behind NAT or a firewall; :func:`how_to_join` says
        what to type there. Without ``code`` one is made, or the open invitation is returned."""
        invitation: v.Invitation = wait(self._request(v.Invite(code=code, minutes=minutes), v.Invitation))
        return invitation

    def close_invitation(self) -> None:
        """Let nobody else join; peers that came stay."""
        wait(self._request(v.Invite(close=True)))

    def examine(self, packages: Sequence[str] = ()) -> list[v.Finding]:
        """The doctor: what is wrong with peers, network and versions, and the way out of each. ``packages``:
        distributions whose versions are compared beside those that the cluster's cells import."""
        return wait(self._request(v.Examine(packages=list(packages)), list[v.Finding]))

    def remove(self, node: str) -> None:
        """End a node and take it out of the cluster."""
        wait(self._request(v.RemoveNode(node=node)))

    def restart(self, node: str, replay: bool = True, *, all_cells: bool = False) -> None:
        """A new kernel under the same name; cells are replayed, then it joins the running one. ``all_cells``: also
        those that its kernels did without since their replay ended one, or was skipped."""
        wait(self._request(v.RestartNode(node=node, replay=replay, all_cells=all_cells)))

    def skip(self, node: str) -> int:
        """End the replay of the earlier cell that ``node`` runs now, not of the next ones. Returns its number."""
        number: int = wait(self._request(v.SkipReplay(node=node), int))
        return number

    def checkpoint(self, name: str, job: str = "") -> str:
        """Save a checkpoint of the last committed round; returns its folder, on the machine of its writer."""
        path: str = wait(self._request(v.SaveCheckpoint(name=name, job=job), str))
        return path

    def stop(self) -> None:
        """End the cluster and every kernel of it; returns when its coordinator has ended."""
        wait(self._request(v.Stop()))
        self.connection.wait_closed()

    def close(self, *, clean: bool = False) -> None:
        """Leave the cluster; it goes on."""
        self.connection.close(clean=clean)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
