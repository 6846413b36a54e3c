"""Carries events to the pure round machine and does what it asks for: into the journal first, then tell."""

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from notebook_cluster.coordinator.peers.links import LOCAL
from notebook_cluster.coordinator.rounds.history import CheckpointHistory
from notebook_cluster.journal.records import CommitRecord, Record
from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.rounds import Applied, Arrived, Refused, RegisterRefused, Saved
from notebook_cluster.protocol.state import JobView, NodeView
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.protocol.wire import Message
from notebook_cluster.rounds.leader import events_effects as jobs
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.leader.missing import Gathering, gatherings

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

log = logging.getLogger(__name__)

SAVE_TIMEOUT = 300.0
KEPT_STEPS = 32
"""Rounds of each node of which the step is known: a checkpoint is of one of the last."""


class RoundRunner:
    """The training jobs of one cluster."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._state = rounds.RoundsState()
        self._facts: dict[str, dict[str, Any]] = {}
        self._steps: dict[str, dict[tuple[str, int], int]] = {}
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._tokens = itertools.count(1)
        self.history = CheckpointHistory(hub)

    def _feed(self, event: Any) -> None:
        """Decide on ``event``. What follows is done once the decision is in the journal. While that waits for room
        nothing is decided, so that it stays with this one attempt."""
        journal = self._hub.log
        if journal.holding:
            journal.when_written(lambda: self._feed(event))
            return
        self._state, effects = rounds.apply(self._state, event)
        for effect in effects:
            if isinstance(effect, jobs.Log):
                journal.round(self.history.annotated(effect.record))
        if effects:
            journal.when_written(lambda: self._carry_out_all(effects))

    def _carry_out_all(self, effects: list[Any]) -> None:
        for effect in effects:
            try:
                self._carry_out(effect)
            except Exception as error:
                log.exception("an effect of the rounds failed: %r", effect)
                self._hub.tell("error", f"training: {type(error).__name__}: {error}")

    def _carry_out(self, effect: Any) -> None:
        match effect:
            case jobs.Log():
                if isinstance(effect.record, CommitRecord):
                    for name in effect.record.commit.members:
                        self._facts.setdefault(name, {}).pop("refused", None)
            case jobs.Send():
                if isinstance(effect.message, Refused | RegisterRefused):
                    self._facts.setdefault(effect.node, {})["refused"] = effect.message.reason
                self._hub.members.send(effect.node, effect.message)
            case jobs.Tell():
                self._hub.tell(effect.level, effect.text)
            case jobs.Relay():
                self._hub.relaying.stalled(effect.waiting, effect.waited_for)
            case jobs.Answer():
                self._answer(effect)

    # ---- what happens

    def from_member(self, node: str, incarnation: int, message: Message) -> None:
        """A message of :mod:`notebook_cluster.protocol.rounds` from a node."""
        facts = self._facts.setdefault(node, {})
        if isinstance(message, Arrived) and message.job in self._state.jobs:
            self.history.arrived(node, message)
        elif isinstance(message, Applied):
            facts["last_round"], facts["round_wait"] = message.round, message.wait
            steps = self._steps.setdefault(node, {})
            steps[message.job, message.round] = message.step
            if len(steps) > KEPT_STEPS:
                del steps[next(iter(steps))]
        elif isinstance(message, Saved) and not message.error:
            self.history.saved(message)
            for name in self._hub.state.nodes:
                step = self._steps.get(name, {}).get((message.job, message.round), 0)
                facts = self._facts.setdefault(name, {})
                facts["checkpoint"] = f"{message.name} at round {message.round}" + (f", step {step:,}" if step else "")
                facts["checkpoint_time"] = time.time()
        self._feed(jobs.FromMember(node, incarnation, message))
        self._hub.dirty()

    def cell_started(self, cell: int, nodes: list[str]) -> None:
        for name in nodes:
            self._facts.get(name, {}).pop("refused", None)
        self._feed(jobs.CellStarted(cell, tuple(nodes)))

    def node_joined_cell(self, cell: int, node: str) -> None:
        self._feed(jobs.NodeJoinedCell(cell, node))

    def cell_left(self, cell: int, node: str, status: str) -> None:
        self._feed(jobs.CellLeft(cell, node, status))

    def node_lost(self, node: str, incarnation: int, reason: str, *, gone: bool) -> None:
        self._feed(jobs.NodeLost(node, incarnation, reason, gone))

    def members_changed(self, joined: str | None) -> None:
        """Ranks moved; ``joined`` is in (again)."""
        if joined is not None:
            node = self._hub.state.nodes[joined]
            self._feed(jobs.NodeUp(joined, node.incarnation, self._hub.state.rank(joined) or 0))
        nodes = self._hub.state.roster_nodes()
        self._feed(jobs.RanksChanged({node.name: rank for rank, node in enumerate(nodes)}))
        self._feed(jobs.HomeNodes(tuple(node.name for node in nodes if node.peer == LOCAL)))

    def tick(self, now: float, silent: dict[str, tuple[float, str]]) -> None:
        """``now`` is the time in which this process ran; ``silent``: see
        :class:`notebook_cluster.rounds.leader.events_effects.Tick`. Time in which nothing could be written down counts
        against nobody."""
        if not self._hub.log.holding:
            self._feed(jobs.Tick(now - self._hub.log.held_seconds(), silent))

    def patience_for(self, node: str) -> float:
        """See :func:`notebook_cluster.rounds.leader.machine.patience_for`."""
        return rounds.patience_for(self._state, node)

    def recover(self, records: list[Record]) -> None:
        """After a restart of the coordinator: what was committed, and the open round."""
        nodes = tuple((node.name, node.incarnation) for node in self._hub.state.roster_nodes())
        cell = self._hub.state.running()
        running = tuple(name for name, status in cell.nodes.items() if status == "running") if cell is not None else ()
        number = cell.id if cell is not None else 0
        tickets = time.time_ns() // 1_000_000  # far fewer are given than one in a millisecond
        self._feed(jobs.Recovered(tuple(records), nodes, time.monotonic(), tickets, number, running))
        self.members_changed(None)

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

    def _answer(self, effect: jobs.Answer) -> None:
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

    def views(self) -> list[JobView]:
        return [
            self._hub.global_models.shown_in(msgspec.structs.replace(job, waits=self.history.committed.waits(job.name)))
            for job in rounds.job_views(self._state)
        ]

    def gatherings(self) -> dict[str, Gathering]:
        """The jobs whose next round waits for somebody to arrive."""
        return gatherings(self._state)

    def node_facts(self) -> dict[str, dict[str, Any]]:
        """Per node: ``last_round``, ``round_wait``, ``checkpoint``, ``checkpoint_time``, and ``refused``: why its
        newest work is in no round."""
        return self._facts

    def take_over(self, nodes: list[NodeView]) -> None:
        """The facts that the coordinator before this one has shown."""
        for node in nodes:
            self._facts[node.name] = {
                "last_round": node.last_round, "round_wait": node.round_wait, "checkpoint": node.checkpoint,
                "checkpoint_time": node.checkpoint_time,
            }  # fmt: skip

    def close(self) -> None:
        for future in self._answers.values():
            if not future.done():
                future.cancel()
