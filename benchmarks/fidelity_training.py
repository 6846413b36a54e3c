"""The trainings that :mod:`benchmarks.fidelity` compares: members that are replicas in one process."""

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import statistics
import sysconfig
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# before numpy is loaded, which asks once
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["VECLIB_MAXIMUM_THREADS"] = "1"

import numpy as np
import torch
from torch import nn

from benchmarks.codecs import CONTEXT, Transformer
from notebook_cluster.rounds.member.events_effects import Apply
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import FLOAT32, zeros
from notebook_cluster.rounds.numerics.outer import DEFAULT_MOMENTUM, default_outer_lr, outer_step
from notebook_cluster.rounds.numerics.vectors import copy, empty
from notebook_cluster.rounds.numerics.weighted_mean import joined, mean_of, mean_of_gathered
from notebook_cluster.training.loop.replica import Replica
from notebook_cluster.training.models.torch_parameters import TorchParameters
from notebook_cluster.training.settings.schedule import Schedule

HELD_OUT = 20
"""Every so many files one is kept for the loss."""
TESTED = 2048
"""Sequences of CONTEXT characters of them."""


@dataclass(frozen=True)
class Arm:
    """One way to train; ``members`` 0 is data-parallel on the whole batch."""

    members: int = 0
    codec: str = "float32"
    fragments: int = 1
    overlap: int = 0
    mix: float | None = None
    beta: float = 1.0
    outer_lr: float | None = None
    momentum: float = DEFAULT_MOMENTUM
    momentum_dtype: str = FLOAT32
    inner: str = "adamw"
    """The members' own optimiser; ``muon``: torch's, for the matrices between embedding and output, with the rest in
    AdamW (MuLoCo, arXiv 2505.23725)."""
    against: str = ""
    most: float = math.inf
    """Highest loss relative to that of ``against``: 0.01 is one per cent more."""

    @property
    def over_senders(self) -> bool:
        return self.codec == "sparse"

    @property
    def rate(self) -> float:
        return default_outer_lr(self.members) if self.outer_lr is None else self.outer_lr


@dataclass(frozen=True)
class Run:
    """One training."""

    arm: Arm
    seed: int
    lr: float
    rounds: int
    every: int
    batch: int
    width: int
    layers: int

    @property
    def steps(self) -> int:
        return self.rounds * self.every


