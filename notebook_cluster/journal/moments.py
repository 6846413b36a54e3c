"""What the views of a run have shown, made again from what it has left: a ClusterView for each moment of it.

The journal has when what happened, the curves have what nodes measured. What only telemetry knew is not in them: load,
temperature, processors, threads, samples per second and links. A view of a moment does without these; the last one is
the one that was kept.
"""

import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from notebook_cluster.journal.events import Event, NodeStarting
from notebook_cluster.journal.kept_rounds import OTHER_WAITS, SHOWN_WAITS, Rounds
from notebook_cluster.journal.kept_runs import LastRun
from notebook_cluster.journal.reading import read_history, unreadable
from notebook_cluster.journal.records import BaseRecord, CellRecord, CommitRecord, Record, RegisterRecord, VoidRecord
from notebook_cluster.journal.state import Node, State, apply, cell_view, failure_of
from notebook_cluster.journal.store import journal_path
from notebook_cluster.protocol.runs import Register
from notebook_cluster.protocol.state import ClusterView, JobView, NodeView, PeerView, Series

MOST_MOMENTS = 240
_GAP = 0.25
"""Seconds between two moments at least."""
_JOBS = 4
"""A search over settings makes hundreds; a panel shows the first."""


class PastViews(NamedTuple):
    """``views``: oldest first; ``whole``: False where the journal does not reach back to the start of the run."""

    views: list[ClusterView]
    whole: bool


class _Job:
    """What the records of one job have said so far."""

    def __init__(self, settings: Register) -> None:
        self.settings = settings
        self.commit: CommitRecord | None = None
        self.round = settings.round
        self.since = 0.0


