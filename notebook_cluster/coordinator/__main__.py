"""``python -m notebook_cluster.coordinator``: started by the client, in a session of its own."""

import argparse
import sys
from pathlib import Path

from notebook_cluster.coordinator.service import Coordinator
from notebook_cluster.coordinator.startup import Settings, StartProgress, check_settings, run_alone
from notebook_cluster.window.seat import Seat, window_of


def main() -> int:
    """Run one coordinator until it is stopped."""
    parser = argparse.ArgumentParser(prog="notebook_cluster.coordinator")
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--runtime", required=True, type=Path, help="the cluster's folder")
    parser.add_argument("--directory", required=True, help="working directory of local nodes")
    parser.add_argument("--lease", type=float, default=600.0)
    parser.add_argument("--agent-lease", type=float, default=600.0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--head", default="", help="on a peer of this name, for the window of another machine")
    parser.add_argument("--known", default="", help="peers to know of without mDNS: HOST:PORT,NAME,...")
    parser.add_argument("--progress", type=int, default=-1, help="file descriptor for lines about the start")
    settings = Settings(**vars(parser.parse_args()))
    check_settings(settings)
    progress = StartProgress(settings.progress)

    async def run() -> None:
        if settings.head:
            await Coordinator(settings, progress).run()
        else:
            await Seat(settings, window_of(settings), progress).run()

    return run_alone(settings.runtime, settings.cluster, progress, run)


if __name__ == "__main__":
    sys.exit(main())
