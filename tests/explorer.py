"""Random schedules of a whole round protocol in one process: real member and coordinator machines, a simulated world.

Models of one to three fragments, with and without overlap, waiting for all or for a quorum; or gradients at every
step, with an optimiser on each node, or on one for all, that takes the mean away from the parameters.
A cell makes one sync object or several in turn, each of which begins anew or goes on from what is held.
Links are ordered and resumable, the mesh loses, repeats and reorders; processes are killed and restarted, links and
pairs of nodes are cut for a while, nodes stand still or are believed to, the coordinator crashes between any two of its
effects and comes back from what it logged, at times without what its machine had not synced when it lost power. One
node may get some of its sums wrong. Everything follows from one seed.
"""

import random
from collections import deque
from contextlib import contextmanager

import numpy as np
from msgspec import to_builtins
from msgspec.structs import replace

from notebook_cluster.protocol.rounds import Applied, Commit, CommitReport, Prepared
from notebook_cluster.protocol.runs import Register
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.member import events_effects as m
from notebook_cluster.rounds.member import exchange as member_exchange
from notebook_cluster.rounds.member import machine as member
from notebook_cluster.rounds.member.state import MemberSettings
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import float_bits
from tests import oracle

ELEMENTS = 6 * 256 - 100
NOTHING = frozenset()
SETTINGS = rounds.RoundsSettings(one_owner_blocks=2, slices_each=2, slice_blocks=1)
MEMBER_SETTINGS = MemberSettings(chunk_bytes=700)
TICK = 0.5
MAX_ACTIONS = 20_000
ATTEMPT_BITS = 20
ACTS = ("starting", "training", "overlapping", "passing", "next")
"""Phases in which the main thread waits for nothing."""


class Broken(AssertionError):
    """An invariant does not hold."""


