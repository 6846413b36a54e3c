"""Training over a slow link: which share of the time goes into steps, for each strategy, one JSON line for each case.

A real cluster on hosts of its own: every host is a network namespace, and its cable is slowed down with tc's tbf, both
ways. The first host has the notebook, the coordinator and a node, each other one a shared machine with a node.
Discovery, pairing, encryption and rounds are those of people's clusters. Only the step is not: it adds a fixed array to
the parameters (or puts it in the gradients) and **sleeps** for the rest of ``--step-seconds``, so that the figures are
those of the link and not of the processor that all hosts share. ``"step": "slept"`` says so in every line.

``compute_share`` is the time in steps / the time of all, the mean over the nodes, over ``rounds`` rounds in mid run.
``formula`` is what the link alone would leave of it, :func:`formula`: no headers, encoding, summing or messages.
``mb_sent`` is what the busiest host's network card sent in a round, headers included, beside ``formula_mb``; ``cpu_s``
are the processor's seconds of one node in a round, steps left out. All hosts share one machine: where nodes x ``cpu_s``
over its free cores comes near ``round_s`` - ``formula_round_s``, it is the processor that is measured. A ``--rate`` of
``10gbit`` shows what is left without the link.

Needs root, ``ip``, ``nft`` and ``tc``; Linux only.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from notebook_cluster.codecs import get_codec

EVERY = 30
"""Inner steps of a round."""
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class Case:
    """One way to train. ``source``: how a cell makes it of ``model`` and ``optimizer``; empty for torch's own gloo."""

    name: str
    strategy: str
    source: str
    codec: str = "float32"
    every: int = EVERY
    fragments: int = 1
    overlap: int = 0

    @property
    def gathers(self) -> bool:
        """All nodes get all contributions, not their mean."""
        return self.strategy == "SparseLoCo"


def _diloco(name: str, codec: str = "float32", fragments: int = 1, overlap: int = 0) -> Case:
    more = f"codec={codec!r}, fragments={fragments}, overlap={overlap}"
    source = f"nc.DiLoCo(model, every={EVERY}, {more}, fresh=True)"
    return Case(name, "DiLoCo", source, codec, EVERY, fragments, overlap)


def _sparse(name: str, overlap: int = 0) -> Case:
    source = f"nc.SparseLoCo(model, every={EVERY}, overlap={overlap}, fresh=True)"
    return Case(name, "SparseLoCo", source, "sparse", EVERY, 1, overlap)


CASES = {
    case.name: case
    for case in (
        Case("gloo", "gloo DDP", "", every=1),
        Case("parallel", "DataParallel", "nc.DataParallel(model, optimizer, fresh=True)", every=1),
        _diloco("float32"),
        _diloco("int8", "int8"),
        _diloco("int4", "int4"),
        _diloco("int4-overlap", "int4", overlap=5),
        _diloco("streaming", fragments=4, overlap=5),
        _diloco("streaming-int4", "int4", fragments=4, overlap=5),
        _sparse("sparse"),
        _sparse("sparse-overlap", overlap=5),
    )
}


def bits_per_second(rate: str) -> float:
    """Of a rate as tc takes it, such as ``100mbit``.

    Raises:
        ValueError: it is not one; says what is.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or not float(found[1]):
        raise ValueError(f"rate {rate!r}: use a number above 0 and kbit, mbit or gbit, for example 100mbit")
    return float(found[1]) * _UNITS[found[2]]


def megabytes(case: Case, parameters: int, nodes: int) -> float:
    """What one node has to send for all parameters once, in MB; as much comes in.

    Dense, summed in slices or in a ring: ``2 (M - 1) / M`` times the encoded model. Gathered: ``(M - 1) / M`` of its
    own contribution to the owners, then as owner its slice of all M contributions to the M - 1 others: M - 1 times.
    """
    size: int = get_codec(case.codec).size(parameters)
    others = nodes - 1
    return size / 1e6 * (others / nodes + (others if case.gathers else others / nodes))


def formula(case: Case, mb: float, rate: str, step: float) -> tuple[float, float]:
    """(compute share, seconds of a round) when nothing but the link takes time: ``T = 8e6 mb / rate`` for all
    parameters, in P fragments, each hidden behind ``overlap`` steps of ``step`` seconds:
    ``H step / (H step + P max(0, T / P - overlap step))``."""
    under_way = 8e6 * mb / bits_per_second(rate) / case.fragments
    steps = case.every * step
    total = steps + case.fragments * max(0.0, under_way - case.overlap * step)
    return steps / total, total


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One line for each rate and case."""
    from benchmarks.links_network import training_hosts

    parameters, step = int(arguments.params), arguments.step_seconds
    with training_hosts(arguments.nodes, parameters, step) as hosts:
        for rate in arguments.rate:
            for case in map(CASES.__getitem__, arguments.cases):
                mb = megabytes(case, parameters, arguments.nodes)
                share, seconds = formula(case, mb, rate, step)
                rounds = max(2 if case.every == 1 else 1, round(arguments.seconds / seconds))
                found = hosts.train(case, rate, rounds, (rounds + 2) * seconds)
                yield {
                    "benchmark": "links",
                    "strategy": case.strategy,
                    "codec": case.codec,
                    "fragments": case.fragments,
                    "overlap": case.overlap,
                    "every": case.every,
                    "rate": rate,
                    "nodes": arguments.nodes,
                    "parameters": parameters,
                    "step": "slept",
                    "step_s": step,
                    "rounds": rounds,
                    "compute_share": round(found.compute_share, 4),
                    "formula": round(share, 4),
                    "round_s": round(found.seconds / rounds, 3),
                    "formula_round_s": round(seconds, 3),
                    "cpu_s": round(found.busy / rounds, 3),
                    "mb_sent": round(found.megabytes / rounds, 3),
                    "formula_mb": round(mb, 3),
                }


def missing() -> str:
    """Why there can be no slow links here, or an empty text."""
    from tests import namespaces

    return namespaces.missing() or ("" if shutil.which("tc") else "slow links need the program 'tc'")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.links", description=__doc__.splitlines()[0])
    parser.add_argument("--rate", nargs="+", default=["10mbit", "100mbit", "1gbit"], help="of each host, both ways")
    parser.add_argument("--nodes", type=int, default=4, help="hosts, with one node each")
    parser.add_argument("--params", type=float, default=10e6, help="parameters of the model")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--step-seconds", type=float, default=0.25, help="length of one step")
    parser.add_argument(
        "--seconds", type=float, default=20, help="about how long each case is measured; a round at least"
    )
    arguments = parser.parse_args()
    if arguments.nodes < 2 or min(arguments.params, arguments.step_seconds, arguments.seconds) <= 0:
        parser.error("--nodes is at least 2; --params, --step-seconds and --seconds are more than 0")
    try:
        for rate in arguments.rate:
            bits_per_second(rate)
    except ValueError as error:
        parser.error(str(error))
    if reason := missing():
        sys.exit(f"benchmarks.links: {reason}")
    for line in measured(arguments):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
