"""``notebook-cluster stop``, ``notebook-cluster detach`` and ``notebook-cluster skip``."""

import argparse

from notebook_cluster.cli.arguments import UsageError
from notebook_cluster.client import Cluster, running_clusters


def stop(options: argparse.Namespace) -> int:
    """End a cluster and every kernel of it."""
    with Cluster.attach(check_running(options.cluster), kind="cli", live=False) as cluster:
        cluster.stop()
    print(f"cluster {options.cluster} is over")
    return 0


def detach(options: argparse.Namespace) -> int:
    """Free the notebook cells that wait for a cluster."""
    with Cluster.attach(check_running(options.cluster), kind="cli", live=False) as cluster:
        cluster.detach()
    print(f"cells that waited for {options.cluster} are free; what runs goes on: %cluster attach {options.cluster}")
    return 0


def skip(options: argparse.Namespace) -> int:
    """End the replay of the earlier cell that a node runs now."""
    with Cluster.attach(check_running(options.cluster), kind="cli", live=False) as cluster:
        cell = cluster.skip(options.node)
    print(f"cell {cell} is skipped on {options.node}: %cluster restart {options.node} --all-cells runs it again")
    return 0


def check_running(name: str) -> str:
    """``name`` if a cluster of this name runs; UsageError that names those that do."""
    running = running_clusters()
    if name not in running:
        known = f"running: {', '.join(running)}" if running else "no cluster runs on this machine"
        raise UsageError(f"no cluster is called {name!r}: {known}")
    return name
