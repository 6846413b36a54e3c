"""``python -m notebook_cluster.window``: started by the client in place of a coordinator, in a session of its own."""

import argparse
import os
import sys
from pathlib import Path

from notebook_cluster.coordinator.startup import StartProgress, run_alone
from notebook_cluster.protocol.heads import CODE_VARIABLE
from notebook_cluster.window.seat import Seat, coordinator_of
from notebook_cluster.window.settings import WindowSettings


def main() -> int:
    """Run one window until nobody looks through it, or its cluster has ended."""
    parser = argparse.ArgumentParser(prog="notebook_cluster.window")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--runtime", required=True, type=Path, help="the cluster's folder")
    parser.add_argument("--head", required=True, help="the peer from where it is led: a name or HOST:PORT")
    parser.add_argument("--directory", required=True, help="working directory of local nodes")
    parser.add_argument("--lease", type=float, default=600.0)
    parser.add_argument("--head-lease", type=float, default=86400.0)
    parser.add_argument("--agent-lease", type=float, default=600.0)
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--only-look", action="store_true")
    parser.add_argument("--known", default="")
    parser.add_argument("--progress", type=int, default=-1)
    settings = WindowSettings(**vars(parser.parse_args()), code=os.environ.pop(CODE_VARIABLE, ""))
    progress = StartProgress(settings.progress)
    seat = Seat(coordinator_of(settings), settings, progress)
    return run_alone(settings.runtime, settings.cluster, progress, seat.run)


if __name__ == "__main__":
    sys.exit(main())
