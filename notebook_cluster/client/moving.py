"""Values and files to and from nodes, as methods of ``Cluster``."""

from collections.abc import Mapping, Sequence
from typing import Any

from notebook_cluster.client import values
from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.files import Destination, send_files
from notebook_cluster.client.requests import RunningCluster
from notebook_cluster.client.sources import find_sources
from notebook_cluster.client.stream import Progress
from notebook_cluster.protocol.state import NodeView, by_rank


def _quiet(done: int, total: int) -> None:
    """Nobody wants to know how far it is."""


class Moving(RunningCluster):
    """The part of :class:`.cluster.Cluster` that moves values and files. Nothing from a node is unpickled."""

    def push(
        self,
        variables: Mapping[str, Any],
        targets: Sequence[str] = (),
        *,
        on_progress: Progress = _quiet,
    ) -> None:
        """Make ``variables`` (name -> value) variables on ``targets`` (node names; empty: all). Plain data, numpy,
        torch, MLX and pandas, at most 1 GiB each.

        Raises:
            ClusterError: a value does not travel, or a node cannot take it.
        """
        packed = [values.pack(name, value) for name, value in variables.items()]
        nodes = [node.name for node in self._nodes_of(targets)]
        for value in packed:
            if value.is_small:
                source = values.small_source(value)
            else:
                ticket = values.new_ticket()
                values.write_value(self, ticket, value, nodes, on_progress)
                source = values.take_source(value, ticket)
            ended, _ = self.run(source, targets, replay=value.is_small)
            failed = [f"{node}: {result.error_value}" for node, result in ended.results.items() if result.error_name]
            if failed or ended.status != "ok":
                raise ClusterError(f"cannot push {value.name!r} to {'; '.join(failed) or ended.status}")

    def pull(
        self,
        names: Sequence[str],
        targets: Sequence[str] = (),
        *,
        on_progress: Progress = _quiet,
    ) -> dict[str, dict[str, values.Pulled]]:
        """The variables ``names`` of ``targets`` (node names; empty: all): name -> node, in rank order -> what came.

        Raises:
            ClusterError: a node is gone, or what it sent is damaged or does not fit into memory.
        """
        ticket, nodes = values.new_ticket(), [node.name for node in self._nodes_of(targets)]
        ended, _ = self.run(values.give_source(ticket, names), nodes, replay=False)
        if ended.status != "ok":
            raise ClusterError(f"nothing was pulled: the cell that asks for it ended with {ended.status}")
        return values.read_values(self, ticket, names, nodes, on_progress)

    def send_files(
        self,
        path: str,
        targets: Sequence[str] = (),
        *,
        on_progress: Progress = _quiet,
    ) -> list[Destination]:
        """Put a file or folder into the working folder of ``targets`` (node names; empty: all), each folder once; what
        is there already is not sent.

        Raises:
            ClusterError: it does not exist or cannot be read; what fails at one place is in its ``error``.
        """
        return send_files(self, find_sources(path), self._nodes_of(targets), on_progress)

    def _nodes_of(self, targets: Sequence[str]) -> list[NodeView]:
        """The nodes with these names, or all that run, in rank order."""
        nodes = [node for node in self.state().nodes if node.rank is not None]
        known = {node.name for node in nodes}
        for name in targets:
            if name not in known:
                raise ClusterError(f"no node {name!r} runs in cluster {self.name!r}: %cluster status")
        if not nodes:
            raise ClusterError(f"cluster {self.name!r} has no running node: %cluster add PEER")
        return by_rank(node for node in nodes if not targets or node.name in targets)
