"""The nodes of :mod:`benchmarks.rounds`: a cluster here or across network namespaces, and the cells that it runs."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.common import private_folders
from benchmarks.uneven import run
from notebook_cluster.codecs import get_codec
from notebook_cluster.rounds.numerics.momentum import item_size

EVERY = 4
"""Calls of ``sync.step`` in a round; as many as there are fragments, where these are more."""

Run = Callable[[str], list[Any]]
"""Runs a cell on all nodes; returns what the last line of JSON that each node printed says, in rank order. Raises
RuntimeError where the cell failed."""


@dataclass(frozen=True)
class Case:
    """One model, on so many nodes, exchanged in one way."""

    codec: str
    nodes: int
    parameters: int
    rounds: int
    fragments: int = 1
    state: str = "memory"
    dtype: str = "float32"
    momentum: str = "float32"
    beside: str = "gloo"

    @property
    def every(self) -> int:
        return max(EVERY, self.fragments)

    @property
    def state_bytes(self) -> int:
        """Of theta, momentum and error feedback."""
        lossy = self.codec == "sparse" or get_codec(self.codec).lossy
        return self.parameters * (4 + 4 * lossy + (0 if self.codec == "sparse" else item_size(self.momentum)))

    @property
    def source(self) -> str:
        """How a cell makes the sync object of ``model`` called ``name``."""
        more = f"every={self.every}, name=name, fragments={self.fragments}, fresh=True"
        more += "" if self.state == "memory" else f", state={self.state!r}"
        kept = "" if self.momentum == "float32" else f", momentum_dtype={self.momentum!r}"
        return (
            f"nc.SparseLoCo(model, {more})"
            if self.codec == "sparse"
            else f"nc.DiLoCo(model, codec={self.codec!r}, {more}{kept})"
        )

    def set_up(self, pause: float) -> str:
        """The first cell: what the others use, libraries loaded by a round of each way, then the model."""
        return (
            f"PARAMETERS, ROUNDS, EVERY = {self.parameters}, {self.rounds}, {self.every}\n"
            f"FRAGMENTS, PAUSE, DTYPE = {self.fragments}, {pause}, {self.dtype!r}\n"
            f"BESIDE, STATE_BYTES = {self.beside!r}, {self.state_bytes}\n"
            f"def make_sync(model, name='model'):\n    return {self.source}\n{SET_UP}"
        )


SET_UP = """
import ctypes, gc, json, os, time
import torch
import torch.distributed
from notebook_cluster.sockets import IOThread

def make_model(parameters):
    "Tensors of unequal sizes, the same in all nodes."
    sizes = [int(share * parameters) for share in (0.4, 0.3, 0.15, 0.1)]
    generator, dtype = torch.Generator().manual_seed(7), getattr(torch, DTYPE)
    sizes.append(parameters - sum(sizes))
    return torch.nn.ParameterList([torch.randn(size, generator=generator).mul_(0.02).to(dtype) for size in sizes])

def change(model):
    "Stands for the inner steps, needs no memory, and is another one on each node."
    with torch.no_grad():
        for parameter in model:
            parameter.mul_(1 - 0.01 * (rank + 1))

class ByHand:
    "DiLoCo as people write it with torch.distributed."

    def __init__(self, model):
        self.parameters = list(model)
        self.starts = [parameter.detach().to(torch.float32, copy=True) for parameter in model]
        self.momenta = [torch.zeros_like(start) for start in self.starts]

    @torch.no_grad()
    def round(self):
        for parameter, start, momentum in zip(self.parameters, self.starts, self.momenta):
            delta = start - parameter
            torch.distributed.all_reduce(delta)
            delta /= world_size
            momentum.mul_(0.9).add_(delta)
            start.sub_(delta.add_(momentum, alpha=0.9), alpha=0.6)
            parameter.copy_(start)

def round_of(sync):
    "Every step of a round; returns the last Round."
    for _ in range(EVERY):
        received = sync.step()
    return received

def clocked(exchange, model):
    "(begin, end) of a round that all nodes begin together."
    change(model)
    nc.barrier()
    began = time.monotonic()
    exchange()
    return began, time.monotonic()

def watched(exchange):
    "(begin, end) of rounds with pauses between them."
    spans = []
    for _ in range(ROUNDS):
        spans.append(clocked(exchange, model))
        time.sleep(PAUSE)
    print(json.dumps(spans))

