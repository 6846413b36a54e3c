"""What training in rounds costs in loss, against one machine that computes every step on the whole batch:
``python -m benchmarks.fidelity --seeds 3``.

A character transformer learns the standard library's sources. Every arm gets the same text in the same order: a batch
of each step is divided among the members, so all arms see equal tokens, and the inner optimiser and its learning rate,
tuned for data-parallel, are the same in all. Members are replicas in one process, which take their steps one after the
other; what a round does to them is the code that nodes run (``Replica``, ``Fragments``, ``weighted_sum``,
``outer_step``, the codecs both ways). The loss is that of the global model on files that nobody trained on, in nats per
character.

``snoo`` is DiLoCo on one node: its outer step on top of the inner optimiser. ``muloco-*`` have Muon as inner optimiser
and are compared with data-parallel training with Muon.

One JSON line per arm: ``loss`` (mean over the seeds), ``sd`` of it, ``relative`` to the arm named by ``against``,
``most`` that is allowed, ``outer_lr``. Exits with 1 when an arm is above that, or data-parallel's loss above 1.40.
One training takes more than ten minutes of one core. ``--keep FILE`` has a line for each that is done, and what it has
is not trained again: a benchmark that was interrupted goes on, and several that share trainings do them once.
``--lr 1e-3 3e-3 --arms data-parallel`` and ``--outer-lr 0.4 0.6 --arms diloco-4`` print a line for each rate (and judge
nothing), ``--beta 0.8 0.95 --arms sparse-4`` one for each share: that is how the defaults were chosen.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.fidelity_training import Arm, Run, Trainings
from notebook_cluster.training.strategies.sparse_loco import DEFAULT_BETA

HIGHEST_LOSS = 1.40
"""Of data-parallel, nats per character: above it the comparison would be one of models that have not learned yet."""

PLAIN, FOUR, MUON = "data-parallel", "diloco-4", "data-parallel-muon"
ARMS = {
    PLAIN: Arm(),
    "diloco-2": Arm(2, against=PLAIN, most=0.01),
    FOUR: Arm(4, against=PLAIN, most=0.02),
    "diloco-8": Arm(8, against=PLAIN, most=0.04),
    "int8-4": Arm(4, "int8", against=FOUR, most=0.005),
    "int4-4": Arm(4, "int4", against=FOUR, most=0.005),
    "momentum-4": Arm(4, momentum_dtype="bfloat16", against=FOUR, most=0.005),
    "fragments-4": Arm(4, fragments=3, against=FOUR, most=0.01),
    "streaming-4": Arm(4, fragments=3, overlap=5, against=FOUR, most=0.01),
    MUON: Arm(inner="muon"),
    "muloco-4": Arm(4, inner="muon", outer_lr=0.3, against=MUON, most=0.015),
    "muloco-8": Arm(8, inner="muon", outer_lr=0.3, against=MUON, most=0.015),
    "snoo": Arm(1, against=PLAIN, most=0.0),
    "sparse-4": Arm(4, "sparse", beta=DEFAULT_BETA, outer_lr=1.0, momentum=0.0, against=FOUR, most=0.06),
}


def _changed(arm: Arm, **settings: Any) -> Arm:
    """``arm`` with those of ``settings`` that are given."""
    return dataclasses.replace(arm, **{name: value for name, value in settings.items() if value is not None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=[*ARMS, "sparse"], metavar="ARM")
    parser.add_argument("--lr", type=float, nargs="+", default=[12e-3], help="of the inner optimiser")
    parser.add_argument("--outer-lr", type=float, nargs="+", help="instead of each arm's own")
    parser.add_argument("--beta", type=float, nargs="+", help="of the error feedback, instead of each arm's own")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--every", type=int, default=30, help="steps of a round")
    parser.add_argument("--batch", type=int, default=128, help="sequences of a step, of all members together")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what is trained already; each training is added")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time, of one thread each")
    options = parser.parse_args()
    options.arms = ["sparse-4" if name == "sparse" else name for name in options.arms]
    sweep = len(options.lr) > 1 or options.outer_lr is not None or options.beta is not None
    chosen = [
        (name, _changed(ARMS[name], outer_lr=outer, beta=beta), lr)
        for name, lr, outer, beta in itertools.product(
            options.arms, options.lr, options.outer_lr or [None], options.beta or [None]
        )
    ]
    sizes = (options.rounds, options.every, options.batch, options.width, options.layers)
    context = multiprocessing.get_context("spawn")
    losses: dict[str, float] = {}
    good = True
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        try:
            trainings = Trainings(pool, options.keep)
        except ValueError as error:
            parser.error(str(error))
        waiting = [
            (name, arm, lr, [trainings.start(Run(arm, seed, lr, *sizes)) for seed in range(options.seeds)])
            for name, arm, lr in chosen
        ]
        for name, arm, lr, runs in waiting:
            results = [run.result() for run in runs]
            each = [result["loss"] for result in results]
            loss = losses[name] = statistics.fmean(each)
            line: dict[str, Any] = {
                "benchmark": "fidelity",
                "arm": name,
                "loss": round(loss, 4),
                "sd": round(statistics.stdev(each), 4) if len(each) > 1 else None,
                "outer_lr": arm.rate if arm.members else None,
                "beta": arm.beta if arm.codec != "float32" else None,
                "lr": lr,
            }
            if arm.against in losses and not sweep:
                relative = loss / losses[arm.against] - 1
                line |= {"against": arm.against, "relative": round(relative, 4), "most": arm.most}
                good = good and relative <= arm.most
            elif not arm.members and not sweep:
                line["most_loss"] = HIGHEST_LOSS
                good = good and loss <= HIGHEST_LOSS
            line |= {"seeds": len(each), "rounds": options.rounds, "every": options.every, "batch": options.batch}
            line |= {"parameters": results[0]["parameters"], "seconds": round(sum(r["seconds"] for r in results), 1)}
            print(json.dumps(line), flush=True)
    return 0 if good or sweep else 1


if __name__ == "__main__":
    sys.exit(main())
