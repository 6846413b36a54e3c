"""``notebook-cluster share``: offer this machine until Ctrl-C."""

import argparse
import getpass

from notebook_cluster.agent import DEFAULT_LEASE_S, AgentSettings, Ready, run_agent
from notebook_cluster.agent.log import log_to_terminal
from notebook_cluster.security import agent_directory


def share(options: argparse.Namespace) -> int:
    """Run a shared agent in this process; returns when it was stopped."""
    directory = options.data_dir.expanduser().resolve() if options.data_dir else agent_directory(options.name)
    lease = options.lease or DEFAULT_LEASE_S
    settings = AgentSettings(name=options.name, directory=directory, port=options.port, lease=lease)
    log_to_terminal()
    reason = run_agent(settings, lambda ready: print(_introduction(ready, settings), flush=True))
    print(f"not shared any more: {reason}", flush=True)
    return 0


def _introduction(ready: Ready, settings: AgentSettings) -> str:
    user = getpass.getuser()
    return "\n".join(
        [
            f"This machine is shared as {ready.name!r} on port {ready.port} and announced on the local network (mDNS).",
            f"Who may run code here: clusters that user {user!r} starts on this machine, nobody else.",
            f"Their code runs as user {user!r} and can do everything that {user!r} can do.",
            f"Working folders and logs: {settings.directory}",
            "Stop with Ctrl-C: that ends every kernel that was started here.",
        ]
    )
