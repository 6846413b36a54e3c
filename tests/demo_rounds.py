"""What the tests of DeMo share: a cluster that keeps what was on the mesh, and a node's steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from notebook_cluster import training as nc
from notebook_cluster.protocol.mesh import JobFrame
from notebook_cluster.protocol.rounds import Applied
from tests.cluster_in_process import Cluster, Node
from tests.test_training_sparse import wide

NODES = ["a", "b", "c"]
SHAPES = [list(tensor.shape) for _, tensor in sorted(wide().named_parameters())]
LR = 0.005


def gradient(model: nn.Module) -> Any:
    return torch.cat([tensor.grad.reshape(-1) for _, tensor in sorted(model.named_parameters())]).numpy().copy()


def momentum_of(sync: nc.DeMo) -> Any:
    return sync._momentum.state["momentum"]


def samples_of(node: str) -> int:
    return 8 + NODES.index(node)


class Recording(Cluster):
    """Keeps what owners of slices sent: the contributions of all members of an attempt."""

    def __init__(self, names: list[str], directory: Path) -> None:
        self.means: dict[tuple[int, int, int], dict[int, bytes]] = {}
        self.hashes: dict[int, set[str]] = {}
        self.seen: Callable[[str, str, Any], None] = lambda towards, node, message: None
        super().__init__(names, directory)
        self.watch = self._watch

    def _watch(self, towards: str, node: str, message: Any) -> None:
        if isinstance(message, Applied):
            self.hashes.setdefault(message.round, set()).add(message.state_hash)
        self.seen(towards, node, message)

    def carry(self, sender: Node, receiver: str, header: JobFrame, payload: bytes) -> None:
        if header.kind == "mean":
            key = (header.round, header.attempt, header.slice)
            self.means.setdefault(key, {})[header.offset] = payload
        super().carry(sender, receiver, header, payload)

    def rounds(self) -> list[tuple[int, dict[str, bytes]]]:
        """Of each round its number and what every member whose work it counted had sent, in rank order."""
        rounds = []
        for record in self.records:
            if record["kind"] != "commit" or not record["slices"]:
                continue
            commit, rows = record["commit"], dict.fromkeys(record["commit"]["members"], b"")
            for index in range(len(record["slices"])):
                chunks = self.means[commit["round"], commit["attempt"], index]
                data = b"".join(part for _, part in sorted(chunks.items()))[4 * len(rows) :]
                size = len(data) // len(rows)
                for place, name in enumerate(rows):
                    rows[name] += data[place * size : (place + 1) * size]
            rounds.append((commit["round"], rows))
        return rounds
