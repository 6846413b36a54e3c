"""Training on machines of unlike speed: the samples per second of all, beside what each node makes alone. One JSON line
for each way.

A real cluster of local nodes, of which the last one is throttled: its step takes ``--slow`` times as long. A step adds
a fixed array to the parameters and **sleeps** for the rest of its time, so that nodes which share a processor can stand
for machines of their own; ``"step": "slept"`` says so in every line.

``samples_per_s`` is the sum of what the nodes make in mid run, each between two of its rounds, with everything that
rounds cost it; ``share_of_solo`` is that over ``solo_samples_per_s``, the sum of what each makes alone in the time of a
round. ``formula`` is what waiting leaves: whoever waits for the slowest node at each boundary goes at its speed.
``late`` counts the rounds that went on without the slow node, whose work came into the next one. The ways:

- ``gloo``: torch's all_reduce after each step, as DistributedDataParallel has it
- ``all``: DiLoCo, a round waits for every node
- ``seconds``: ``every=nc.Seconds(...)``, so long as ``--every`` steps of a fast node
- ``quorum``: with as many nodes at the boundary as are fast, the slow one comes with its next step
"""

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.common import last_answer, private_folders
from benchmarks.notebook import notebook_with_cluster
from benchmarks.slept import MODEL

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster

BATCH = 32
"""Samples of a step."""
WAYS = ("gloo", "all", "seconds", "quorum")

SET_UP = (
    MODEL
    + """
BATCH, STEP = {batch}, {step} * ({slow} if rank == world_size - 1 else 1)

def step(model, number):
    "Change one part of the parameters, then sleep."
    began = time.perf_counter()
    change(model, number)
    sleep_until(began + STEP)

model = make_model()
for turn in range(world_size):
    nc.barrier()
    if turn == rank:
        began, steps = time.perf_counter(), 0
        while time.perf_counter() - began < {solo}:
            step(model, steps)
            steps += 1
        print(json.dumps(steps * BATCH / (time.perf_counter() - began)))
"""
)

TRAIN = """
model, steps, late, marks = make_model(), 0, 0, []
sync = nc.DiLoCo(model, {settings}, fresh=True)
while sync.round < {last}:
    step(model, steps)
    steps += 1
    done = sync.step(samples=BATCH)
    if done:
        late += not done.counted
        marks.append((time.perf_counter(), steps))
sync.finish()
(began, before), (ended, after) = marks[0], marks[-1]
print(json.dumps([(after - before) * BATCH / (ended - began), late]))
"""

GLOO = """
import torch.distributed
nc.torch_distributed("gloo")
model, gradients = make_model(), torch.cat(noise)
torch.distributed.all_reduce(gradients[:1])
torch.distributed.barrier()
began = time.perf_counter()
for number in range({steps}):
    step(model, number)
    torch.distributed.all_reduce(gradients)
    gradients /= world_size
print(json.dumps([{steps} * BATCH / (time.perf_counter() - began), 0]))
"""


def settings(way: str, nodes: int, every: int, step: float) -> str:
    """What DiLoCo is told."""
    if way == "seconds":
        return f"every=nc.Seconds({every * step!r})"
    return f"every={every}, quorum={nodes - 1}" if way == "quorum" else f"every={every}"


def formula(way: str, nodes: int, slow: float) -> float:
    """The share of the sum of solo rates when nothing but waiting takes time: ``nodes / slow`` of
    ``nodes - 1 + 1 / slow`` for who waits for the slow node, else all of it."""
    return 1.0 if way in ("seconds", "quorum") else nodes / slow / (nodes - 1 + 1 / slow)


def run(view: "Cluster", source: str) -> list[Any]:
    """What the last line of JSON that each node printed says, in rank order.

    Raises:
        RuntimeError: the cell failed; with the error of each node.
    """
    ended, outputs = view.run(source, replay=False)
    if ended.status != "ok":
        raise RuntimeError(f"{source}failed: {ended.status} {ended.reason} {ended.results}")
    printed: dict[int, str] = {}
    for output in outputs:
        if output.kind == "stream" and output.content["name"] == "stdout" and output.rank is not None:
            printed[output.rank] = printed.get(output.rank, "") + output.content["text"]
    answers = [last_answer(printed[rank]) for rank in sorted(printed)]
    if not all(answers):
        raise RuntimeError(f"{source}printed no line of JSON on a node: {printed}")
    return [answer for (answer,) in answers]


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One line for each way."""
    nodes, every, step, slow = arguments.nodes, arguments.every, arguments.step_seconds, arguments.slow
    with private_folders(), notebook_with_cluster(nodes) as (_, view):
        set_up = SET_UP.format(batch=BATCH, step=step, slow=slow, parameters=int(arguments.params), solo=every * step)
        solo = sum(run(view, set_up))
        for way in arguments.ways:
            if way == "gloo":
                source = GLOO.format(steps=max(1, round(arguments.rounds * every / slow)))
            else:
                source = TRAIN.format(settings=settings(way, nodes, every, step), last=1 + arguments.rounds)
            found = run(view, source)
            rate = sum(samples for samples, _ in found)
            yield {
                "benchmark": "uneven",
                "way": way,
                "nodes": nodes,
                "slow": slow,
                "step": "slept",
                "step_s": step,
                "every": every,
                "parameters": int(arguments.params),
                "rounds": arguments.rounds,
                "samples_per_s": round(rate, 1),
                "solo_samples_per_s": round(solo, 1),
                "share_of_solo": round(rate / solo, 4),
                "formula": round(formula(way, nodes, slow), 4),
                "late": sum(late for _, late in found),
            }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uneven", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4, help="the last one is slow")
    parser.add_argument("--slow", type=float, default=4, help="how many times as long its step takes")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--step-seconds", type=float, default=0.05, help="length of a fast node's step")
    parser.add_argument("--every", type=int, default=100, help="steps of a fast node in a round")
    parser.add_argument("--rounds", type=int, default=4, help="that are measured")
    parser.add_argument("--params", type=float, default=1e6, help="parameters of the model")
    arguments = parser.parse_args()
    if arguments.nodes < 2 or arguments.slow < 1 or min(arguments.every, arguments.rounds) < 1:
        parser.error("--nodes is at least 2; --slow, --every and --rounds are at least 1")
    if arguments.step_seconds <= 0 or arguments.params < 1:
        parser.error("--step-seconds is more than 0, --params at least 1")
    for line in measured(arguments):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
