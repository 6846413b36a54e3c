"""A coordinator's round machine in a test, with short ways to say what nodes say."""

import msgspec

from notebook_cluster.protocol import rounds as p
from notebook_cluster.protocol import runs
from notebook_cluster.rounds.leader import machine as rounds
from notebook_cluster.rounds.numerics.outer import bits_float, float_bits

SCHEMA = [("w", [100, 256], "float32")]


def register(state_hash="h0", cell=1, **fields):
    known = {
        "job": "model", "cell": cell, "strategy": "DiLoCo", "codec": "float32", "schema_hash": "s", "schema": SCHEMA,
        "parameters": 25_600, "blocks": 100, "every": "100 steps", "momentum_bits": float_bits(0.9),
        "state_hash": state_hash,
    }  # fmt: skip
    return runs.Register(**{**known, **fields})


class Cluster:
    """Nodes are named a, b, c ...; their rank is their place in the alphabet."""

    def __init__(self, names="abc", settings=None):
        self.state = rounds.new_state(settings)
        self.effects, self.records = [], []
        self.incarnations = dict.fromkeys(names, 1)
        self.feed(rounds.Tick(100.0))
        for rank, name in enumerate(names):
            self.feed(rounds.MemberUp(name, 1, rank))
        self.feed(rounds.CellBegan(1, tuple(names)))

    @property
    def log(self):
        """The records as JSON values."""
        return [msgspec.to_builtins(record) for record in self.records]

    def feed(self, event):
        """The effects of this event."""
        self.state, effects = rounds.apply(self.state, event)
        self.effects += effects
        self.records += [effect.record for effect in effects if isinstance(effect, rounds.Log)]
        return effects

    def say(self, node, message):
        return self.feed(rounds.FromMember(node, self.incarnations[node], message))

    def lose(self, node, gone=True):
        return self.feed(rounds.MemberLost(node, self.incarnations[node], "killed", gone))

    @property
    def job(self):
        return self.state.jobs["model"]

    def train(self, names="abc"):
        """All of ``names`` registered and hold the state of the lowest rank, h0."""
        for name in names:
            self.say(name, register("h0"))
        return self

    def arrive(self, names="abc", *, number=1, base="h0", samples=10.0, **fields):
        effects = []
        for name in names:
            known = {"norm": 1.0, "finite": True, "steps": 100, "contribution": number}
            effects += self.say(
                name,
                p.Arrived(
                    job="model", round=number, incarnation=self.incarnations[name], base_hash=base, samples=samples,
                    schema_hash="s", codec="float32", **{**known, **fields},
                ),
            )  # fmt: skip
        return effects

    def prepare(self, names="abc", *, number=1, attempt=1, state_hash="h1", slices=("x",), flushes=False):
        effects = []
        for name in names:
            effects += self.say(
                name,
                p.Prepared(
                    job="model", round=number, attempt=attempt, incarnation=self.incarnations[name],
                    slice_hashes=list(slices), state_hash=state_hash, flushes=flushes,
                ),
            )  # fmt: skip
        return effects

    def restart(self, names="abc", cell=1, running="abc", attempts=0):
        """A new coordinator with what this one logged."""
        self.state = rounds.new_state()
        nodes = tuple((name, self.incarnations[name]) for name in names)
        return self.feed(
            rounds.LeaderRestarted(tuple(self.records), nodes, 200.0, 1000, cell, tuple(running), attempts)
        )

    def status(self, node, number, state_hash, **fields):
        known = {"phase": "training", "cell": 1}
        return self.say(node, p.RoundStatus(job="model", round=number, state_hash=state_hash, **{**known, **fields}))


def sent(effects, kind, node=None):
    """Messages of ``kind`` among the effects: {node: message}, or those to ``node``."""
    found = [(e.node, e.message) for e in effects if isinstance(e, rounds.Send) and isinstance(e.message, kind)]
    return dict(found) if node is None else [message for name, message in found if name == node]


def told(effects, level):
    return [e.text for e in effects if isinstance(e, rounds.Tell) and e.level == level]


def weights(seal):
    return {member.name: round(bits_float(member.weight_bits), 4) for member in seal.members}
