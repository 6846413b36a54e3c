"""What must hold in every world, at each step: the promises of docs/reliability.md.

- one state for each round, and it is what numpy makes of the contributions that were sent
- no round is held by a node that the journal does not have, also after a machine lost power
- no step's work is in two rounds; none is lost but that of a killed process and of what was refused
- a program runs because the owner asked for it, once in each process
- when the faults are over, everything that is alive goes on
"""

import contextlib
from unittest import mock

import numpy as np

from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.reading import recover
from notebook_cluster.journal.records import BaseRecord, CommitRecord, VoidRecord
from notebook_cluster.protocol.rounds import Commit
from notebook_cluster.rounds.member import events_effects as m
from notebook_cluster.training.background.job import Job
from notebook_cluster.training.loop.round_client import RoundClient
from tests import oracle

GOES_ON = 45.0
"""Virtual seconds after the last fault within which a round is committed or the cell ends."""


class Broken(AssertionError):
    """A promise does not hold."""


class Ledger:
    """The steps of one process in the cell: which of them are in no committed round yet."""

    def __init__(self, checks, node, incarnation):
        self.checks, self.node, self.incarnation = checks, node, incarnation
        self.steps = 0
        self.pending = {}
        """Fragment -> steps whose work is in the local model only."""
        self.dropped = set()
        self.ended = self.killed = False
        self.holds = 0
        """The round after which it holds the state."""
        self.held = None
        """(Round, hash of the state) that was looked at last."""
        self.weights = None

    def step(self):
        self.steps += 1
        for waiting in self.pending.values():
            waiting.add(self.steps)

    def finish(self, model, round):
        self.ended = True
        self.weights = round, model.weight.detach().numpy().tobytes()


