"""Carries events to the pure round machine and does what it asks for: into the journal first, then tell."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from notebook_cluster.coordinator.core import LOCAL, CellWatcher, Core, Departure, MembershipWatcher
from notebook_cluster.coordinator.delivery import Delivery
from notebook_cluster.journal.records import CommitRecord, Record
from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.rounds import Applied, Arrived, Refused, Saved
from notebook_cluster.protocol.runs import RegisterRefused
from notebook_cluster.protocol.state import CheckpointView, JobView, NodeView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import Message
from notebook_cluster.rounds.leader import events_effects as jobs
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.leader.arrivals import Gathering, gatherings
from notebook_cluster.rounds.leader.state import ATTEMPT_BITS

log = logging.getLogger(__name__)

SAVE_TIMEOUT = 300.0
MOST_CHECKPOINTS = 500
KEPT_STEPS = 32
"""Rounds of each node of which the step is known: a checkpoint is of one of the last."""
_MAX_TEXT = 200
_MAX_ARRIVALS = 2000


class RoundRunner(MembershipWatcher, CellWatcher):
    """The training jobs of one cluster. ``checkpoints`` are those that were written in this run."""

    def __init__(
        self, core: Core, delivery: Delivery, *, stalled: Callable[[str, str], None], in_cell: Callable[[str], None]
    ) -> None:
        """``stalled(waiting, waited_for)``: training stands still although there is a connection between the two.
        ``in_cell(line)``: to who watches the cell that runs."""
        self._core = core
        self._delivery = delivery
        self._stalled = stalled
        self._in_cell = in_cell
        self._state = rounds.RoundsState()
        self._facts: dict[str, dict[str, Any]] = {}
        self._steps: dict[str, dict[tuple[str, int], int]] = {}
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._tokens = itertools.count(1)
        self.checkpoints: list[CheckpointView] = []
        self._arrivals: dict[tuple[str, int], dict[str, float]] = {}

    def _feed(self, event: Any) -> None:
        """Decide on ``event``. What follows is done once the decision is in the journal. While that waits for room
        nothing is decided, so that it stays with this one attempt."""
        journal = self._core.journal
        if journal.holding:
            journal.when_written(lambda: self._feed(event))
            return
        self._state, effects = rounds.apply(self._state, event)
        for effect in effects:
            if isinstance(effect, jobs.Log):
                journal.round(self._annotated(effect.record), durable=effect.durable)
        if effects:
            journal.when_written(lambda: self._carry_out_all(effects))

    def _carry_out_all(self, effects: list[Any]) -> None:
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception as error:
                log.exception("an effect of the rounds failed: %r", effect)
                self._core.tell("error", f"training: {type(error).__name__}: {error}")

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case jobs.Log():
                if isinstance(effect.record, CommitRecord):
                    for name in effect.record.commit.members:
                        self._facts.setdefault(name, {}).pop("refused", None)
            case jobs.Send():
                if isinstance(effect.message, Refused | RegisterRefused):
                    self._facts.setdefault(effect.node, {})["refused"] = effect.message.reason
                self._delivery.to_node(effect.node, effect.message)
            case jobs.Tell():
                self._core.tell(effect.level, effect.text)
                if effect.in_cell:
                    self._in_cell(effect.text)
            case jobs.Relay():
                self._stalled(effect.waiting, effect.waited_for)
            case jobs.SaveAnswer():
                self._answer(effect)

    # ---- what a report says of it

    def _note_arrival(self, node: str, message: Arrived) -> None:
        """A node is at the boundary of a round; one that says so again was there before."""
        places = self._arrivals.setdefault((message.job, message.round), {})
        places.setdefault(node, time.monotonic())
        if len(self._arrivals) > _MAX_ARRIVALS:
            self._arrivals.pop(next(iter(self._arrivals)))

    def _annotated(self, record: Record) -> Record:
        """``record``; a commit with when it was and how long each member waited for the last one."""
        if not isinstance(record, CommitRecord):
            return record
        places = self._arrivals.pop((record.job, record.commit.round), {})
        present = [member.name for member in record.members if member.name in places]
        last = max((places[name] for name in present), default=0.0)
        waits = {name: round(last - places[name], 3) for name in present}
        return msgspec.structs.replace(record, time=time.time(), waits=waits)

    def _note_checkpoint(self, message: Saved) -> None:
        """A checkpoint is on disk."""
        name, path = message.name[:_MAX_TEXT], message.path[:1000]
        view = CheckpointView(name=name, job=message.job[:_MAX_TEXT], round=message.round, path=path, time=time.time())
        self.checkpoints = [*self.checkpoints, view][-MOST_CHECKPOINTS:]

    # ---- what happens

    def from_member(self, node: str, incarnation: int, message: Message) -> None:
        """A message of :mod:`notebook_cluster.protocol.rounds` from a node."""
        facts = self._facts.setdefault(node, {})
        if isinstance(message, Arrived) and message.job in self._state.jobs:
            self._note_arrival(node, message)
        elif isinstance(message, Applied):
            facts["last_round"], facts["round_wait"] = message.round, message.wait
            steps = self._steps.setdefault(node, {})
            steps[message.job, message.round] = message.step
            if len(steps) > KEPT_STEPS:
                del steps[next(iter(steps))]
        elif isinstance(message, Saved) and not message.error:
            self._note_checkpoint(message)
            for name in self._core.state.nodes:
                step = self._steps.get(name, {}).get((message.job, message.round), 0)
                facts = self._facts.setdefault(name, {})
                facts["checkpoint"] = f"{message.name} at round {message.round}" + (f", step {step:,}" if step else "")
                facts["checkpoint_time"] = time.time()
        self._feed(jobs.FromMember(node, incarnation, message))
        self._core.dirty()

    # ---- cells, and who is there

    def cell_started(self, cell: int, nodes: list[str]) -> None:
        for name in nodes:
            self._facts.get(name, {}).pop("refused", None)
        self._feed(jobs.CellBegan(cell, tuple(nodes)))

    def node_joined(self, cell: int, node: str) -> None:
        self._feed(jobs.NodeJoinedCell(cell, node))

    def cell_stopping(self, cell: int) -> None:
        self._feed(jobs.CellStopping(cell))

    def node_left(self, cell: int, node: str, status: str) -> None:
        self._feed(jobs.CellLeft(cell, node, status))

    def node_up(self, name: str, *, replay: bool) -> None:
        self._members_changed(name)

    def node_returned(self, name: str) -> None:
        self._members_changed(name)

    def node_down(self, departure: Departure) -> None:
        self._feed(jobs.MemberLost(departure.node, departure.incarnation, departure.reason, departure.dead))
        if departure.was_in:
            self._members_changed(None)

    def _members_changed(self, joined: str | None) -> None:
        """Ranks moved; ``joined`` is in (again)."""
        if joined is not None:
            node = self._core.state.nodes[joined]
            self._feed(jobs.MemberUp(joined, node.incarnation, self._core.state.rank(joined) or 0))
        nodes = self._core.state.roster_nodes()
        self._feed(jobs.RanksChanged({node.name: rank for rank, node in enumerate(nodes)}))
        self._feed(jobs.HomeNodes(tuple(node.name for node in nodes if node.peer == LOCAL)))

    def tick(self, now: float, silent: dict[str, tuple[float, str]]) -> None:
        """``now`` is the time in which this process ran; ``silent``: see
        :class:`notebook_cluster.rounds.leader.events_effects.Tick`. Time in which nothing could be written down counts
        against nobody."""
        if not self._core.journal.holding:
            self._feed(jobs.Tick(now - self._core.journal.held_seconds(), silent))

    def patience_for(self, node: str) -> float:
        """See :func:`notebook_cluster.rounds.leader.machine.patience_for`."""
        return rounds.patience_for(self._state, node)

    def recover(self, records: Iterable[Record]) -> None:
        """After a restart of the coordinator: what was committed, and the open round."""
        nodes = tuple((node.name, node.incarnation) for node in self._core.state.roster_nodes())
        cell = self._core.state.running()
        running = tuple(name for name, status in cell.nodes.items() if status == "running") if cell is not None else ()
        number = cell.id if cell is not None else 0
        tickets = time.time_ns() // 1_000_000  # far fewer are given than one in a millisecond
        attempts = self._core.state.starts << ATTEMPT_BITS
        self._feed(jobs.LeaderRestarted(records, nodes, time.monotonic(), tickets, number, running, attempts))
        self._members_changed(None)

    # ---- checkpoints that a view asks for

    async def save(self, name: str, job: str) -> str:
        """Save a checkpoint of the last committed round; its folder."""
        try:
            check_name(name, "checkpoint")
        except ValueError as error:
            raise RequestError(str(error)) from None
        token = next(self._tokens)
        future = self._answers[token] = asyncio.get_running_loop().create_future()
        self._feed(jobs.SaveRequested(name, job, token))
        try:
            return await asyncio.wait_for(future, SAVE_TIMEOUT)
        except TimeoutError:
            raise RequestError(
                f"checkpoint {name!r} was not written within {SAVE_TIMEOUT:g} s: its nodes save at their next sync.step"
            ) from None
        finally:
            self._answers.pop(token, None)

    def _answer(self, effect: jobs.SaveAnswer) -> None:
        future = self._answers.get(effect.token)
        if future is None or future.done():
            return
        if effect.error:
            future.set_exception(RequestError(effect.error))
        else:
            future.set_result(effect.path)

    # ---- what views see

    def committed(self, job: str) -> int | None:
        """The last committed round of ``job``; None when there is no such job."""
        return self._state.jobs[job].round if job in self._state.jobs else None

    def trains(self, cell: int) -> bool:
        """Whether a job is trained in this cell, or was trained there last."""
        return any(job.cell == cell for job in self._state.jobs.values())

    def job_views(self) -> list[JobView]:
        """The jobs as the round machine knows them."""
        return rounds.job_views(self._state)

    def gatherings(self) -> dict[str, Gathering]:
        """The jobs whose next round waits for somebody to arrive."""
        return gatherings(self._state)

    def node_facts(self) -> dict[str, dict[str, Any]]:
        """Per node: ``last_round``, ``round_wait``, ``checkpoint``, ``checkpoint_time``, and ``refused``: why its
        newest work is in no round."""
        return self._facts

    def take_over(self, nodes: list[NodeView], checkpoints: list[CheckpointView]) -> None:
        """The facts that the coordinator before this one has shown."""
        self.checkpoints = checkpoints
        for node in nodes:
            self._facts[node.name] = {
                "last_round": node.last_round, "round_wait": node.round_wait, "checkpoint": node.checkpoint,
                "checkpoint_time": node.checkpoint_time,
            }  # fmt: skip

    def close(self) -> None:
        for future in self._answers.values():
            if not future.done():
                future.cancel()
