"""A short run of ``benchmarks.fuzz``, and that what it sends is what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from notebook_cluster.protocol import ProtocolError, decode, encode, mesh, pairing
from tests.frames_mutator import Mutator, examples

ROOT = Path(__file__).parents[1]


@pytest.mark.timeout(200)
def test_bad_frames_at_every_port_do_no_harm(no_processes_left: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fuzz", "--frames", "3000"],
        capture_output=True, text=True, timeout=180, cwd=ROOT, env=os.environ.copy(), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    print(line)
    found = json.loads(line)
    assert (found["crashes"], found["hangs"]) == (0, 0), done.stderr
    assert found["frames"] >= 3000
    assert found["growth_mb"] < 5
    # They did reach what reads them: how many of them does, where a port is opened anew, is a matter of time.
    assert found["dropped"]["link"]["garbage"] > 300
    assert found["dropped"]["link"]["undecodable"] > 100
    assert found["dropped"]["mesh"] > 300
    assert sum(found["dropped"]["pairing"].values()) > 20
    assert sum(found["dropped"]["reception"].values()) > 150
    assert found["dropped"]["views"] > 50


def test_the_mutator_makes_all_kinds_of_bad_messages_and_the_same_ones_again() -> None:
    good = [[encode(header), b"payload"] for header in examples([mesh.JobFrame, mesh.CellFrame], 20, 1)]

    def made() -> list[list[bytes]]:
        mutator = Mutator(7, limit=10_000)
        return [mutator.mutate(good[number % len(good)]) for number in range(500)]

    messages = made()
    assert messages == made()
    assert all(len(frame) <= 10_000 for message in messages for frame in message)
    refused = 0
    for message in messages:
        try:
            decode(message[0] if message else b"", mesh.MeshHeader)
        except ProtocolError:
            refused += 1
    assert 100 < refused < 450  # bad ones, and valid ones that may be absurd


def test_examples_have_extreme_content() -> None:
    names = {example.name for example in examples([pairing.Begin], 200, 1)}  # type: ignore[attr-defined]
    assert any(".." in name for name in names)
    assert any(len(name) > 1000 for name in names)