class Text:
    """The standard library's sources without its tests: bytes to train on, and files to measure with."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        files = [file for file in sorted(root.rglob("*.py")) if not unwanted & {*file.relative_to(root).parts}]
        data = [file.read_bytes() for file in files]
        self.train = _bytes(b"".join(text for index, text in enumerate(data) if index % HELD_OUT))
        self.held_out = _bytes(b"".join(data[::HELD_OUT]))

    def batch(self, seed: int, step: int, size: int) -> torch.Tensor:
        """The batch of ``step``: (size, CONTEXT + 1) characters, the same for all arms."""
        return _cut(self.train, size, torch.Generator().manual_seed(seed * 1_000_003 + step))

    def loss(self, model: nn.Module) -> float:
        """Nats per character on the files that were kept, on the same sequences for all."""
        sequences = _cut(self.held_out, TESTED, torch.Generator().manual_seed(0))
        model.eval()
        with torch.no_grad():
            return statistics.fmean(float(_loss(model, part)) for part in sequences.split(128))


@functools.cache
def text() -> Text:
    """Read once in a process."""
    return Text()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _cut(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return torch.stack([text[start : start + CONTEXT + 1] for start in starts]).long()


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).reshape(-1, 256), batch[:, 1:].reshape(-1))


class Member:
    """A model with its own optimiser: warm-up over 3 % of the steps, then a cosine down to a tenth."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(run.seed)
        self.model = Transformer(run.width, run.layers)
        self._optimizers = _optimizers(self.model, run)
        warm = max(1, run.steps * 3 // 100)

        def share(step: int) -> float:
            return min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * min(step / run.steps, 1)))

        self._schedules = [torch.optim.lr_scheduler.LambdaLR(one, share) for one in self._optimizers]

    def step(self, batch: torch.Tensor) -> None:
        """One inner step."""
        self.model.zero_grad()
        _loss(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()


def _optimizers(model: nn.Module, run: Run) -> list[torch.optim.Optimizer]:
    """Muon's steps are scaled to the size of AdamW's (``match_rms_adamw``), so one rate is right for both."""
    parameters = dict(model.named_parameters())
    if run.arm.inner == "adamw":
        return [torch.optim.AdamW(parameters.values(), lr=run.lr, betas=(0.9, 0.99), weight_decay=0.1)]
    matrices = [weight for name, weight in parameters.items() if name.startswith("layers.") and weight.ndim == 2]
    inside = set(map(id, matrices))
    others = [weight for weight in parameters.values() if id(weight) not in inside]
    return [
        torch.optim.Muon(matrices, lr=run.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=run.lr, betas=(0.9, 0.99), weight_decay=0.1),
    ]


class Rounds:
    """The members of one run: each round's mean and outer step, applied to all of them."""

    def __init__(self, run: Run) -> None:
        self._arm = arm = run.arm
        self.members = [Member(run) for _ in range(arm.members)]
        self._parameters = [TorchParameters(member.model) for member in self.members]
        size = self._parameters[0].layout.size
        self._fragments = Fragments(arm.codec, size, count=arm.fragments, over_senders=arm.over_senders)
        self._replicas = [
            Replica(parameters, self._fragments, mix=arm.mix, beta=arm.beta) for parameters in self._parameters
        ]
        self._schedule = Schedule(run.every, arm.fragments)
        self._theta, self._momentum = self._parameters[0].read(), zeros(size, arm.momentum_dtype)
        self._landing: Apply | None = None
        for replica in self._replicas:
            replica.start(0, self._theta, self._momentum, "")

    def step(self, number: int, batch: torch.Tensor) -> None:
        """One step of every member on its share of ``batch``, and what is due then."""
        for index, (member, replica) in enumerate(zip(self.members, self._replicas, strict=True)):
            part = batch[index :: self._arm.members]
            member.step(part)
            replica.count(len(part))
        self._schedule.count()
        if self._landing is not None and self._schedule.steps >= self._arm.overlap:
            self._land()
        if self._schedule.is_due(self._replicas[0].fragment):
            self._exchange()
            if not self._arm.overlap:
                self._land()

    def finish(self) -> nn.Module:
        """Exchange what is left of every fragment; the global model."""
        if self._landing is not None:
            self._land()
        while any(replica.samples for replica in self._replicas):
            self._exchange()
            self._land()
        self._parameters[0].load(self._theta)
        return self.members[0].model

    def _exchange(self) -> None:
        arm, fragments = self._arm, self._fragments
        round, fragment = self._replicas[0].round + 1, self._replicas[0].fragment
        self._schedule.boundary()
        sent = [replica.contribution(False) for replica in self._replicas]
        total = sum(boundary.samples for boundary in sent)
        weighted = [(boundary.encoded, float(np.float32(boundary.samples / total))) for boundary in sent]
        wire = fragments.wire(round)
        if fragments.all_gather:
            data, over_all = joined(wire, weighted, 0, wire.blocks), not fragments.over_senders
            mean = mean_of_gathered(wire, data, len(sent), 0, wire.blocks, over_all=over_all)
        else:
            mean = empty(wire.count)
            wire.decode_into(wire.encode(mean_of(wire, weighted, 0, wire.blocks)), mean)
        before = fragments.take(self._theta, fragment), fragments.take(self._momentum, fragment)
        after = outer_step(*before, mean, arm.rate, arm.momentum, nesterov=arm.momentum > 0)
        if arm.fragments == 1:
            self._theta, self._momentum = after
        else:
            self._theta, self._momentum = copy(self._theta), copy(self._momentum)
            fragments.put(self._theta, fragment, after[0])
            fragments.put(self._momentum, fragment, after[1])
        self._landing = Apply(round, self._theta, self._momentum, "", (), True, False, sent[0].steps, 0)

    def _land(self) -> None:
        assert self._landing is not None
        for replica in self._replicas:
            replica.apply(self._landing)
        self._landing = None


class Trainings:
    """Runs trainings in ``pool``; with ``file`` each once, whatever process asked for it.

    Raises:
        ValueError: a line of ``file`` is not one that was written here; names it.
    """

    def __init__(self, pool: concurrent.futures.Executor, file: Path | None) -> None:
        self._pool, self._file = pool, file
        self._done: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                self._done[row["training"]] = row["result"]
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{file}, line {number}: not a training of benchmarks.fidelity: {line[:80]!r}"
                ) from None

    def start(self, run: Run) -> "concurrent.futures.Future[dict[str, Any]]":
        """The result of ``run``, as of :func:`train`."""
        key = _key(run)
        if key in self._done:
            found: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
            found.set_result(self._done[key])
            return found
        future = self._pool.submit(train, run)
        future.add_done_callback(lambda future: self._keep(key, future))
        return future

    def _keep(self, key: str, future: "concurrent.futures.Future[dict[str, Any]]") -> None:
        if self._file is None or future.cancelled() or future.exception() is not None:
            return
        with self._lock, self._file.open("a") as file:
            file.write(json.dumps({"training": key, "result": future.result()}) + "\n")


def _key(run: Run) -> str:
    """All that the result depends on."""
    arm = {name: value for name, value in dataclasses.asdict(run.arm).items() if name not in ("against", "most")}
    arm["outer_lr"] = run.arm.rate
    if arm["inner"] == "adamw":
        del arm["inner"]  # as in files of before there was another one
    if arm["momentum_dtype"] == FLOAT32:
        del arm["momentum_dtype"]
    return json.dumps(dataclasses.asdict(run) | {"arm": arm, "torch": torch.__version__}, sort_keys=True)


def train(run: Run) -> dict[str, Any]:
    """The loss of one run, and how long it took."""
    torch.set_num_threads(1)
    data, began = text(), time.monotonic()
    if run.arm.members:
        rounds = Rounds(run)
        for number in range(run.steps):
            rounds.step(number, data.batch(run.seed, number, run.batch))
        model = rounds.finish()
    else:
        alone = Member(run)
        for number in range(run.steps):
            alone.step(data.batch(run.seed, number, run.batch))
        model = alone.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"loss": data.loss(model), "seconds": time.monotonic() - began, "parameters": parameters}
