"""What the nodes run: a cell that trains until it is told that the leg is over. Imported by kernels."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.churn.recording import Recorder, hash_of

ELEMENTS = 1200
"""Parameters: whole and shorter blocks of int8, one chunk of SparseLoCo."""
EVERY = 10
"""Steps of a round."""
STEP = 0.03
"""Seconds of a step, slept."""
SCALE = np.float32(0.05)

CODECS = ("float32", "int8", "sparse")

CELL = """
from benchmarks.churn import training
training.train(nc, {folder!r}, {number}, {codec!r})
"""


def job_name(number: int) -> str:
    """Of leg ``number``."""
    return f"leg-{number}"


def first_state(number: int) -> Any:
    """The parameters that leg ``number`` begins with."""
    return np.random.default_rng([number]).standard_normal(ELEMENTS, dtype=np.float32)


def step_of(number: int, node: str, incarnation: int, step: int) -> Any:
    """What that step takes away from the parameters: like no other step of anybody."""
    draw = np.random.default_rng([number, *node.encode(), incarnation, step])
    return draw.standard_normal(ELEMENTS, dtype=np.float32) * SCALE


def samples_of(node: str, step: int) -> int:
    """How many samples that step counts: not the same on all nodes, nor at all times."""
    return 1 + (len(node) + step // 7) % 3


def train(nc: Any, folder: str, number: int, codec: str) -> None:
    """Leg ``number``, on this node."""
    import torch
    from torch import nn

    from notebook_cluster.training import current_runtime

    torch.set_num_threads(1)
    model = nn.Module()
    model.weight = nn.Parameter(torch.from_numpy(first_state(number)))
    runtime, place, node = current_runtime(), Path(folder), nc.node()
    over, poison = place / job_name(number) / "over", place / f"nan-{node}"
    recorder = Recorder(place, job_name(number), node, runtime.incarnation)
    recorder.watch(runtime)
    sync = make_sync(nc, model, number, codec)
    while not over.exists():
        time.sleep(STEP)
        recorder.done += 1
        with torch.no_grad():
            model.weight.sub_(torch.from_numpy(step_of(number, node, runtime.incarnation, recorder.done)))
            if poison.exists():
                recorder.note("poisoned", step=recorder.done)
                model.weight[0] = float("nan")
                poison.unlink(missing_ok=True)
        done = sync.step(loss=1.0, samples=samples_of(node, recorder.done))
        if done:
            numbers = model.weight.detach().numpy()
            recorder.note(
                "received", round=done.round, hash=done.state_hash, counted=done.counted, model=hash_of(numbers)
            )
    sync.finish()
    recorder.note("ends", round=sync.round, done=recorder.done, model=hash_of(model.weight.detach().numpy()))


def make_sync(nc: Any, model: Any, number: int, codec: str) -> Any:
    """The sync object of a leg."""
    if codec == "sparse":
        return nc.SparseLoCo(model, every=EVERY, name=job_name(number))
    return nc.DiLoCo(model, every=EVERY, codec=codec, name=job_name(number))
