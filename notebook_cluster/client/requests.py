"""What can be asked of a cluster that runs, one method for each request of a view."""

import concurrent.futures
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

from notebook_cluster.client.connection import ClusterError, Connection
from notebook_cluster.client.stream import CellStream, wait
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.hand_over import HandOver
from notebook_cluster.protocol.interaction import (
    VALUE_EXPRESSION,
    VALUE_KEY,
    AnswerInput,
    CommToNode,
    Complete,
    Completions,
    Inspect,
    Inspection,
    ListVariables,
    NodeVariables,
    WatchWidgets,
)
from notebook_cluster.protocol.state import CellView, ClusterView, GetHistory, RunHistory, Series

Value = TypeVar("Value")
LONG_REPLAY_S = 3.0
"""So long a node replays an earlier cell before who restarts it is told."""
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


class RunningCluster:
    """Every method blocks until the coordinator has answered and raises :class:`ClusterError` with one line that names
    the thing and the way out."""

    def __init__(self, connection: Connection, *, attached: bool) -> None:
        self.connection = connection
        self.attached = attached
        """True when the cluster ran before."""

    @contextlib.contextmanager
    def ended_on_error(self) -> Iterator[None]:
        """What fails inside ends a cluster that did not run before, and this view of it."""
        try:
            yield
        except BaseException:
            if not self.attached:
                with contextlib.suppress(Exception):
                    self.stop()
            self.close()
            raise

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

    def wait_until(self, condition: Callable[[ClusterView], Value], timeout: float = 60.0) -> Value:
        """Look at each new state until ``condition(state)`` is something true, and return that.

        Raises:
            TimeoutError: it was not within ``timeout`` seconds.
            ClusterError: the cluster has ended meanwhile.
        """
        news = threading.Event()
        unsubscribe = self.subscribe(lambda event: news.set())
        deadline = time.monotonic() + timeout
        try:
            while True:
                news.clear()
                if found := condition(self.state()):
                    return found
                if not news.wait(max(deadline - time.monotonic(), 0.0)):
                    raise TimeoutError(f"cluster {self.name!r}: what was waited for did not come within {timeout:g} s")
        finally:
            unsubscribe()

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
        so that :meth:`detach` leaves the stream alone. ``stdin``: questions of nodes may come here. An earlier stream
        of this cell and this object ends, detached: :meth:`attach` makes an object that watches beside it."""
        if self.connection.end_watching(cell):
            wait(self._request(v.Unwatch(cell=cell)))
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

    def hand_over(self, to: str, *, code: str = "", survive: bool = False) -> str:
        """Have the cluster led from ``to`` while it runs, a peer (a name or ``HOST:PORT``; ``code`` pairs with it) or
        ``local``: cells, training and their output go on, and this object with them. Returns the peer from where it
        is led now, empty for this machine. ``survive``: it is done later, each time that this machine is about to sleep
        while the cluster is led from it; ``local`` takes that back.

        Raises:
            ClusterError: it is led from where it was before, unless the text says otherwise.
        """
        led: str = wait(self._request(HandOver(to=to, code=code, survive=survive), str))
        return led

    # ---- what lives on the nodes

    def complete(
        self, code: str, cursor: int, targets: Sequence[str] = (), *, timeout: float = ANSWER_TIMEOUT
    ) -> Completions | None:
        """What may stand at ``cursor`` in ``code`` on one of ``targets``; None when none answers in time."""
        request = Complete(code=code, cursor=cursor, targets=list(targets))
        return self._soon(request, Completions, timeout)  # type: ignore[no-any-return]

    def inspect(
        self, code: str, cursor: int, targets: Sequence[str] = (), *, detail: int = 0, timeout: float = ANSWER_TIMEOUT
    ) -> Inspection | None:
        """What stands at ``cursor`` in ``code`` on one of ``targets``; None when none answers in time."""
        request = Inspect(code=code, cursor=cursor, targets=list(targets), detail=detail)
        return self._soon(request, Inspection, timeout)  # type: ignore[no-any-return]

    def variables(self, pattern: str = "", *, everything: bool = False) -> list[NodeVariables]:
        """What is in the namespace of each node, in rank order; names like ``pattern`` (``m*``). A node that runs a
        cell gives its last answer again."""
        request = ListVariables(pattern=pattern, everything=everything)
        return wait(self._request(request, list[NodeVariables]))

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
            self._request(WatchWidgets()).result(timeout)
        except (ClusterError, concurrent.futures.TimeoutError):
            return False
        return True

    def send_to_widget(self, model: str, data: dict[str, Any], buffers: Sequence[bytes] = ()) -> None:
        """What the browser says to a widget of a node; returns at once. A widget that is gone hears nothing."""
        with contextlib.suppress(ClusterError):
            self._request(CommToNode(model=model, data=data, buffers=list(buffers)))

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

    def restart(
        self,
        node: str | Sequence[str],
        replay: bool = True,
        *,
        all_cells: bool = False,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        """A new kernel under the same name, of one node or of several at once; cells are replayed, then it joins the
        running one. ``all_cells``: also those that its kernels did without since their replay ended one, or was
        skipped. Returns, or raises, when all have come or failed. ``on_progress``: called with a line for each earlier
        cell that takes long on a node."""
        names = [node] if isinstance(node, str) else node
        asked = [self._request(v.RestartNode(node=name, replay=replay, all_cells=all_cells)) for name in names]
        failed = []
        since: dict[tuple[str, str], float] = {}
        for future in asked:
            try:
                while on_progress is not None and not concurrent.futures.wait([future], 0.5).done:
                    self._tell_replays(names, since, on_progress)
                wait(future)
            except ClusterError as error:
                failed.append(error)
        if failed:
            raise failed[0] if len(failed) == 1 else ClusterError("\n".join(map(str, failed)))

    def _tell_replays(
        self, names: Sequence[str], since: dict[tuple[str, str], float], say: Callable[[str], None]
    ) -> None:
        """``since``: node and cell -> when it was first seen there; infinite once it was told."""
        now = time.monotonic()
        for row in self.latest.nodes if self.latest is not None else ():
            what = row.replaying.partition(",")[0]
            if row.name in names and what and now - since.setdefault((row.name, what), now) > LONG_REPLAY_S:
                since[row.name, what] = float("inf")
                way_out = f"Skip in the panel, or notebook-cluster skip {self.name} {row.name}, ends it"
                say(f"{row.name} is {what}: {way_out}")

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
