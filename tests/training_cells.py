"""For the end-to-end tests of training: a model whose every step is known, and the numpy reference of a journal."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.journal.reading import read_rounds
from notebook_cluster.protocol.state import JobView
from tests import oracle
from tests.conftest import wait_until

SETUP = """
import os, pathlib, signal, time
import numpy as np, torch
from torch import nn
from notebook_cluster.mesh import lending
from notebook_cluster.protocol import rounds
from notebook_cluster.training import current_runtime
from notebook_cluster.rounds.numerics.outer import state_hash

torch.set_num_threads(1)
lending.LEAST = 4096  # slices of these small models too are read where they are

def make_model(elements, seed=0):
    model = nn.Module()
    draw = np.random.default_rng(seed).standard_normal(elements, dtype=np.float32)
    model.weight = nn.Parameter(torch.from_numpy(draw))
    return model

def work(model, step):
    "One inner step: something drawn by node and step is taken away."
    draw = np.random.default_rng([*nc.node().encode(), step]).standard_normal(model.weight.numel(), dtype=np.float32)
    with torch.no_grad():
        model.weight -= torch.from_numpy(draw)

def keep(what, model, number):
    "The model as it is, for the reference in the test."
    np.save(f"{what}-{number}-{nc.node()}.npy", model.weight.detach().numpy())

def when(direction, kind, number, action, job="model"):
    "Do something at a named point of a round: just before a message of the job is sent, or when it comes."
    runtime = current_runtime()
    if direction == "send":
        send = runtime.send_control
        def spy(message):
            if isinstance(message, kind) and (message.job, message.round) == (job, number):
                action()
            send(message)
        runtime.send_control = spy
    else:
        machine = runtime.job(job)
        take = machine.on_control
        def spy(message):
            if isinstance(message, kind) and message.round == number:
                action()
            take(message)
        machine.on_control = spy

def die():
    pathlib.Path("killed").write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def unique_name(request: pytest.FixtureRequest) -> str:
    """For the job of a test: that of no other test, as a shared cluster knows it for as long as it lives."""
    return f"job-{zlib.crc32(request.node.name.encode()):08x}"


def job(cluster: Cluster, name: str = "model") -> JobView:
    return next(row for row in cluster.state().jobs if row.name == name)


def commits(cluster: Cluster, name: str = "model") -> list[dict[str, Any]]:
    """COMMIT records of the job, as of :func:`logged`."""
    return logged(cluster, "commit", name)


def logged(cluster: Cluster, kind: str, name: str = "model") -> list[dict[str, Any]]:
    """Records of this kind of the job in the order of the journal, each with the ``time`` at which it was written."""
    found = []
    for noted in read_rounds(Path(cluster.connection.file.run_log)):
        record = msgspec.to_builtins(noted.record)
        if record["kind"] == kind and record["job"] == name:
            found.append({"time": noted.time, **record})
    return found


def counted(record: dict[str, Any]) -> list[str]:
    """Whose work a COMMIT record names."""
    return list(record["commit"]["members"])


def wait_for_commit(cluster: Cluster, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """The first COMMIT record that fulfils ``condition``."""

    def look() -> dict[str, Any] | None:
        return next((record for record in commits(cluster) if condition(record)), None)

    return wait_until(look, 60, lambda: f"{what}; so far: {[counted(record) for record in commits(cluster)]}")


def replay(folder: Path, records: list[dict[str, Any]]) -> list[np.ndarray[Any, Any]]:
    """Global parameters after each of ``records`` (rounds 1, 2 ...), by the reference in numpy.

    Reads what the nodes kept: ``theta-0-NODE.npy`` and, of each member at each boundary, ``local-ROUND-NODE.npy``.
    Compares every hash on the way.
    """
    (theta,) = {path.read_bytes(): np.load(path) for path in folder.glob("theta-0-*.npy")}.values()
    momentum, states = np.zeros_like(theta), []
    for record in records:
        number = record["commit"]["round"]
        members = [member for member in record["members"] if member["name"] in counted(record)]
        work = [theta - np.load(folder / f"local-{number}-{member['name']}.npy") for member in members]
        weights = [oracle.number(member["weight_bits"]) for member in members]
        outer = record["outer"]
        lr, mu = oracle.number(outer["lr_bits"]), oracle.number(outer["momentum_bits"])
        theta, momentum = oracle.diloco(
            theta, momentum, oracle.mean(work, weights), lr, mu, outer.get("nesterov", True)
        )
        assert oracle.digest(theta, momentum) == record["commit"]["state_hash"], f"round {number}"
        states.append(theta)
    return states
