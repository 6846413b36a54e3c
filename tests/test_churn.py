"""A minute of the churn, and that its checker sees what it is there to see."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.churn import decoding
from benchmarks.churn.checking import Checker, Findings
from benchmarks.churn.recording import Contribution, Life, Sent, hash_of
from benchmarks.churn.training import CODECS, ELEMENTS, EVERY, first_state, make_sync, samples_of, step_of
from notebook_cluster import training as nc
from notebook_cluster.codecs import get_codec
from tests import namespaces
from tests.cluster_in_process import Cluster, Node

ROOT = Path(__file__).parents[1]
LEG = 5


@pytest.mark.proof
@pytest.mark.namespaces
@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing() or "everything is there")
@pytest.mark.timeout(600)
def test_a_minute_of_faults_loses_and_doubles_no_step_and_leaves_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "lines"
    options = ["--minutes", "1", "--peers", "2", "--seed", "1", "--keep", str(kept)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.churn", *options],
        capture_output=True, text=True, timeout=570, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    nothing = ("wrong_means", "wrong_contributions", "lost_steps", "doubled_steps", "leftovers", "stuck")
    assert [found[name] for name in nothing] == [0] * len(nothing), found
    assert found["faults"]["total"] >= 8, found
    assert found["rounds"] >= 30, found
    assert found["checked_rounds"] == found["rounds"]
    assert kept.read_text().count('"what": "leg"') == len(CODECS)


# ---- the checker ---------------------------------------------------------------------------------------------


class Played:
    """Rounds of two nodes as a cluster would play them, with the package's codecs: what the journal and the nodes say
    of them."""

    def __init__(self, codec: str, rounds: int) -> None:
        self.codec, self.wire = codec, get_codec(codec)
        self.theta = first_state(LEG)
        self.momentum = decoding.first_momentum(codec, self.theta)
        self.lives = {name: Life(name, 1, number) for number, name in enumerate(("desk", "mini"), 1)}
        self.done = dict.fromkeys(self.lives, 0)
        self.feedback: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        for number in range(1, rounds + 1):
            self.play(number)
        for name, life in self.lives.items():
            life.ends = {"round": rounds, "done": self.done[name], "model": hash_of(self.theta)}

    def contribute(self, name: str, serial: int) -> Contribution:
        steps = range(self.done[name] + 1, self.done[name] + EVERY + 1)
        self.done[name] += EVERY
        local = self.theta - sum(step_of(LEG, name, 1, step) for step in steps)
        work, left = self.theta - local, self.feedback.get(name)
        if left is not None:
            work = work + left * np.float32(0.8 if self.codec == "sparse" else 1.0)
        encoded = bytes(self.wire.encode(work))
        self.feedback[name] = work - self.wire.decode(encoded, ELEMENTS)
        samples = float(sum(samples_of(name, step) for step in steps))
        mine = Contribution(serial, samples, encoded, local, serial - 1, self.done[name])
        self.lives[name].contributions[serial] = mine
        return mine

    def play(self, number: int) -> None:
        work = {name: self.contribute(name, number) for name in self.lives}
        total = sum(mine.samples for mine in work.values())
        weights = [np.float32(mine.samples / total) for mine in work.values()]
        towards, sent = decoding.mean(self.codec, [mine.encoded for mine in work.values()], weights, ELEMENTS)
        before = decoding.digest(self.theta, self.momentum)
        self.theta, self.momentum = decoding.outer_step(self.codec, self.theta, self.momentum, towards, len(work))
        hashed = decoding.digest(self.theta, self.momentum)
        for sender, part, data in (("mini", "contribution", work["mini"].encoded), ("desk", "mean", sent)):
            to = "desk" if sender == "mini" else "mini"
            row = Sent(to, part, number, 1, 0, 0, len(data), data)
            self.lives[sender].sent_in[part, number, 1] = [row]
        self.record(number, before, weights, hashed, sent)

    def record(self, number: int, before: str, weights: list[Any], hashed: str, sent: bytes) -> None:
        rates = decoding.outer_rates(self.codec, len(weights))
        members = [
            {"name": name, "incarnation": 1, "weight_bits": int(weight.view(np.uint32)), "contribution": number}
            for name, weight in zip(self.lives, weights, strict=True)
        ]
        commit = {"round": number, "attempt": 1, "state_hash": hashed, "members": list(self.lives)}
        self.records.append({
            "kind": "commit", "commit": commit, "members": members, "base_hash": before,
            "slices": [{"owner": "desk", "start": 0, "stop": 5}], "slice_hashes": [decoding.hash_bytes(sent)],
            "outer": {"lr_bits": int(rates[0].view(np.uint32)), "momentum_bits": int(rates[1].view(np.uint32))},
        })  # fmt: skip

    def check(self) -> Findings:
        return Checker(self.codec, LEG, first_state(LEG), self.records, list(self.lives.values()), set()).check()


@pytest.fixture(params=CODECS)
def played(request: pytest.FixtureRequest) -> Iterator[Played]:
    return Played(request.param, 6)


@pytest.mark.parametrize("codec", CODECS)
def test_the_checker_begins_and_goes_on_as_a_job_does(codec: str, tmp_path: Path) -> None:
    def cell(node: Node) -> list[str]:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.from_numpy(first_state(LEG)))
        sync = make_sync(nc, model, LEG, codec)
        hashes = [sync._replica.state_hash]
        sync.finish()  # a round without work
        return [*hashes, sync._replica.state_hash]

    theta = first_state(LEG)
    momentum = decoding.first_momentum(codec, theta)
    with Cluster(["desk"], tmp_path) as cluster:
        hashes = cluster.run(cell)["desk"]
    assert hashes == [decoding.digest(theta, momentum)] * 2


def test_the_checker_finds_nothing_where_nothing_is_wrong(played: Played) -> None:
    assert vars(played.check()) == vars(Findings(rounds=6, checked_rounds=6))


def test_the_checker_sees_a_flipped_bit_of_a_contribution(played: Played) -> None:
    mine = played.lives["mini"].contributions[3]
    flipped = bytearray(mine.encoded)
    flipped[2] ^= 0x10
    played.lives["mini"].contributions[3] = replace(mine, encoded=bytes(flipped))
    found = played.check()
    print(found.notes)
    assert found.wrong_means >= 1
    assert found.wrong_contributions >= 1


def test_the_checker_sees_work_that_counts_more_samples_than_it_has(played: Played) -> None:
    mine = played.lives["mini"].contributions[3]
    played.lives["mini"].contributions[3] = replace(mine, samples=2 * mine.samples)
    found = played.check()
    assert (found.wrong_means, found.wrong_contributions) == (1, 1), found.notes


def test_the_checker_sees_a_step_that_two_rounds_count(played: Played) -> None:
    mine = played.lives["mini"].contributions[4]
    again = step_of(LEG, "mini", 1, 2 * EVERY)
    played.lives["mini"].contributions[4] = replace(mine, local=mine.local - again)
    found = played.check()
    assert found.doubled_steps == 1, found


def test_the_checker_sees_a_contribution_that_two_rounds_count(played: Played) -> None:
    played.records[3]["members"][1]["contribution"] = 3
    found = played.check()
    assert found.doubled_steps == EVERY, found
    assert found.wrong_means >= 1


def test_the_checker_sees_a_lost_step(played: Played) -> None:
    mine = played.lives["mini"].contributions[4]
    lost = step_of(LEG, "mini", 1, mine.done - 1)
    played.lives["mini"].contributions[4] = replace(mine, local=mine.local + lost)
    found = played.check()
    assert found.lost_steps == 1, found
    assert found.doubled_steps == 0


def test_the_checker_sees_work_at_the_end_that_no_round_counts(played: Played) -> None:
    ends = played.lives["desk"].ends
    assert ends is not None
    ends["done"] += 2
    assert played.check().lost_steps == 2
