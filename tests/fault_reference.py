"""What must hold after a fault, computed from the journal and from what the nodes noted, and nothing of ours.

The nodes note (:mod:`tests.fault_nodes`) the bytes of every contribution and of every chunk that went over the mesh.
"""

import struct
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from notebook_cluster.checkpoints import load
from tests import oracle

STEPS, EVERY = 8, 2
"""Of each node in a case, and to a round."""
BLOCK = 256
STALL = 30.0
"""Seconds: far more than the others may stand still when one process dies."""


@dataclass
class Journal:
    """What one node noted: (kind, fields, payload), oldest first."""

    rows: list[tuple[str, dict[str, Any], bytes]]

    @classmethod
    def read(cls, path: Path) -> "Journal":
        data, rows, position = path.read_bytes(), [], 0
        while position + 4 <= len(data):
            (size,) = struct.unpack_from("<I", data, position)
            rows.append(tuple(msgspec.msgpack.decode(data[position + 4 : position + 4 + size])))
            position += 4 + size
        return cls(rows)

    def of(self, kind: str) -> list[tuple[dict[str, Any], bytes]]:
        return [(fields, payload) for what, fields, payload in self.rows if what == kind]

    def one(self, kind: str) -> tuple[dict[str, Any], bytes]:
        (row,) = self.of(kind)
        return row


@dataclass
class Outcome:
    """What is left of one case."""

    name: str
    elements: int
    records: list[dict[str, Any]]
    """COMMIT records in the order of the log."""
    journals: dict[str, Journal]
    survivors: list[str]
    victim: str = ""
    mismatches: int = 0
    """Nodes that computed another state than the others, over all rounds."""
    left_out: list[str] = field(default_factory=list)
    """What the cluster told of nodes that stood still."""
    saved: dict[str, list[Path]] = field(default_factory=dict)
    """Of a case that saves a checkpoint: the folders that each survivor was told."""

    @property
    def longest(self) -> float:
        """Seconds that a survivor waited at most in one call of sync."""
        return max(self.journals[name].one("ends")[0]["longest"] for name in self.survivors)

    def contribution(self, node: str, number: int) -> tuple[float, bytes]:
        """(samples, encoded) of a node's contribution, which is encoded once."""
        ((samples, encoded),) = [
            (fields["samples"], data)
            for fields, data in self.journals[node].of("contribution")
            if fields["number"] == number
        ]
        return samples, encoded

    def was_sent(self, sender: str, receiver: str, place: dict[str, Any], reference: bytes) -> bool:
        """All of ``reference`` went over the wire at ``place``; fails when any byte that went there is another one."""
        covered = 0
        for fields, data in sorted(self.journals[sender].of("sent"), key=lambda row: row[0]["offset"]):
            if {**fields, **place, "to": receiver} != fields:
                continue
            offset = fields["offset"]
            where = f"{sender} to {receiver}, {place}, byte {offset}"
            assert fields["total"] == len(reference), where
            assert data == reference[offset : offset + len(data)], where
            if offset <= covered:
                covered = max(covered, offset + len(data))
        return covered == len(reference)


# ---- what must hold ------------------------------------------------------------------------------------------


def check(outcome: Outcome) -> None:
    """Every committed round is the oracle's mean of the bytes that were on the wire; every step counts once; whoever
    lives is in every round, unless a machine that is so slow that nothing came for seconds left somebody out."""
    assert outcome.mismatches == 0
    rounds = [(record["commit"]["round"], record["commit"]["members"]) for record in outcome.records]
    assert [number for number, _ in rounds] == list(range(1, len(rounds) + 1)), rounds
    if not outcome.left_out:
        assert len(rounds) == STEPS // EVERY, rounds
        assert all(set(outcome.survivors) <= set(members) for _, members in rounds), rounds
    states = committed_states(outcome)
    for node, journal in outcome.journals.items():
        for fields, _ in journal.of("applied"):
            assert fields["hash"] == states[fields["round"]], f"{node} after round {fields['round']}"
    counts = counted_steps(outcome)
    for node in outcome.survivors:
        assert counts[node] == [1] * STEPS, f"{node}: how often each step is in a committed round: {counts[node]}"
    if outcome.victim:  # a prefix of its steps: it died
        seen = counts[outcome.victim]
        assert seen == sorted(seen, reverse=True)
        assert set(seen) <= {0, 1}, f"{outcome.victim}: {seen}"
    for node, paths in outcome.saved.items():
        (checkpoint,) = map(load, paths)
        about = checkpoint.manifest
        assert (about.round, about.state_hash) == (2, states[2]), node
        assert {row.name for row in about.nodes if row.file} >= set(outcome.survivors)
    assert outcome.longest < STALL


