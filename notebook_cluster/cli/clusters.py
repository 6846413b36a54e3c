"""``notebook-cluster peers``, ``status``, ``report``, ``replay``, ``export``, ``runs``, ``compare``, ``stop``,
``detach``, ``skip``."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from notebook_cluster.cli.arguments import UsageError
from notebook_cluster.cli.console import print_table
from notebook_cluster.client import (
    Cluster,
    ClusterError,
    export_run,
    find_peers,
    find_run,
    is_led_elsewhere,
    killed_clusters,
    read_last_run,
    read_run,
    read_runs,
    running_clusters,
    runs_table,
    was_killed,
)
from notebook_cluster.protocol.names import is_name
from notebook_cluster.protocol.state import PeerView
from notebook_cluster.security import cluster_directory, fingerprint
from notebook_cluster.widgets.comparison import compare_runs
from notebook_cluster.widgets.replay import write_replay
from notebook_cluster.widgets.report import write_report
from notebook_cluster.widgets.text import render_text

if TYPE_CHECKING:
    from notebook_cluster.discovery import FoundCluster


def peers(options: argparse.Namespace) -> int:
    """Listen on the network and print the peers, with the reason why one cannot be added, and the clusters."""
    from notebook_cluster.cli.picker import sorted_clusters
    from notebook_cluster.discovery import IN_GROUP, ClusterBrowser

    browser = ClusterBrowser()
    browser.start()
    try:
        found = sorted(find_peers(options.seconds), key=lambda peer: (not peer.trusted, peer.name, peer.address))
        clusters = sorted_clusters(browser)
    finally:
        browser.close()
    if found:
        _print_peers(found)
    else:
        print(f"no peer was heard{IN_GROUP}: run 'notebook-cluster share' on another machine of this network")
    if clusters:
        _print_clusters(clusters)
    return 0


def _print_peers(found: list[PeerView]) -> None:
    rows = []
    for peer in found:
        trusted = f"no: {peer.reason}" if peer.reason else "yes" if peer.trusted else "no"
        rows.append((peer.name, peer.device, peer.address, trusted))
    print_table(("name", "device", "address", "trusted by you"), rows)
    counted = Counter(peer.name for peer in found if peer.key)
    for name in sorted(name for name, count in counted.items() if count > 1):
        which = [f"{peer.address} (key {fingerprint(peer.key)})" for peer in found if peer.name == name and peer.key]
        print(
            f"{len(which)} peers are called {name}: {', '.join(which)}. Add one by its address, and share one of them "
            "with another --name"
        )


def _print_clusters(clusters: "list[FoundCluster]") -> None:
    rows = []
    for cluster in clusters:
        place = f"{cluster.hosts[0]}:{cluster.pairing_port}"
        how = f"notebook-cluster share --dial {place} --code CODE" if cluster.pairing_port else "no code is open there"
        rows.append((cluster.name, cluster.owner, f"{cluster.hosts[0]}:{cluster.port}", how))
    print_table(("cluster", "owner", "address", "a machine joins it with"), rows)


def status(options: argparse.Namespace) -> int:
    """Print the state of one cluster, or of all that run; as JSON a list with an object for each."""
    names = [check_running(options.cluster)] if options.cluster else running_clusters()
    states = []
    for name in names:
        with Cluster.attach(name, kind="cli", live=False) as cluster:
            states.append(cluster.state())
    if options.json:
        # What scripts write down should let nobody in.
        shown = [_whole(msgspec.structs.replace(state, invitation="")) for state in states]
        print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    else:
        killed = [] if options.cluster else killed_clusters()
        said = [render_text(state) for state in states] + [_killed(name) for name in killed]
        print("\n\n".join(said) or "no cluster runs: in a notebook, %load_ext notebook_cluster and %cluster start")
    return 0


def _whole(value: Any) -> Any:
    """``value`` with every field of its messages, also those that have their default and are left out on the wire."""
    if isinstance(value, msgspec.Struct):
        return {name: _whole(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [_whole(one) for one in value]
    return {key: _whole(one) for key, one in value.items()} if isinstance(value, dict) else value


def report(options: argparse.Namespace) -> int:
    """Write the report of one cluster, or of the last run of one that is over, and print where it is."""
    if options.cluster in running_clusters():
        with Cluster.attach(options.cluster, kind="cli", live=False) as cluster:
            print(write_report(cluster, options.file, overwrite=options.overwrite))
    else:
        try:
            run = read_last_run(options.cluster)
        except ClusterError as error:
            raise UsageError(str(error)) from None
        print(write_report(run, options.file, overwrite=options.overwrite, ended=run.ended))
    return 0


def replay(options: argparse.Namespace) -> int:
    """Write the page that plays a cluster, its last run or one that was kept, and print where it is."""
    try:
        lives = options.run in running_clusters()
        folder = cluster_directory(options.run) if lives else find_run(options.run).folder
        print(write_replay(folder, options.file, overwrite=options.overwrite))
    except ClusterError as error:
        raise UsageError(str(error)) from None
    return 0


def export(options: argparse.Namespace) -> int:
    """Write the curves of a cluster, of its last run or of one that was kept, and print what was written."""
    choice = {"job": options.job, "overwrite": options.overwrite}
    if options.run in running_clusters():
        with Cluster.attach(options.run, kind="cli", live=False) as cluster:
            written = export_run(cluster, options.file, **choice)
    else:
        try:
            kept = find_run(options.run)
        except ClusterError as error:
            raise UsageError(str(error)) from None
        written = export_run(read_run(kept.folder), options.file, **choice)
    print("\n".join(written.lines()))
    return 0


def runs(options: argparse.Namespace) -> int:
    """Print a table of the runs that were kept, the newest first."""
    heads, rows = runs_table(Cluster.runs())
    if rows:
        print_table(heads, rows)
        print("notebook-cluster export CLUSTER@STARTED FILE.csv writes the curves of one, as lesson@2026-11-19T14:03")
    else:
        print("no run was kept yet: in a notebook, %load_ext notebook_cluster and %cluster start")
    return 0


def compare(options: argparse.Namespace) -> int:
    """Print results and settings of several runs beside each other."""
    try:
        print(compare_runs(read_runs(options.runs), options.metric, job=options.job).text)
    except ClusterError as error:
        raise UsageError(str(error)) from None
    return 0


def hand_over(options: argparse.Namespace) -> int:
    """Lead a cluster from another machine, or from this one again."""
    with Cluster.attach(check_running(options.cluster), kind="cli", live=False) as cluster:
        led = cluster.hand_over(options.to, survive=options.survive)
    later = f", and from {options.to} when this machine is about to sleep" if options.survive else ""
    print(f"cluster {options.cluster} is led from {led or 'this machine'} now{later}")
    return 0


def take_over(options: argparse.Namespace) -> int:
    """Begin a new cluster from the newest state that machines keep of one whose coordinator is gone."""
    with Cluster.take_over(
        options.cluster, local=options.local, peers=options.peers, kind="cli",
        on_progress=lambda line: print(line, flush=True),
    ) as cluster:  # fmt: skip
        nodes = ", ".join(node.name for node in cluster.state().nodes)
    print(f"cluster {options.cluster} is ready ({nodes}): in a notebook, %cluster attach {options.cluster}")
    return 0


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
    if name not in running and not is_led_elsewhere(name):
        if is_name(name) and was_killed(name):
            raise UsageError(_killed(name))
        known = f"running: {', '.join(running)}" if running else "no cluster runs on this machine"
        raise UsageError(f"no cluster is called {name!r}: {known}")
    return name


def _killed(name: str) -> str:
    return (
        f"the coordinator of cluster {name!r} was killed: %cluster start {name} in a notebook brings it back, or "
        f"notebook-cluster run --cluster {name} SCRIPT.py"
    )
