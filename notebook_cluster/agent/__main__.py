"""``python -m notebook_cluster.agent --private``: the agent that a coordinator starts for its own machine.

Prints one line of JSON, the fields of :class:`.AgentReady`, when it can be reached, and nothing after it. Its log is
``agent.log`` in the cluster's folder. Ends with its cluster, or after ``--lease`` seconds without a coordinator.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from notebook_cluster.agent import DEFAULT_LEASE_S, AgentReady, AgentSettings, run_agent
from notebook_cluster.agent.running import log_to_file
from notebook_cluster.protocol import check_name
from notebook_cluster.security import private_directory


def main(arguments: list[str] | None = None) -> int:
    """Run a private agent; 0 after a clean end, 1 when it could not start (one line on stderr says why)."""
    parser = argparse.ArgumentParser(
        prog="python -m notebook_cluster.agent",
        description="The agent of one cluster on the notebook's own machine. To share a machine with others: "
        "notebook-cluster share",
        allow_abbrev=False,
    )
    parser.add_argument("--private", action="store_true", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--cluster-dir", type=Path, required=True)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--lease", type=float, default=DEFAULT_LEASE_S)
    parser.add_argument("--dial", default="", help="HOST:PORT of the reception of the cluster's head")
    parser.add_argument("--head-key", default="", help="public key of the cluster's head")
    options = parser.parse_args(arguments)
    try:
        directory = private_directory(options.cluster_dir)
        settings = AgentSettings(
            name=check_name(options.name, "peer"),
            directory=directory / "agent",
            private=True,
            bind=options.bind,
            lease=options.lease,
            dial=options.dial,
            head_key=options.head_key,
        )
        log_to_file(directory / "agent.log")
        run_agent(settings, _print_ready)
    except (OSError, ValueError) as error:
        print(f"the agent did not start: {error}", file=sys.stderr)
        return 1
    return 0


def _print_ready(ready: AgentReady) -> None:
    print(msgspec.json.encode(ready).decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
