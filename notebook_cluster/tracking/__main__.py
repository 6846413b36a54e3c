"""``python -m notebook_cluster.tracking``: the process of a tracker, which :mod:`.process` starts."""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from notebook_cluster.tracking.follower import Follower
from notebook_cluster.tracking.remembered import TRACKERS, only_tracker


def main() -> int:
    """The exit code: 0 all was logged, 1 not all, 2 another process does it."""
    parser = argparse.ArgumentParser(prog="notebook_cluster.tracking", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--started", type=float, required=True)
    parser.add_argument("--tracker", choices=TRACKERS, required=True)
    parser.add_argument("--project", required=True)
    told = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    with only_tracker(told.folder, told.tracker) as mine:
        if not mine:
            return 2
        follower = Follower(told.folder, told.cluster, told.started, told.tracker, told.project)
        signal.signal(signal.SIGTERM, lambda number, frame: follower.stopping.set())
        return follower.run(os.getpid())


if __name__ == "__main__":
    sys.exit(main())