def read_moments(folder: Path, run: LastRun, most: int = MOST_MOMENTS) -> PastViews:
    """At most ``most`` moments of the run in ``folder``, the more the more happened; ``run``: what was read of it.

    Raises:
        ValueError: its journal is damaged, or gone; names it.
    """
    try:
        past = read_history(journal_path(folder))
        replayed = _Run(run, past.state)
        happened: list[tuple[float, Event | Record]] = list(
            merge(past.events, ((one.time, one.record) for one in past.rounds), key=lambda one: one[0])
        )
        views, place = [], 0
        begin, end = run.view.now if past.begin is None else past.begin, run.view.now
        for moment in _moments(begin, [time for time, _ in happened], run.curves, end, most):
            while place < len(happened) and happened[place][0] <= moment:
                replayed.take(*happened[place])
                place += 1
            views.append(replayed.view(moment))
    except (sqlite3.Error, FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise unreadable(journal_path(folder), error) from None
    return PastViews([*views, run.view], past.whole)


def _moments(
    begin: float, happened: Iterable[float], series: Sequence[Series], end: float, most: int
) -> list[float]:  # fmt: skip
    """Times at which something was told, from ``begin`` on and before ``end``: also the last one."""
    told = sorted({time for time in chain(happened, *(one.time for one in series)) if begin <= time < end})
    found: list[float] = []
    for time in told:
        if not found or time >= found[-1] + _GAP:
            found.append(time)
    if len(found) >= most:
        found = [found[place * len(found) // (most - 1)] for place in range(most - 1)]
    return [*found[:-1], *told[-1:]]


class _Run:
    """The run up to a moment: :meth:`take` what happened, in order, then ask for the :meth:`view`."""

    def __init__(self, run: LastRun, state: State) -> None:
        self._last = run
        self._state = state
        self._jobs: dict[str, _Job] = {}
        self._rounds = Rounds()
        self._since: dict[str, float] = {}
        self._in_round: dict[str, tuple[int, float | None]] = {}
        self._known = {job.name: job for job in run.view.jobs}
        self._curves: dict[str, dict[str, list[Series]]] = {}
        for one in run.curves:
            self._curves.setdefault(one.node, {}).setdefault(one.name, []).append(one)

    def take(self, time: float, what: Event | Record) -> None:
        match what:
            case RegisterRecord() | CellRecord():
                settings = what.register if isinstance(what, RegisterRecord) else what.settings
                job = self._jobs.setdefault(what.job, _Job(settings))
                if settings.cell >= job.settings.cell:
                    job.settings, job.since = settings, time
            case BaseRecord():
                self._jobs[what.job] = job = _Job(what.settings)
                job.round, job.since = what.round, time
            case CommitRecord():
                self._commit(what, time)
            case VoidRecord():
                self._rounds.replay(what)
                if what.job in self._jobs:
                    self._jobs[what.job].round = what.round - 1
            case NodeStarting():
                self._since[what.node] = time
                self._state = apply(self._state, what)
            case _ if isinstance(what, Event):
                self._state = apply(self._state, what)

    def _commit(self, record: CommitRecord, time: float) -> None:
        self._rounds.replay(record)
        if record.job in self._jobs:
            job = self._jobs[record.job]
            job.commit, job.round, job.since = record, record.commit.round, time
        for member in record.members:
            self._in_round[member.name] = record.commit.round, record.waits.get(member.name)

    def view(self, now: float) -> ClusterView:
        state, last = self._state, self._last.view
        current = state.shown_cell()
        events = [event for event in last.events if event.time <= now]
        return ClusterView(
            name=last.name, epoch=state.epoch, generation=state.generation, started=state.started or last.started,
            now=now, nodes=[self._node(node, now) for node in sorted(state.nodes.values(), key=lambda one: one.order)],
            peers=[self._peer(name) for name, peer in state.peers.items() if not peer.dropped], jobs=self._views(now),
            cell=None if current is None else cell_view(current), queued=len(state.queue()), events=events,
            directory=last.directory, run_log=last.run_log, head=last.head,
        )  # fmt: skip

    def _views(self, now: float) -> list[JobView]:
        running = self._state.running()
        shown = sorted(self._jobs.items(), key=lambda item: (-item[1].settings.cell, -item[1].since, item[0]))
        views = []
        for place, (name, job) in enumerate(shown[:_JOBS]):
            commit, settings = job.commit, job.settings
            losses = [one for one in self._curves.get("", {}).get("loss", ()) if one.job == name]
            _, loss, measured = _newest(losses, now)
            trains = running is not None and running.id == settings.cell
            views.append(
                JobView(
                    name=name, strategy=settings.strategy, round=job.round, attempt=0,
                    phase="training" if trains else "idle", members=list(commit.commit.members) if commit else [],
                    parameters=settings.parameters, bytes_sent=commit.bytes_sent if commit else 0,
                    bytes_data_parallel=commit.bytes_data_parallel if commit else 0,
                    hash_mismatches=commit.hash_mismatches if commit else 0,
                    state_hash=commit.commit.state_hash if commit else settings.state_hash,
                    waits=self._rounds.waits(name, OTHER_WAITS if place else SHOWN_WAITS), loss=loss,
                    loss_round=None if loss is None else self._round_at(name, measured), cell=settings.cell,
                    settings=self._known[name].settings if name in self._known else {},
                )
            )  # fmt: skip
        return views

    def _round_at(self, job: str, time: float) -> int:
        return max((one.round for one in self._rounds.rounds if one.job == job and one.time <= time), default=0)

    def _node(self, node: Node, now: float) -> NodeView:
        state, running = self._state, self._state.running()
        device, kind, total = state.device(node)
        since = self._since.get(node.name, 0.0)
        curves = dict(self._curves.get(node.name, {}))
        memory = curves.pop("memory", [])
        step, _, _ = _newest(chain(*curves.values()), now, since)
        _, loss, _ = _newest(curves.pop("loss", []), now, since)
        _, used, _ = _newest(memory, now, since)
        peak = max((value for one in memory for value in one.value[: bisect_right(one.time, now)]), default=0.0)
        scalars = {name: value for name, own in curves.items() if (value := _newest(own, now, since)[1]) is not None}
        last_round, wait = self._in_round.get(node.name, (None, None))
        saved = next((one for one in reversed(self._last.past.checkpoints) if one.time <= now), None)
        replays = node.is_in and not node.settled
        return NodeView(
            name=node.name, rank=state.rank(node.name), peer=node.peer, device=node.device or "cpu",
            device_name=device, incarnation=node.incarnation,
            condition="replaying" if replays else node.condition,  # type: ignore[arg-type]
            reason=node.reason, log_tail=list(node.log_tail),
            busy=running is not None and running.nodes.get(node.name) == "running",
            memory_kind=kind, memory_used=int(used or 0),
            memory_peak=int(peak), memory_total=total, step=step, loss=loss, scalars=scalars, last_round=last_round,
            round_wait=wait, checkpoint=f"{saved.name} at round {saved.round}" if saved else "",
            checkpoint_time=saved.time if saved else None, place=node.order, failed=failure_of(state, node),
        )  # fmt: skip

    def _peer(self, name: str) -> PeerView:
        peer, nodes = self._state.peers[name], [one for one in self._state.nodes.values() if one.peer == name]
        away = bool(nodes) and all(one.condition == "lost" for one in nodes)
        return PeerView(
            name=name, key=peer.key, address=peer.address.removeprefix("tcp://"),
            condition="lost" if away else "connected", found_by=peer.found_by,  # type: ignore[arg-type]
            trusted=True, device=peer.device_names,
            reason=nodes[0].reason if away else "",
        )  # fmt: skip


def _newest(
    curves: Iterable[Series], now: float, since: float = 0.0
) -> tuple[int | None, float | None, float]:  # fmt: skip
    """(step, value, time) of the last point between ``since`` and ``now``."""
    found: tuple[int | None, float | None, float] = None, None, since
    for one in curves:
        place = bisect_right(one.time, now) - 1
        if place >= 0 and one.time[place] >= found[2]:
            found = one.step[place], one.value[place], one.time[place]
    return found


def until(series: Iterable[Series], now: float) -> list[Series]:
    """The points of ``series`` up to ``now``."""
    cut = ((one, bisect_right(one.time, now)) for one in series)
    return [
        msgspec.structs.replace(one, step=one.step[:place], time=one.time[:place], value=one.value[:place])
        for one, place in cut
        if place
    ]
