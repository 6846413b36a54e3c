"""What the cell of a world trains with, and the bounds of the product there."""

import random

import torch

import notebook_cluster as nc
from notebook_cluster.mesh import lending
from notebook_cluster.mesh.shared_memory import SharedFile
from notebook_cluster.rounds.leader.state import RoundsSettings
from notebook_cluster.rounds.member import machine as member_machine
from notebook_cluster.rounds.member.state import MemberSettings
from notebook_cluster.training.background import worker
from notebook_cluster.training.loop import encoding

_IN_PLACE = 300_000
"""The first seed in which a small model may be stepped where it is, as large ones are."""
_LENDS = 500_000
"""The first seed in which nodes of a peer may read small slices where they are, as they do large ones."""
_OWN_THREADS = 100_000
"""The first seed in which a job's background may have a thread of its own: earlier ones found something without."""


class Plan:
    """What the cell does, and with what."""

    def __init__(self, rng, seconds):
        self.strategy = rng.choice(("DiLoCo",) * 5 + ("SparseLoCo", "DataParallel", "server"))
        self.every = rng.choice((2, 4, 7))
        self.pause = rng.choice((0.05, 0.1, 0.2))
        self.steps = int(rng.uniform(0.6, 1.1) * seconds / self.pause)
        self.elements = rng.choice((5, 40, 900))
        self.momentum = rng.choice((0.0, 0.9))
        self.codec = rng.choice(("float32", "float32", "int8", "bf16"))
        self.overlap = rng.choice((0, 0, 0, 1)) if self.every > 2 else 0
        self.fragments = rng.choice((1, 1, 2)) if self.elements > 100 and self.every == 4 else 1
        self.quorum = rng.choice((None, None, None, 0.6))

    @property
    def every_step(self):
        """Each step is a round: what a node has not sent is lost with the step, and COMMITs are synced later."""
        return self.strategy in ("DataParallel", "server")

    def make(self, model):
        """The sync object, and what fills the gradients or changes the model in a step."""
        if self.every_step:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=self.momentum)
            mode = "server" if self.strategy == "server" else "allreduce"
            return nc.DataParallel(model, optimizer, name="model", mode=mode)
        if self.strategy == "SparseLoCo":
            return nc.SparseLoCo(model, every=self.every, name="model", quorum=self.quorum)
        return nc.DiLoCo(
            model, every=self.every, name="model", outer_momentum=self.momentum, codec=self.codec,
            fragments=self.fragments, overlap=self.overlap, quorum=self.quorum,
        )  # fmt: skip

    def described(self):
        return ", ".join(f"{name} {value}" for name, value in vars(self).items())

    def train(self, world, process, runtime):
        """A loop as people write it; each step adds something of its own to the parameters."""
        import time

        model = torch.nn.Linear(self.elements, 1, bias=False)
        rng = random.Random(f"{world.seed} {runtime.name} {runtime.incarnation}")
        with torch.no_grad():
            model.weight.fill_(rng.random())  # each its own: which one all begin with is decided when they register
        with world.checks.training(process, runtime) as ledger:
            sync = self.make(model)
            slowness = rng.uniform(0.7, 1.5)
            while ledger.steps < self.steps:
                time.sleep(self.pause * slowness * rng.uniform(0.5, 1.5))
                with torch.no_grad():
                    generator = torch.Generator().manual_seed(rng.getrandbits(40))
                    change = torch.randn(model.weight.shape, generator=generator) * 0.01
                    if world.faults.spoils(runtime.name):
                        change.view(-1)[0] = float("nan")
                    if self.every_step:
                        model.weight.grad = change
                    else:
                        model.weight.add_(change)
                ledger.step()
                sync.step(1.0)
            sync.finish()
            ledger.finish(model, sync.round)


class Sizes:
    """Bounds of the product, at times so small that they matter in a world: what happens after hours or with large
    models happens here within seconds."""

    def __init__(self, seed):
        rng = random.Random(f"sizes {seed}")
        self.snapshot_rows = rng.choice((5, 40, 10_000))
        self.journal_bytes = rng.choice((20_000, 64 << 20))
        self.chunk_bytes = rng.choice((700, 256 * 1024))
        self.slices = rng.choice((None, RoundsSettings(one_owner_blocks=2, slices_each=2, slice_blocks=1)))
        self.large = rng.choice((worker.LARGE, 0)) if seed >= _OWN_THREADS else worker.LARGE
        self.in_place_from = rng.choice((1 << 20, 0, 0)) if seed >= _IN_PLACE else 1 << 20
        self.lent_from = rng.choice((1, 1, lending.LEAST)) if seed >= _LENDS else lending.LEAST
        self.lent = []

    def of_coordinator(self, made):
        """Of a coordinator that was just made."""
        journal, runner = made.core.journal, made._runner
        journal._snapshot_rows, journal._limit = self.snapshot_rows, self.journal_bytes
        if self.slices is not None:
            runner._state.settings = self.slices

    def of_members(self, patches):
        """Of every node."""
        make = member_machine.new_member
        settings = MemberSettings(chunk_bytes=self.chunk_bytes, in_place_from=self.in_place_from)
        patches.attribute(
            member_machine, "new_member", lambda job, node, incarnation: make(job, node, incarnation, settings)
        )
        patches.attribute(worker, "LARGE", self.large)
        patches.attribute(encoding, "LATER_FROM", self.in_place_from)
        patches.attribute(lending, "LEAST", self.lent_from)
        make_file = SharedFile.make

        def made(*arguments):
            if (file := make_file(*arguments)) is not None:
                self.lent.append(file)
            return file

        patches.attribute(SharedFile, "make", made)

    def tidy_up(self):
        """Of nodes that were killed here no process has ended."""
        for file in self.lent:
            file.hide()
