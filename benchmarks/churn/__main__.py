"""``python -m benchmarks.churn``: one JSON line."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import benchmarks.churn


def main() -> None:
    from tests.namespaces import missing

    summary = str(benchmarks.churn.__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.churn", description=summary)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--peers", type=int, default=3, help="hosts beside the desk, at least 2 (default 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a file for lines about what happens, written as it happens")
    arguments = parser.parse_args()
    if arguments.peers < 2:
        parser.error("--peers is at least 2: somebody has to go on when one is out")
    if reason := missing():
        sys.exit(f"benchmarks.churn: {reason}")
    print(json.dumps(churn(arguments.minutes, arguments.peers, arguments.seed, arguments.keep)), flush=True)


def churn(minutes: float, peers: int, seed: int, keep: Path | None = None) -> dict[str, object]:
    """The figures of a run."""
    from benchmarks.churn.hosts import Hosts
    from benchmarks.churn.run import Run

    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(keep.open("a")) if keep is not None else None
        hosts = stack.enter_context(Hosts(peers))
        return Run(hosts, minutes, seed, kept).play()


if __name__ == "__main__":
    main()
