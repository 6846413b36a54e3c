"""Gauges of the running clusters, on jupyter_server's own ``/metrics``.

They are made from the newest states when somebody asks, so those of a cluster that has ended are gone. Labels are names
of clusters, nodes and training jobs, which are short and few.
"""

import weakref
from collections import Counter
from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.server.hub import Hub

MAX_NODES = 256
MAX_JOBS = 16


class _Clusters(Collector):
    def __init__(self) -> None:
        self.hubs: weakref.WeakSet[Hub] = weakref.WeakSet()

    def describe(self) -> list[GaugeMetricFamily]:
        """Nothing: names of its own."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All gauges of all running clusters."""
        states = {
            name: cluster.state
            for hub in self.hubs
            for name, cluster in hub.clusters.items()
            if cluster.state is not None and cluster.condition == "running"
        }
        yield from _gauges(states)


def _gauges(states: dict[str, ClusterView]) -> Iterator[GaugeMetricFamily]:
    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"notebook_cluster_{name}", text, labels=labels)

    up = gauge("up", "1 for each running cluster of this user", "cluster")
    nodes = gauge("nodes", "Nodes of a cluster in a condition", "cluster", "condition")
    rounds = gauge("rounds", "The last round that a training job committed", "cluster", "job")
    sent = gauge("sent_bytes", "Bytes that all nodes sent in rounds of a training job so far", "cluster", "job")
    instead = gauge(
        "data_parallel_bytes", "Bytes that data parallel training would have sent for the same steps", "cluster", "job"
    )
    memory = gauge("node_memory_used_bytes", "Memory that a node uses (VRAM on accelerators)", "cluster", "node")
    there = gauge("node_memory_total_bytes", "Memory that the node's device has", "cluster", "node")
    for name, state in states.items():
        up.add_metric([name], 1)
        for condition, count in Counter(node.condition for node in state.nodes).items():
            nodes.add_metric([name, condition], count)
        for job in state.jobs[:MAX_JOBS]:
            rounds.add_metric([name, job.name], job.round)
            sent.add_metric([name, job.name], job.bytes_sent)
            instead.add_metric([name, job.name], job.bytes_data_parallel)
        for node in state.nodes[:MAX_NODES]:
            memory.add_metric([name, node.name], node.memory_used)
            there.add_metric([name, node.name], node.memory_total)
    yield from (up, nodes, rounds, sent, instead, memory, there)


# Once for the process, which may have several servers.
_clusters = _Clusters()
REGISTRY.register(_clusters)


def show(hub: Hub) -> None:
    """Add the clusters of ``hub`` to what the process tells; they go with it."""
    _clusters.hubs.add(hub)
