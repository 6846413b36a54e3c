"""``notebook-cluster bench``: how fast the nodes of a running cluster reach each other."""

import argparse
import json
import sys
from dataclasses import asdict

from notebook_cluster.cli.clusters import check_running
from notebook_cluster.cli.console import is_terminal, print_table
from notebook_cluster.client import BENCH_HEADS, BenchedWay, Cluster, who_is_left_out

NO_PAIR = "{}: there is no pair of nodes to measure (%cluster add PEER, or add local)"
_CLEAR = "\r\x1b[K"


def bench(options: argparse.Namespace) -> int:
    """Measure the ways between all nodes and print them; Ctrl-C ends it and prints those that were measured."""
    name = check_running(options.cluster) if options.cluster else None
    found: list[BenchedWay] = []
    stopped = False

    def note(way: BenchedWay, done: int, ways: int) -> None:
        found.append(way)
        if is_terminal():
            print(f"{_CLEAR}{done} of {ways} ways measured", end="", file=sys.stderr, flush=True)

    with Cluster.attach(name, kind="cli", live=False) as cluster:
        name, left_out = cluster.name, who_is_left_out(cluster.state())
        try:
            cluster.bench(options.mb, on_way=note)
        except KeyboardInterrupt:
            stopped = True
        finally:
            if is_terminal():
                print(_CLEAR, end="", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"cluster": name, "ways": [asdict(way) for way in found], "left_out": left_out}, indent=2))
    else:
        _print(f"cluster {name}", found, left_out, stopped)
    return 130 if stopped else 1 if any(way.error for way in found) else 0


def _print(title: str, found: list[BenchedWay], left_out: dict[str, str], stopped: bool) -> None:
    if found:
        print_table(BENCH_HEADS, [way.cells() for way in found])
    elif not stopped:
        print(NO_PAIR.format(title))
    for node, reason in left_out.items():
        print(f"{node} is left out: {reason}")
    if stopped:
        print("stopped: the other ways were not measured", file=sys.stderr)
