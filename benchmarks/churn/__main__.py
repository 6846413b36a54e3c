"""``python -m benchmarks.churn``: one JSON line."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import benchmarks.churn


def main() -> None:
    from benchmarks.churn.faults import KINDS
    from benchmarks.churn.hosts import Hosts
    from benchmarks.churn.run import Run
    from tests.namespaces import missing

    summary = str(benchmarks.churn.__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.churn", description=summary)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--peers", type=int, default=3, help="hosts beside the desk, at least 2 (default 3)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of faults (default: all)")
    parser.add_argument("--keep", type=Path, help="a file for lines about what happens, written as it happens")
    arguments = parser.parse_args()
    if arguments.peers < 2:
        parser.error("--peers is at least 2: somebody has to go on when one is out")
    if reason := missing():
        sys.exit(f"benchmarks.churn: {reason}")
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(arguments.keep.open("a")) if arguments.keep is not None else None
        hosts = stack.enter_context(Hosts(arguments.peers))
        figures = Run(hosts, arguments.minutes, arguments.seed, kept, arguments.kinds).play()
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