def through_files():
    "As much as the state is to the disk, and back."
    place = f"probe-{nc.node()}"
    block = memoryview(bytes(8 << 20))
    try:
        with open(place, "wb") as file:
            for start in range(0, STATE_BYTES, len(block)):
                file.write(block[: STATE_BYTES - start])
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with open(place, "rb", buffering=0) as file:
            into = bytearray(len(block))
            while file.readinto(into):
                pass
    finally:
        os.unlink(place)

class Tasks:
    "The longest processor time, in seconds, that one task took on this node's I/O thread."
    longest = 0.0

def guarded(thread, callback, run=IOThread._guarded):
    began = time.thread_time()
    try:
        run(thread, callback)
    finally:
        Tasks.longest = max(Tasks.longest, time.thread_time() - began)

IOThread._guarded = guarded  # its loop runs all that it does through this: a ready socket, a call, a timer

model = make_model(min(PARAMETERS, FRAGMENTS << 16))
if BESIDE == "gloo":
    nc.torch_distributed("gloo")
    clocked(ByHand(model).round, model)
sync = make_sync(model, "warm-up")
clocked(lambda: round_of(sync), model)
sync.finish()
model = make_model(PARAMETERS)
print(json.dumps(os.getpid()))
"""

GIVE_BACK = """
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
print("true")
"""
"""What was freed goes back to the system, so that memory is measured from there on."""

BY_HAND_MEMORY = """
nc.torch_distributed("gloo")
by_hand = ByHand(model)
watched(by_hand.round)
del by_hand
"""

OUR_MEMORY = """
sync = make_sync(model)
watched(lambda: round_of(sync))
"""
"""``sync`` stays: people go on with it in the next cell."""

TIMES = """
nc.torch_distributed("gloo")
sync, other = make_sync(model), torch.nn.ParameterList([parameter.detach().clone() for parameter in model])
by_hand, received = ByHand(other), []
ways = {
    "ours": lambda: clocked(lambda: received.append(round_of(sync)), model),
    "gloo": lambda: clocked(by_hand.round, other),
}
seconds = {name: [] for name in ways}
for number in range(1 + ROUNDS):
    for name in sorted(ways, reverse=bool(number % 2)):  # who comes first takes turns as well
        began, ended = ways[name]()
        seconds[name].append(ended - began)
    if number == 0:
        Tasks.longest = 0.0
with torch.no_grad():
    largest = max(float(parameter.abs().max()) for parameter in other if parameter.numel())
    apart = max(float((a - b).abs().max()) for a, b in zip(model, other) if a.numel())
found = {name: values[1:] for name, values in seconds.items()}
print(json.dumps(found | {"hash": received[-1].state_hash, "apart": apart / largest, "task": Tasks.longest}))
del by_hand, other, ways
"""
"""A first turn of each way warms up. ``apart``: the largest difference between the parameters of the two, as a share of
the largest parameter."""


FILE_TIMES = """
sync, received = make_sync(model), []
ways = {
    "ours": lambda: clocked(lambda: received.append(round_of(sync)), model),
    "files": lambda: clocked(through_files, []),
}
seconds = {name: [] for name in ways}
for number in range(1 + ROUNDS):
    for name in sorted(ways, reverse=bool(number % 2)):
        began, ended = ways[name]()
        seconds[name].append(ended - began)
    if number == 0:
        Tasks.longest = 0.0
found = {name: values[1:] for name, values in seconds.items()}
print(json.dumps(found | {"hash": received[-1].state_hash, "task": Tasks.longest}))
"""


@contextlib.contextmanager
def nodes_here(nodes: int) -> Iterator[Run]:
    """A cluster of local nodes."""
    from notebook_cluster.client import Cluster

    with private_folders() as folder, Cluster.start("rounds", local=nodes, directory=str(folder)) as cluster:
        try:
            yield lambda source: run(cluster, source)
        finally:
            cluster.stop()


@contextlib.contextmanager
def nodes_on_hosts(nodes: int) -> Iterator[Run]:
    """A cluster with each node on a host of its own, a network namespace: they talk over TCP with CURVE."""
    from benchmarks.links_network import answers, notebook_and_hosts

    with notebook_and_hosts(nodes) as (_, notebook, members):
        yield lambda source: answers(notebook, members, f"%%on_all --no-replay\n{source}", 1200)


LINKS = {"none": nodes_here, "tcp": nodes_on_hosts}
"""What is between the nodes."""