class Node:
    """One kernel: the member machine, and a driver that does what the user's loop and the job driver do."""

    def __init__(self, world, name, rank, incarnation):
        self.world, self.name, self.rank, self.incarnation = world, name, rank, incarnation
        settings = replace(MEMBER_SETTINGS, in_place_from=0) if world.in_place else MEMBER_SETTINGS
        self.state = member.new_member("model", name, incarnation, settings)
        if world.one_peer:
            self.state = member.sending(self.state, frozenset(f"n{other}" for other in range(9)), vectors.bytes_of)
        self.alive = self.linked = True
        self.stopped = False
        """It stands still: nothing is read, said or computed."""
        self.heard = world.now
        self.up, self.down, self.recent = deque(), deque(), deque()
        self.phase = "starting"
        self.boundaries = world.boundaries
        self.turn, self.turns = 1, world.turns_of(name)
        """Which sync object of the cell it is at, and how many it makes."""
        self.fetch = None
        self.stuck = self.given_up = 0
        self.contribution = 0
        self.round = self.fragment = 0
        """What the main thread is based on, and what it sent last."""
        self.landed = self.to_step = None
        self.params, self.state_hash = None, ""
        """Of gradients: the model, and the state that it belongs to."""
        self.clear()
        self.seen = None

    def clear(self):
        """No work of its own is in the local model."""
        self.includes = [NOTHING] * self.world.fragments.count
        """By fragment: contributions whose work is in the local model and in no committed round."""
        self.dirty = [False] * self.world.fragments.count
        """By fragment: steps were taken since its last round."""

    def say(self, kind, what):
        """To the coordinator, through the agent."""
        self.up.append((kind, self.incarnation, what))

    def act(self):
        """The main thread does its next thing, if it does not wait."""
        if self.to_step is not None:
            step, self.to_step = self.to_step, None
            if step.round == self.round + 1:
                self.feed(m.Stepped(step.round, step.attempt, self.params - step.mean))
        elif self.phase == "starting":
            self.start()
        elif self.phase == "passing":
            self.finish()
        elif self.phase == "next":
            self.turn, self.boundaries = self.turn + 1, self.world.boundaries
            if self.world.fresh or not self.state.holds:
                self.start()
            else:
                self.begin_again()
        elif self.phase == "overlapping":
            self.phase = "waiting"
            self.receive()
        elif self.phase == "training" and self.world.again and self.world.rng.random() < 0.3:
            self.begin_again()
        elif self.phase == "training":
            self.boundary()

    def start(self):
        """The cell makes a sync object, which would begin with the model as it is."""
        self.phase = "registering"
        theta = self.world.random_vector()
        zeros = np.zeros_like(theta)
        register = self.world.register(oracle.digest(theta, zeros), self.turn)
        self.world.states[register.state_hash] = (theta, zeros)
        self.feed(m.BeginRun(register, self.world.fragments, theta, zeros))

    def begin_again(self):
        """The cell makes a sync object, or registers again with the one it has, on the state that is held here."""
        self.advance()
        self.phase = "registering"
        state = self.state
        register = self.world.register(state.state_hash, self.turn)
        register = replace(register, round=state.round, holds_state=state.holds)
        self.feed(m.BeginRun(register, self.world.fragments, state.theta, state.momentum))

    def boundary(self):
        rng = self.world.rng
        self.boundaries -= 1
        finishing, finite, encoded = self.boundaries < 0, True, b""
        if not finishing or (self.boundaries == -1 and rng.random() < 0.5):  # leftover steps
            self.dirty = [True] * len(self.dirty)
        self.phase = "waiting" if finishing or not self.world.overlap else "overlapping"
        fragment = self.fragment = self.world.fragments.of_round(self.round + 1)
        samples = float(rng.randint(1, 40)) if self.dirty[fragment] else 0.0
        more = any(dirty for other, dirty in enumerate(self.dirty) if other != fragment)
        self.contribution = 0
        if samples:
            vector, lie = self.world.random_vector(fragment), self.world.chance("nan")
            if lie:
                vector[3] = np.nan
                finite = rng.random() < 0.5
            self.contribution = self.world.contribution(vector, self.includes[fragment], bad=lie)
            self.includes[fragment] |= {self.contribution}
            encoded = bytes(vector) if finite else b""
        if self.world.gradients:
            self.world.bases[self.contribution] = self.state_hash
        self.advance()
        base = self.state_hash
        boundary = m.Boundary(encoded, samples, 1, 1.0, finite, finishing, fragment=fragment, more=more, base=base)
        self.feed(boundary)

    def receive(self):
        """The main thread takes up what has landed."""
        effect, self.landed = self.landed, None
        if effect is None:
            return
        if self.world.gradients:
            if effect.members:
                self.params = effect.theta if self.world.served else self.params - effect.momentum
            self.clear()
            self.based_on(effect)
        self.round = effect.round
        if effect.counted:
            self.includes[self.fragment], self.dirty[self.fragment] = NOTHING, False
        if self.phase in ("waiting", "overlapping"):
            self.phase = "training"
            if effect.last:
                self.finish()

    def advance(self):
        """Of gradients: what the node's own optimiser made of the last round."""
        if self.world.gradients and not self.world.served:
            self.feed(m.Advance(self.round, self.params))

    def based_on(self, effect):
        """Of gradients: the parameters are those that this state has on every node."""
        self.state_hash = effect.state_hash
        if self.world.with_commit and not np.array_equal(self.params, self.world.params_of(effect)):
            raise Broken(f"{self.name} has other parameters after round {effect.round} than others")

    def interrupt(self):
        """The user stops the cell's wait and goes on in the same cell: the next contribution contains this one's
        work."""
        if self.phase in ("waiting", "overlapping"):
            self.world.apart = True
            self.receive()
            self.feed(m.LeaveRounds("interrupted"))
            self.phase = "training"

    def leave(self):
        """A Stop ends the cell here."""
        if self.alive and self.phase != "done":
            self.receive()
            self.phase, self.to_step = "done", None
            self.feed(m.LeaveRounds("interrupted"))
            self.advance()
            self.say("cell_left", "interrupted")

    def feed(self, event):
        if isinstance(event, m.FromLeader) and isinstance(event.message, Commit) and self.world.in_place:
            event = self.alone(event)
        with self.world.sums_of(self):
            self.state, effects = member.apply(self.state, event)
        exchange = self.state.exchange
        if exchange is not None and self.seen is not exchange.seal:
            self.seen = exchange.seal
            if exchange.senders.get(self.name, (0, 0.0))[1] > 0:
                key = (exchange.seal.round, exchange.seal.attempt, self.name, self.incarnation)
                self.world.sent[key] = self.contribution
        for effect in effects:
            match effect:
                case m.SendChunk():
                    self.world.mesh.append((self, effect.node, effect.header, bytes(effect.payload)))
                case m.SendControl():
                    self.say("message", effect.message)
                    if isinstance(effect.message, Prepared) and not self.world.with_commit:
                        self.apply_without_commit(effect.message)
                case _:
                    self.do(effect)

    def alone(self, event):
        """Sometimes nobody else has the arrays of the state, nor the state."""
        state = self.state
        if state.theta is None or self.world.own.random() < 0.5:
            return event
        self.state = replace(state, theta=state.theta.copy(), momentum=state.momentum.copy())
        return m.FromLeader(event.message, alone=True)

    def apply_without_commit(self, prepared):
        commit = Commit(
            job="model",
            round=prepared.round,
            attempt=prepared.attempt,
            state_hash=prepared.state_hash,
            members=[self.name],
        )
        self.feed(m.FromLeader(commit))

    def do(self, effect):
        if isinstance(effect, m.BeginTraining | m.Rebase | m.DiscardContribution | m.Finish):
            self.receive()
        match effect:
            case m.BeginTraining():
                self.world.holds(self, effect)
                if effect.round and self.world.fresh and self.world.calm and not self.world.again:
                    raise Broken(f"{self.name} begins sync object {self.turn} at round {effect.round}")
                self.clear()
                self.phase, self.round, self.params = "training", effect.round, effect.theta
                if self.world.gradients:
                    self.based_on(effect)
            case m.Apply():
                self.world.holds(self, effect)
                self.say("message", Applied(job="model", round=effect.round, state_hash=effect.state_hash))
                self.landed = effect
                if self.phase != "overlapping":
                    self.receive()
            case m.Rebase():
                self.world.holds(self, effect)
                self.round, self.params = effect.round, effect.theta
                if self.world.gradients:
                    self.clear()
                    self.based_on(effect)
            case m.ReleaseContribution():
                self.contribution = 0
                self.world.released += 1
                if self.world.gradients:
                    self.clear()
            case m.Held():
                self.world.held_back += 1
                self.leave()
            case m.TakeStep():
                self.to_step = effect
            case m.FetchState():
                self.fetch, self.stuck = [effect, None], 0
            case m.CancelFetch():
                self.fetch = None
            case m.DiscardContribution():
                self.clear()
                self.contribution = 0
            case m.Finish():
                self.finish()
            case m.Fail() if self.world.wrong is not None and "twice" in effect.reason:
                self.phase = "done"
            case m.Fail():
                raise Broken(f"{self.name} was told: {effect.reason}")
            case m.Pass():
                self.world.passed, self.world.apart = self.world.passed + 1, True
                if effect.run != self.turn or (self.world.calm and not self.world.unequal):
                    raise Broken(f"{self.name} is at sync object {self.turn} and was told to pass {effect.run}")
                self.phase, self.landed, self.to_step = "passing", None, None

    def finish(self):
        if self.turn < self.turns:
            self.phase = "next"
            return
        self.phase = "done"
        self.feed(m.LeaveRounds("finished"))
        self.advance()
        self.say("cell_left", "ok")

    def has(self, round):
        """The state after this round or a later one may be taken from here."""
        return self.state.holds and self.state.advanced and self.state.round >= round

    def transfer(self):
        """One step of a state transfer: the source takes a snapshot, later it is here."""
        effect, snapshot = self.fetch
        source = self.world.nodes[effect.source]
        if not source.alive or source.incarnation != effect.incarnation or self.stuck > 6:
            self.fetch = None
            self.given_up += self.stuck > 6
            self.world.apart |= self.given_up >= SETTINGS.fetch_attempts  # it is no longer waited for
            self.feed(m.FetchFailed(effect.source, "gone"))
        elif source.stopped or self.world.is_cut(self.name, effect.source) or not source.has(effect.round):
            return
        elif snapshot is None:
            state = source.state
            self.fetch = [effect, m.StateFetched(state.round, state.theta, state.momentum, state.state_hash)]
        else:
            self.fetch = None
            self.feed(snapshot)