class Checks:
    """Of one world."""

    def __init__(self, world):
        self.world = world
        self.goes_on = GOES_ON
        self.over = False
        self.ledgers = {}
        """(node, incarnation) -> Ledger"""
        self.states = {}
        """Round -> hash of the state after it."""
        self.first_states = set()
        """Hashes of those with which the job has begun, until it began with another one: nobody's work is in them."""
        self.values = {}
        """Hash -> (theta, momentum)"""
        self.contributions = {}
        """(node, incarnation, serial) -> (fragment, steps, bytes)"""
        self.counted = {}
        """(node, incarnation, fragment, step) -> round"""
        self.commits = {}
        """(round, hash) -> row of the journal"""
        self.applied = set()
        self.commit_times = []
        self.refused = self.recomputed = 0

    def broken(self, text):
        """The world has failed, whoever catches what is raised here."""
        error = Broken(text)
        self.world.schedule.failures.append((self.world.schedule.current, error))
        raise error

    def say(self, text):
        self.world.say(text)

    # ---- what happens

    @contextlib.contextmanager
    def watching(self):
        """See every event of a member, and every row of a round."""
        checks, apply_event, write_round = self, Job.apply_event, Journal.round

        def watched_event(job, event):
            checks.before_event(job, event)
            apply_event(job, event)
            checks.after_event(job, event)

        def watched_round(journal, record, *, durable=True):
            checks.recorded(journal, record)
            write_round(journal, record, durable=durable)

        notify, refuse = Job.notify, RoundClient._refused

        def watched_notice(job, notice):
            checks.noticed(job, notice)
            notify(job, notice)

        def watched_refusal(client, reason):
            checks.forgets(client._job)
            refuse(client, reason)

        with (
            mock.patch.object(Job, "apply_event", watched_event),
            mock.patch.object(Journal, "round", watched_round),
            mock.patch.object(Job, "notify", watched_notice),
            mock.patch.object(RoundClient, "_refused", watched_refusal),
        ):
            yield

    def ledger_of(self, job):
        return self.ledgers.get((job.runtime.name, job.runtime.incarnation))

    def before_event(self, job, event):
        if isinstance(event, m.FromLeader) and isinstance(event.message, Commit):
            commit = event.message
            row = self.commits.get((commit.round, commit.state_hash))
            if row is None or row[1]._done < row[0]:
                self.broken(f"round {commit.round} was told to {job.runtime.name} and is not in the journal")

    def after_event(self, job, event):
        state = job.member
        ledger = self.ledger_of(job)
        if ledger is None:
            return
        if isinstance(event, m.Boundary) and event.samples:
            steps = frozenset(ledger.pending.setdefault(event.fragment, set()))
            key = (ledger.node, ledger.incarnation, state.serial)
            self.contributions[key] = (event.fragment, steps, bytes(event.encoded))
        if isinstance(event, m.BeginRun) and state.fragments is not None:
            for fragment in range(state.fragments.count):
                ledger.pending.setdefault(fragment, set())
        if state.holds and state.advanced and state.theta is not None:
            self.held(ledger, state)

    def held(self, ledger, state):
        ledger.holds = state.round
        if ledger.held == (state.round, state.state_hash):
            return  # looked at when it came; since then the job may have begun anew without this node
        ledger.held = state.round, state.state_hash
        known = self.states.setdefault(state.round, state.state_hash)
        if known != state.state_hash:
            if state.round == 0 and state.state_hash in self.first_states:
                return  # it holds or takes over what one that has left began with: the job begins with another or again
            self.broken(f"{ledger.node} holds {state.state_hash} after round {state.round}, others {known}")
        if state.state_hash not in self.values:
            theta, momentum = np.array(state.theta, copy=True), np.array(state.momentum, copy=True)
            self.values[state.state_hash] = (theta, momentum)
            if not self.world.plan.every_step and oracle.digest(theta, momentum) != state.state_hash:
                self.broken(f"{ledger.node} names its state after round {state.round} by a wrong hash")
        self.applied.add((state.round, state.state_hash))

    def noticed(self, job, notice):
        ledger = self.ledger_of(job)
        if ledger is None:
            return
        if isinstance(notice, m.DiscardContribution):
            self.refused += 1
            self.forgets(job)
        elif isinstance(notice, m.BeginTraining):
            lost = set().union(*ledger.pending.values()) if ledger.pending else set()
            if lost and not self.world.plan.every_step:
                self.broken(f"{ledger.node} begins anew at round {notice.round}: steps {sorted(lost)[:5]} are lost")
        elif isinstance(notice, m.Fail):
            self.say(f"{ledger.node} was told: {notice.reason}")

    def forgets(self, job):
        """Its work was refused. With overlap the main thread, which puts the model back, hears of that later than the
        rounds: the steps between were made on a model that is given up."""
        ledger = self.ledger_of(job)
        for waiting in ledger.pending.values() if ledger is not None else ():
            ledger.dropped |= waiting
            waiting.clear()

    def based(self, last, state_hash):
        """The job goes on from the state after round ``last``: right only where nobody is left in reach who holds a
        newer one."""
        there = self.world.coordinator
        nodes = there[1].core.state.nodes if there is not None else {}
        for ledger in self.ledgers.values():
            node = nodes.get(ledger.node)
            here = (
                node is not None and node.incarnation == ledger.incarnation and node.condition not in ("dead", "lost")
            )
            if here and not ledger.killed and ledger.holds > last:
                self.broken(f"the job goes on from round {last}, and {ledger.node} holds round {ledger.holds}")
        if last == 0:
            self.first_states.add(state_hash)
        if self.states.get(last, state_hash) != state_hash or max(self.states, default=0) > last:
            self.say(f"the job goes on from round {last}: nobody holds more")
            self.states = {round: held for round, held in self.states.items() if round < last}
            self.applied = {(round, held) for round, held in self.applied if round < last}
        self.states[last] = state_hash

    def recorded(self, journal, record):
        if self.world.schedule.process.replaced and isinstance(record, BaseRecord | VoidRecord):
            return  # a coordinator that was replaced and wakes up decides what it likes: nobody obeys it
        if isinstance(record, BaseRecord):
            self.based(record.round, record.state_hash)
        if isinstance(record, VoidRecord):
            self.based(record.round - 1, record.state_hash)
        if not isinstance(record, CommitRecord):
            return
        commit = record.commit
        self.commits[commit.round, commit.state_hash] = (journal._next, journal)
        self.commit_times.append(self.world.schedule.now)
        counted = [member for member in record.members if float_bits_value(member) > 0]
        for member in counted:
            key = (member.name, member.incarnation, member.contribution)
            known = self.contributions.get(key)
            if known is None:
                self.broken(f"round {commit.round} counts contribution {key}, which nobody made")
            fragment, steps, _ = known
            for step in steps:
                place = (member.name, member.incarnation, fragment, step)
                before = self.counted.setdefault(place, commit.round)
                if before != commit.round:
                    self.broken(f"step {step} of {member.name} is in round {before} and in round {commit.round}")
            ledger = self.ledgers.get(key[:2])
            if ledger is not None:
                ledger.pending.get(fragment, set()).difference_update(steps)
        self.recompute(record, counted)

    def recompute(self, record, counted):
        """The state as numpy makes it of what was sent."""
        plan, before = self.world.plan, self.values.get(record.base_hash)
        if plan.strategy != "DiLoCo" or plan.codec != "float32" or plan.fragments > 1 or before is None or not counted:
            return
        sent = [np.frombuffer(self.contributions[c.name, c.incarnation, c.contribution][2], "<f4") for c in counted]
        if any(len(part) != len(before[0]) for part in sent):
            return
        weights = [float_bits_value(member) for member in counted]
        outer = record.outer
        lr, mu = (oracle.number(bits) for bits in (outer.lr_bits, outer.momentum_bits))
        theta, momentum = oracle.diloco(*before, oracle.mean(sent, weights), lr, mu, outer.nesterov)
        if oracle.digest(theta, momentum) != record.commit.state_hash:
            self.broken(f"round {record.commit.round} is not what its contributions make")
        self.recomputed += 1

    def coordinator_began(self, made):
        """After a restart: every round that a node holds is in the journal."""
        journal = made.core.journal
        for record in made._round_records:
            if isinstance(record, CommitRecord):
                self.commits[record.commit.round, record.commit.state_hash] = (0, journal)
        path = journal.path
        if not self.applied or not path.exists():
            return
        rounds = recover(path).committed
        newest = max(round for round, _ in self.applied)
        if rounds.seen < newest and not self.world.plan.every_step:
            self.broken(f"the journal has {rounds.seen} rounds, and nodes hold round {newest}")

    @contextlib.contextmanager
    def training(self, process, runtime):
        ledger = self.ledgers.get((runtime.name, runtime.incarnation))
        if ledger is not None:
            self.broken(f"{runtime.name}/{runtime.incarnation} runs the cell a second time")
        ledger = self.ledgers[runtime.name, runtime.incarnation] = Ledger(self, runtime.name, runtime.incarnation)
        yield ledger

    def kernel_ended(self, process):
        if process.runtime is not None:
            ledger = self.ledgers.get((process.runtime.name, process.runtime.incarnation))
            if ledger is not None and not ledger.ended:
                ledger.killed = True

    def cell_failed(self, process, error):
        self.broken(f"the cell failed on {process}: {error!r}")

    # ---- at the end

    def heal(self):
        before, goes_on = len(self.commit_times), self.goes_on

        def check():
            with contextlib.suppress(Broken):
                look()

        def look():
            if not self.over and len(self.commit_times) == before and not self.finished():
                self.broken(f"no round within {goes_on:g} s of the last fault: {self.unfinished()}")

        self.world.schedule.later(goes_on, check)

    def finished(self):
        there = self.world.coordinator
        if there is None or self.world.view.cell is None:
            return False
        state = there[1].core.state
        return (state.running() is None and not state.queue()) or self.end_was_lost()

    def end_was_lost(self):
        """Known and open (docs/reliability.md): that a node has ended a cell is synced within a second only."""
        lost = self.world.disks[self.world.head].lost_bytes
        living = [process.runtime for process in self.world.kernels if process.runtime is not None]
        ledgers = [self.ledgers.get((runtime.name, runtime.incarnation)) for runtime in living]
        return bool(lost) and self.world.healed and all(ledger is not None and ledger.ended for ledger in ledgers)

    def unfinished(self):
        there = self.world.coordinator
        nodes = (
            {name: node.condition for name, node in there[1].core.state.nodes.items()} if there else "no coordinator"
        )
        ledgers = [
            f"{key}: {ledger.steps} steps{', ended' if ledger.ended else ''}{', killed' if ledger.killed else ''}"
            for key, ledger in self.ledgers.items()
        ]
        return f"{nodes}; {'; '.join(ledgers)}"

    def at_the_end(self):
        self.over = True
        for ledger in self.ledgers.values():
            if not ledger.ended or self.world.plan.every_step:
                continue
            lost = {
                step
                for fragment in ledger.pending
                for step in range(1, ledger.steps + 1)
                if step not in ledger.dropped and (ledger.node, ledger.incarnation, fragment, step) not in self.counted
            }
            if lost:
                self.broken(
                    f"{ledger.node}/{ledger.incarnation} has ended: its steps {sorted(lost)[:8]} are in no round"
                )
        models = {}
        for ledger in self.ledgers.values():
            if ledger.ended and models.setdefault(ledger.weights[0], ledger.weights[1]) != ledger.weights[1]:
                self.broken(f"{ledger.node} has another model at the end of round {ledger.weights[0]} than others")


def float_bits_value(member):
    return float(oracle.number(member.weight_bits))
