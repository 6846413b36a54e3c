"""The Python API of a view: start, attach to and steer a cluster.

May import: values, peering, discovery, journal (what a run left on disk), security, protocol.
Called by: magics, widgets, server, cli, and by people: ``Cluster`` blocks, ``AsyncCluster`` is the same with ``await``.
"""

from notebook_cluster.client.async_cluster import AsyncCluster
from notebook_cluster.client.benching import BENCH_HEADS, BenchedWay, who_is_left_out
from notebook_cluster.client.cluster import Cluster
from notebook_cluster.client.collecting import HandedIn
from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.export import Exported, export_run
from notebook_cluster.client.files import Destination, find_sources, send_files
from notebook_cluster.client.found_peers import PeerWatch, find_peers
from notebook_cluster.client.led_elsewhere import is_led_elsewhere, led_from
from notebook_cluster.client.past import (
    Frames,
    Run,
    find_run,
    named_run,
    read_past_views,
    read_run,
    read_runs,
    run_name,
    runs_table,
)
from notebook_cluster.client.requests import how_to_join
from notebook_cluster.client.start import (
    find_clusters,
    killed_clusters,
    list_clusters,
    read_last_run,
    running_clusters,
    was_killed,
)
from notebook_cluster.client.stream import CellStream
from notebook_cluster.client.values import (
    MOST_REPLAYED,
    Packed,
    Pulled,
    give_source,
    new_ticket,
    pack,
    read_values,
    small_source,
    take_source,
    write_value,
)

__all__ = [
    "BENCH_HEADS",
    "MOST_REPLAYED",
    "AsyncCluster",
    "BenchedWay",
    "CellStream",
    "Cluster",
    "ClusterError",
    "Destination",
    "Exported",
    "Frames",
    "HandedIn",
    "Packed",
    "PeerWatch",
    "Pulled",
    "Run",
    "export_run",
    "find_clusters",
    "find_peers",
    "find_run",
    "find_sources",
    "give_source",
    "how_to_join",
    "is_led_elsewhere",
    "killed_clusters",
    "led_from",
    "list_clusters",
    "named_run",
    "new_ticket",
    "pack",
    "read_last_run",
    "read_past_views",
    "read_run",
    "read_runs",
    "read_values",
    "run_name",
    "running_clusters",
    "runs_table",
    "send_files",
    "small_source",
    "take_source",
    "was_killed",
    "who_is_left_out",
    "write_value",
]
