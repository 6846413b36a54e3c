"""``notebook-cluster peers`` and ``notebook-cluster status``."""

import argparse
import sys

from notebook_cluster.cli.steer import check_running
from notebook_cluster.client import Cluster, find_peers, list_clusters
from notebook_cluster.widgets.text import render_text


def peers(options: argparse.Namespace) -> int:
    """Listen on the network and print a table of the peers, with the reason why one cannot be added."""
    found = sorted(find_peers(options.seconds), key=lambda peer: (not peer.trusted, peer.name))
    if not found:
        print("no peer was heard: run 'notebook-cluster share' on another machine of this network")
        return 0
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "device", "address", "trusted by you")
    for peer in found:
        cells = [peer.name, peer.device, peer.address, "yes" if not peer.reason else f"no: {peer.reason}"]
        # Text, not str: a peer's words must not be read as rich's markup.
        table.add_row(*(Text(cell) for cell in cells))
    # A table that goes to a file or another program is not wrapped at 80 columns.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return 0


def status(options: argparse.Namespace) -> int:
    """Print the state of one cluster, or of all that run."""
    names = [check_running(options.cluster)] if options.cluster else [file.cluster for file in list_clusters()]
    if not names:
        print("no cluster runs: in a notebook, %load_ext notebook_cluster and %cluster start")
    for index, name in enumerate(names):
        with Cluster.attach(name, kind="cli", live=False) as cluster:
            print(("\n" if index else "") + render_text(cluster.state()))
    return 0