class World:
    def __init__(self, seed, *, nodes=None, with_commit=True, faults=None, gradients=None, served=None):
        self.rng = rng = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.with_commit = with_commit
        own = random.Random(f"turns {seed}")
        self.turns, self.unequal, self.fresh = own.choice((1, 1, 1, 1, 2, 3)), own.random() < 0.2, own.random() < 0.7
        """Sync objects of the cell; fewer on some nodes; each forgets what is held."""
        self.passed, self.apart = 0, False
        self.boundaries = rng.choice((1, 2, 2, 3))
        self.loss = rng.choice((0.0, 0.0, 0.02, 0.2))
        self.nan = rng.choice((0.0, 0.0, 0.0, 0.1))
        self.gradients = rng.random() < 0.25 if gradients is None else gradients
        count = 1 if self.gradients else rng.choice((1, 1, 2, 3))
        if served is None:
            served = random.Random(f"served {seed}").random() < 0.4
        self.served = self.gradients and served
        self.fragments = Fragments(
            "float32", ELEMENTS, 0, count, gradients=self.gradients, central_optimizer=self.served
        )
        self.places = oracle.fragments(ELEMENTS, 256, self.fragments.count)
        self.overlap = rng.random() < 0.4 and not self.gradients
        self.quorum, self.grace = rng.choice(((None, 0.0), (None, 0.0), (1, 0.0), (2, 1.0)))
        if self.gradients:
            self.quorum, self.grace = None, 0.0
        self.params, self.bases = {}, {}
        """Of gradients: the model after each state, and the state that each contribution was computed on."""
        self.released = self.left_out = 0
        self.now = 100.0
        self.mesh, self.cuts, self.unheard = [], [], set()
        self.states, self.sent, self.contributions = {}, {}, [None]
        self.committed, self.chain, self.counted, self.ever = {}, {}, {}, {}
        self.records, self.log, self.bad, self.taken = [], [], set(), {}
        self.durable = []
        """Of each of ``records``: it is synced, and so is what was before it."""
        self.held_back = 0
        self.power, self.starts, self.lost_records = random.Random(f"power {seed}"), 1, 0
        self.without_power, self.reported = False, {}
        """The journal may miss commits; node -> (round, state hash) of the newest COMMIT that it has said since."""
        self.again_written = self.forgotten = 0
        """Commits that the journal had lost and got back, and that nobody in reach had."""
        count = nodes or rng.choice((1, 2, 3, 3, 4))
        self.own = random.Random(f"in place {seed}")
        self.in_place = self.own.random() < 0.5
        """Nodes step as of a large model: where the state is."""
        self.one_peer = self.own.random() < 0.5
        """They read each other's memory: slices come as a whole, and as they came."""
        self.nodes = {f"n{rank}": Node(self, f"n{rank}", rank, 1) for rank in range(count)}
        self.state = rounds.new_state(SETTINGS)
        self.coordinator_up = True
        self.running = set(self.nodes)
        self.crash_in = None
        for node in self.nodes.values():
            self.coordinate(rounds.MemberUp(node.name, 1, node.rank))
        self.coordinate(rounds.CellBegan(1, tuple(self.nodes)))
        names = faults if faults is not None else rng.choices(FAULTS, k=rng.choice((0, 1, 2, 2, 3, 4)))
        stops = random.Random(f"stop {seed}")
        self.stops = stops if faults is None and stops.random() < 0.2 else None
        """A Stop comes for the cell, and nodes leave it one after the other."""
        self.reachable = set(names) <= {"crash"}
        """No node is ever lost or out of reach."""
        self.faults = sorted(((rng.randint(1, 40 * count * self.turns), name) for name in names), reverse=True)
        self.timers = []
        self.again = rng.random() < 0.3
        """Nodes make their sync object again between two boundaries."""
        self.calm = not self.faults and not self.loss and self.quorum is None and self.stops is None
        self.actions = 0
        self.wrong = None
        """(node, share): that node gets this share of its next states wrong."""

    # ---- numbers

    def random_vector(self, fragment=None):
        size = ELEMENTS if fragment is None else self.places[fragment].size
        return self.numbers.standard_normal(size, np.float32)

    def turns_of(self, name):
        if self.turns == 1 or not self.unequal:
            return self.turns
        self.apart = True
        return random.Random(f"{name} {self.boundaries}").randint(1, self.turns)

    def register(self, state_hash, run=1):
        return Register(
            job="model",
            cell=1,
            run=run,
            fresh=self.fresh,
            strategy="DiLoCo",
            codec="float32",
            schema_hash="s",
            schema=[("w", [ELEMENTS], "float32")],
            parameters=ELEMENTS,
            blocks=sum(wire.blocks for wire in self.fragments.wires),
            fragments=self.fragments.count,
            fragment_blocks=[wire.blocks for wire in self.fragments.wires],
            quorum=self.quorum,
            grace=self.grace,
            every="100 steps",
            lr_bits=0 if self.gradients else None,
            momentum_bits=0 if self.gradients else float_bits(0.9),
            nesterov=not self.gradients,
            every_step=self.gradients,
            mode="server" if self.served else "",
            state_hash=state_hash,
        )

    def chance(self, _what):
        return self.nan and self.rng.random() < self.nan

    def contribution(self, vector, includes, bad):
        self.contributions.append((vector, includes))
        number = len(self.contributions) - 1
        if bad:
            self.bad.add(number)
        return number

    @contextmanager
    def sums_of(self, node):
        """The node computes its next state wrongly, if it is one that does."""
        name, share = self.wrong or ("", 0.0)
        if node.name != name or self.rng.random() >= share:
            yield
            return

        def computed(state, exchange):
            theta, momentum = right(state, exchange)
            wrong = np.float32(self.rng.choice((1e-3, 1.0))) if exchange.seal.slices else np.float32(0.0)
            return theta + wrong, momentum

        right, member_exchange.computed = member_exchange.computed, computed
        large, member_exchange.is_large = member_exchange.is_large, lambda state: False
        try:
            yield
        finally:
            member_exchange.computed, member_exchange.is_large = right, large

    # ---- what must hold

    def holds(self, node, effect):
        """Whatever a node takes as its state is one that was committed (or the job's base) for that round; without
        COMMIT at least it must be the one that every other node has, or had, after that round."""
        if not self.with_commit:
            if self.taken.setdefault(effect.round, effect.state_hash) != effect.state_hash:
                raise Broken(f"two states of round {effect.round}")
            return
        # who was out of reach may get a state of a later turn, and is told then that its own is over
        turns = range(node.turn, max(node.turn, self.state.jobs["model"].run) + 1)
        if not any(effect.state_hash in self.ever.get((turn, effect.round), ()) for turn in turns):
            raise Broken(
                f"{node.name} holds {effect.state_hash[:8]} after round {effect.round}, which nobody committed"
            )
        arrays = effect.theta, effect.momentum
        if effect.state_hash not in (self.digest(*arrays), oracle.digest(*arrays)):
            raise Broken(f"{node.name} holds arrays that do not have their hash")

    def digest(self, theta, momentum):
        """What nodes compare; where each has an optimiser the mean only, except at the beginning."""
        return oracle.digest(theta[:0] if self.gradients and not self.served else theta, momentum)

    def params_of(self, effect):
        """Of gradients: the model of this state."""
        known = self.params.get((effect.round, effect.state_hash))
        return self.states[effect.state_hash][0] if known is None else known

    def record(self, record, durable):
        self.records.append(record)
        self.durable.append(durable)
        record = to_builtins(record)
        kind, run = record["kind"], self.state.jobs["model"].run
        if kind == "commit" and self.with_commit and self.was_lost(record):
            return
        self.log.append(record)
        if not self.with_commit:
            return
        if kind == "base":
            self.chain, self.counted = {record["round"]: record["state_hash"]}, {}
            self.ever.setdefault((run, record["round"]), set()).add(record["state_hash"])
        elif kind == "cell":
            for number, state_hash in self.chain.items():
                self.ever.setdefault((run, number), set()).add(state_hash)
        elif kind == "void":
            self.chain = {r: h for r, h in self.chain.items() if r < record["round"]}
            self.counted = {c: r for c, r in self.counted.items() if r < record["round"]}
        elif kind == "commit":
            self.check_commit(record)

    def was_lost(self, record):
        """The journal gets back what it lost. Where it does not, nobody who was asked had it, and the round is played
        again."""
        number = record["commit"]["round"]
        if not self.without_power or number not in self.chain:
            return False
        facts = ("commit", "members", "slices", "slice_hashes", "base_hash", "outer")
        before = next(one for one in reversed(self.log) if one["kind"] == "commit" and one["commit"]["round"] == number)
        if all(before[fact] == record[fact] for fact in facts):
            self.again_written += 1
            return True
        known = dict(self.reported)
        if self.reachable:
            known |= {name: (n.state.round, n.state.state_hash) for name, n in self.nodes.items() if n.state.holds}
        for name, (newest, state_hash) in known.items():
            if newest >= number and self.chain.get(newest) == state_hash:
                raise Broken(f"round {number} is played again, and {name} has round {newest}")
        self.forgotten += 1
        self.chain = {r: h for r, h in self.chain.items() if r < number}
        self.counted = {c: r for c, r in self.counted.items() if r < number}
        return False

    def check_commit(self, record):
        commit = record["commit"]
        number, attempt = commit["round"], commit["attempt"]
        if number in self.chain or self.chain.get(number - 1) != record["base_hash"]:
            raise Broken(f"round {number} was committed twice, or on another state than that of round {number - 1}")
        theta, momentum = self.states[record["base_hash"]]
        rows = [row for row in record["members"] if row["weight_bits"]]
        if [row["name"] for row in rows] != commit.get("members", []):
            raise Broken("COMMIT names others than its record")
        used = [self.sent[number, attempt, row["name"], row["incarnation"]] for row in rows]
        for contribution in used:
            work = {contribution} | self.contributions[contribution][1]
            if contribution in self.bad or work & self.counted.keys():
                raise Broken(f"contribution {contribution} was counted twice, or is not finite")
            if self.bases.get(contribution, record["base_hash"]) != record["base_hash"]:
                raise Broken(f"the gradients of contribution {contribution} were computed on another state")
        self.counted |= {work: number for c in used for work in {c} | self.contributions[c][1]}
        if rows:
            mean = oracle.mean(
                [self.contributions[c][0] for c in used], [oracle.number(row["weight_bits"]) for row in rows]
            )
        if rows and self.served:
            if len(record["slices"]) != 1:
                raise Broken(f"round {number} has other slices than that of the node that steps")
            theta = theta - mean
        elif rows:
            outer, at = record["outer"], self.places[(number - 1) % len(self.places)]
            theta, momentum = theta.copy(), momentum.copy()
            theta[at], momentum[at] = oracle.diloco(
                theta[at],
                momentum[at],
                mean,
                oracle.number(outer["lr_bits"]),
                oracle.number(outer["momentum_bits"]),
                outer.get("nesterov", True),
            )
        if self.gradients:
            before = self.params.get((number - 1, record["base_hash"]), self.states[record["base_hash"]][0])
            self.params[number, commit["state_hash"]] = before - mean if rows else before
        if self.digest(theta, momentum) != commit["state_hash"]:
            raise Broken(f"round {number} is not the oracle's mean over {[row['name'] for row in rows]}")
        self.states[commit["state_hash"]] = (theta, momentum)
        self.chain[number] = commit["state_hash"]
        self.ever.setdefault((self.state.jobs["model"].run, number), set()).add(commit["state_hash"])

    def check_end(self):
        """When no node was out of reach while others finished, or came after they had, all end with the same state;
        where nothing was lost and all are waited for, after as many rounds as they had boundaries, and at most one more
        with what is left of each fragment."""
        ends = {node.state.state_hash for node in self.nodes.values() if node.alive}
        if not self.apart and len(ends) > 1:
            raise Broken(f"the nodes ended with {len(ends)} states")
        commits = sum(record["kind"] == "commit" for record in self.log)
        if self.calm and commits > self.turns * (self.boundaries + self.fragments.count):
            raise Broken(f"{commits} rounds where each node had {self.turns} times {self.boundaries} boundaries")

    # ---- the coordinator

    def coordinate(self, event):
        """One event; False when the coordinator crashed in the middle of its effects."""
        self.state, effects = rounds.apply(self.state, event)
        for effect in effects:
            if self.crash_in is not None:
                self.crash_in -= 1
                if self.crash_in < 0:
                    self.crash()
                    return False
            match effect:
                case rounds.Log():
                    self.record(effect.record, effect.durable)
                case rounds.Tell():
                    self.left_out += "has made no progress" in effect.text
                    self.calm = self.calm and "do not get through" not in effect.text  # its work comes a round later
                case rounds.Send():
                    node = self.nodes[effect.node]
                    if node.alive:
                        node.down.append(effect.message)
        return True

    def crash(self):
        self.coordinator_up, self.crash_in = False, None
        for node in self.nodes.values():
            keep = self.rng.randint(0, len(node.down))
            while len(node.down) > keep:
                node.down.pop()
        self.timers.append((self.now + self.rng.choice((0.0, 1.0, 6.0)), self.recover))

    def lose_power(self):
        """The journal ends somewhere behind its last synced record."""
        synced = max((number for number, durable in enumerate(self.durable, 1) if durable), default=0)
        left = self.power.randint(synced, len(self.records))
        self.lost_records += len(self.records) - left
        self.without_power = self.without_power or left < len(self.records)
        del self.records[left:], self.durable[left:]

    def recover(self):
        if self.power.random() < 0.5:
            self.lose_power()
        self.reported = {}
        self.starts += 1
        known = self.state.nodes
        up = sorted((node.rank, name, node.incarnation) for name, node in known.items() if node.up)
        lost = [(name, node) for name, node in known.items() if not node.up]
        self.state = rounds.new_state(SETTINGS)
        self.coordinator_up = True
        for node in self.nodes.values():  # the new one has not waited for anybody yet
            node.heard = self.now
        told = self.rng.random() < 0.5
        self.apart |= not told  # it does not wait for nodes that have not registered yet
        self.coordinate(
            rounds.LeaderRestarted(
                tuple(self.records),
                tuple((name, incarnation) for _, name, incarnation in up),
                self.now,
                1_000_000 * (1 + len(self.log)),
                1 if told else 0,
                tuple(sorted(self.running)) if told else (),
                self.starts << ATTEMPT_BITS,
            )
        )
        self.state.nodes.update(lost)

    # ---- faults

    def stop_cell(self):
        """A Stop comes for the cell."""
        stops, self.stops = self.stops, None
        if not self.coordinator_up:
            return
        self.apart = True
        self.coordinate(rounds.CellStopping(1))
        for name in self.nodes:
            later = self.now + stops.choice((0.0, 0.0, 2.0, 5.0))
            self.timers.append((later, lambda name=name: self.nodes[name].leave()))

    def is_cut(self, one, other):
        return any({one, other} == pair for pair in self.cuts)

    def fault(self, name):
        node = self.rng.choice(list(self.nodes.values()))
        later = self.now + self.rng.choice((1.0, 4.0, 12.0, 25.0))
        match name:
            case "kill" if node.alive:
                self.kill(node)
                if self.rng.random() < 0.6:
                    self.timers.append((later, lambda: self.restart(node)))
            case "crash" if self.coordinator_up:
                self.crash_in = self.rng.randint(0, 6)
            case "cut" if len(self.nodes) > 1:
                pair = set(self.rng.sample(list(self.nodes), 2))
                self.cuts.append(pair)
                self.apart = True
                self.timers.append((later, lambda: self.cuts.remove(pair)))
            case "unlink" if node.alive and node.linked:
                node.linked = False
                self.timers.append((self.now + 10.0, lambda: self.lose(node)))
                self.timers.append((later, lambda: self.relink(node)))
            case "interrupt" if not node.stopped:
                node.interrupt()
            case "stop" if node.alive and not node.stopped:
                node.stopped = self.apart = True
                self.timers.append((later, lambda: setattr(node, "stopped", False)))
            case "unheard" if node.alive:  # what it does goes on, and is taken for nothing
                self.apart = True
                self.unheard.add(node.name)
                self.timers.append((later, lambda: self.unheard.discard(node.name)))

    def kill(self, node):
        node.alive, node.fetch = False, None
        keep = self.rng.randint(0, len(node.up))
        # what the agent said of earlier processes stays, only what this one said and the agent has not read is lost
        node.up = deque(item for index, item in enumerate(node.up) if index < keep or item[0] in ("lost", "up"))
        node.down.clear()
        node.say("lost", "killed")

    def restart(self, node):
        fresh = Node(self, node.name, node.rank, node.incarnation + 1)
        fresh.up, fresh.linked = node.up, node.linked
        self.apart = True
        fresh.say("up", fresh.incarnation)
        self.nodes[node.name] = fresh

    def lose(self, node):
        """The link is silent for ten seconds."""
        node, known = self.nodes[node.name], self.state.nodes.get(node.name)
        if not node.linked and known is not None:
            if not self.coordinator_up:
                self.timers.append((self.now + 1.0, lambda: self.lose(node)))
                return
            self.apart = True
            self.coordinate(rounds.MemberLost(node.name, known.incarnation, "link lost"))

    def relink(self, node):
        node = self.nodes[node.name]
        if not self.coordinator_up:
            self.timers.append((self.now + 1.0, lambda: self.relink(node)))
            return
        node.linked = True
        known = self.state.nodes.get(node.name)
        if node.alive and known is not None and known.incarnation == node.incarnation and not known.up:
            self.coordinate(rounds.MemberUp(node.name, node.incarnation, node.rank))

    # ---- one step

    def step(self):
        """Do one random thing that can be done; a tick when there is nothing else, and now and then."""
        rng = self.rng
        self.actions += 1
        while self.faults and self.faults[-1][0] <= self.actions:
            self.fault(self.faults.pop()[1])
        if self.stops is not None and self.log and self.stops.random() < 0.01:
            self.stop_cell()
        choices = []
        for node in self.nodes.values():
            if node.linked and node.up and self.coordinator_up:
                choices.append((self.deliver_up, node))
            if node.alive and not node.stopped:
                if node.linked and node.down:
                    choices.append((self.deliver_down, node))
                if node.to_step is not None or node.phase in ACTS:
                    choices.append((Node.act, node))
                if node.fetch is not None:
                    choices.append((self.fetch, node))
        under_way = sum(not self.nodes[target].stopped for _, target, _, _ in self.mesh)
        choices.extend([(self.deliver_mesh, None)] * min(under_way, 4))
        idle = all(kind == self.fetch for kind, _ in choices)
        if rng.random() < (0.5 if idle else 0.02) or not choices:
            self.tick()
            return
        kind, node = choices[int(rng.random() * len(choices))]
        kind(node)

    def tick(self):
        self.now += TICK
        due = [timer for timer in self.timers if timer[0] <= self.now]
        self.timers = [timer for timer in self.timers if timer[0] > self.now]
        for _, action in due:
            action()
        for node in self.nodes.values():
            if node.linked and not node.stopped and node.name not in self.unheard:
                node.heard = self.now
        if self.coordinator_up:
            silent = {name: (self.now - node.heard, "") for name, node in self.nodes.items() if node.heard < self.now}
            self.coordinate(rounds.Tick(self.now, silent))
        for node in self.nodes.values():
            if node.alive and not node.stopped:
                node.stuck += 1
                node.feed(m.Tick(self.now))

    def fetch(self, node):
        node.transfer()

    def deliver_up(self, node):
        item = node.up.popleft()
        kind, incarnation, what = item
        if kind == "message":
            done = self.coordinate(rounds.FromMember(node.name, incarnation, what))
            if done and isinstance(what, CommitReport) and what.rounds and what.start == self.state.attempts:
                commit = what.rounds[-1].commit
                self.reported[node.name] = commit.round, commit.state_hash
        elif kind == "lost":
            done = self.coordinate(rounds.MemberLost(node.name, incarnation, what, gone=True))
        elif kind == "up":
            done = self.coordinate(rounds.MemberUp(node.name, incarnation, node.rank))
            if done:
                self.running.add(node.name)
                done = self.coordinate(rounds.NodeJoinedCell(1, node.name))
        else:
            self.running.discard(node.name)
            done = self.coordinate(rounds.CellLeft(1, node.name, what))
        if not done:  # not acknowledged, so it comes again, and with it what the log does not say was received
            node.up.appendleft(item)
            again = self.rng.randint(0, 3)
            while again and node.recent and kind == "message":
                node.up.appendleft(node.recent.pop())
                again -= 1
        node.recent = deque([*node.recent, item], 3) if done and kind == "message" else deque()

    def deliver_down(self, node):
        node.feed(m.FromLeader(node.down.popleft()))

    def deliver_mesh(self, _node):
        rng, mesh = self.rng, self.mesh
        index = int(rng.random() * len(mesh))
        mesh[index], mesh[-1] = mesh[-1], mesh[index]
        sender, target, header, payload = mesh.pop() if rng.random() > 0.03 else mesh[-1]
        node = self.nodes[target]
        if node.stopped and node.alive:  # it lies in the socket
            mesh.append((sender, target, header, payload))
        elif node.alive and rng.random() >= self.loss and not self.is_cut(sender.name, target):
            node.feed(m.Frame(sender.name, header, payload))

    def run(self):
        """Until every live node finished its loop."""
        while any(node.alive and node.phase != "done" for node in self.nodes.values()) or not self.coordinator_up:
            if self.actions > MAX_ACTIONS * self.turns:
                stuck = {n.name: (n.phase, n.state.phase, n.state.round) for n in self.nodes.values() if n.alive}
                raise Broken(f"stuck: {stuck}")
            self.step()
        return self


FAULTS = (
    *("kill", "kill", "kill", "crash", "crash", "cut", "unlink", "unlink", "interrupt"),
    *("stop", "stop", "stop", "unheard", "unheard"),
)