def committed_states(outcome: Outcome) -> dict[int, str]:
    """Round -> hash of the state that the oracle computes from the wire bytes; checks every COMMIT on the way."""
    (begin,) = {payload for journal in outcome.journals.values() for _, payload in journal.of("begins")}
    theta = np.frombuffer(begin, "<f4")
    momentum, states, seen = np.zeros_like(theta), {}, set()
    for record in outcome.records:
        commit = record["commit"]
        members = [member for member in record["members"] if member["weight_bits"]]
        assert [member["name"] for member in members] == commit["members"]
        keys = {(member["name"], member["incarnation"], member["contribution"]) for member in members}
        assert not keys & seen, f"round {commit['round']} counts {keys & seen} again"
        seen |= keys
        mean = _mean(outcome, record, members)
        outer = record["outer"]
        lr, mu = oracle.number(outer["lr_bits"]), oracle.number(outer["momentum_bits"])
        theta, momentum = oracle.diloco(theta, momentum, mean, lr, mu, outer.get("nesterov", True))
        states[commit["round"]] = oracle.digest(theta, momentum)
        assert states[commit["round"]] == commit["state_hash"], f"round {commit['round']}"
    return states


def _mean(outcome: Outcome, record: dict[str, Any], members: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """Of one round, slice by slice from the bytes that its owner got, bit for bit what the owner sent."""
    round, attempt = record["commit"]["round"], record["commit"]["attempt"]
    own = {member["name"]: outcome.contribution(member["name"], member["contribution"]) for member in members}
    total = sum(samples for samples, _ in own.values())
    weights = [oracle.number(member["weight_bits"]) for member in members]
    assert weights == [np.float32(samples / total) for samples, _ in own.values()]
    means = []
    for index, piece in enumerate(record["slices"]):
        start, stop = (min(4 * BLOCK * edge, 4 * outcome.elements) for edge in (piece["start"], piece["stop"]))
        place, vectors = {"round": round, "attempt": attempt, "slice": index}, []
        for name, (_, encoded) in own.items():
            data = encoded[start:stop]
            if name != piece["owner"]:
                assert outcome.was_sent(name, piece["owner"], {"part": "contribution", **place}, data), (name, place)
            vectors.append(np.frombuffer(data, "<f4"))
        mean = oracle.mean(vectors, weights)
        for name in (member["name"] for member in record["members"] if member["name"] != piece["owner"]):
            outcome.was_sent(piece["owner"], name, {"part": "mean", **place}, mean.tobytes())
        assert xxhash.xxh3_128_hexdigest(mean.tobytes()) == record["slice_hashes"][index]
        means.append(mean)
    return np.concatenate(means)


def counted_steps(outcome: Outcome) -> dict[str, list[int]]:
    """Node -> how often each of its steps is in a committed round, read from the contributions themselves: what a step
    takes away is drawn by node and step, and such vectors are as good as orthogonal."""
    sums: dict[str, Any] = defaultdict(lambda: np.zeros(outcome.elements, np.float32))
    for record in outcome.records:
        for member in record["members"]:
            if member["weight_bits"]:
                _, encoded = outcome.contribution(member["name"], member["contribution"])
                sums[member["name"]] += np.frombuffer(encoded, "<f4")
    counts = {}
    for node in outcome.journals:
        draws = [
            np.random.default_rng([*node.encode(), step]).standard_normal(outcome.elements, dtype=np.float32)
            for step in range(STEPS)
        ]
        shares = [float(sums[node] @ draw / (draw @ draw)) for draw in draws]
        counts[node] = [round(share) for share in shares]
        assert max(abs(share - count) for share, count in zip(shares, counts[node], strict=True)) < 0.2
    return counts
