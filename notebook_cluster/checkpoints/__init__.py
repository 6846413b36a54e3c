"""Checkpoints on disk: consistent, verified, resumable. Plain files, no pickle, no torch.

``<directory>/<name>/round-000012/`` holds

- ``global.safetensors``: the global parameters by name, the outer momentum as ``outer.momentum/<name>``;
- ``node-<rank>-<node>.safetensors``: one per node, what that node alone knows (its optimiser's state);
- ``manifest.json``: job, round, state hash, settings, nodes, versions, and size and blake2b hash of every file.

It is written to a temporary folder, synced, and renamed when complete, so a full disk or a kill at any point leaves the
previous checkpoint as it was. The last two of a name are kept. A round saved again gets a folder of its own
(``round-000012-2``); which one is newest is the manifest's ``serial``.

May import: protocol. Called by: ``training``, ``agent``.
"""

from notebook_cluster.checkpoints.reading import (
    Checkpoint,
    CheckpointError,
    FileEntry,
    FoundCheckpoint,
    Manifest,
    NodeEntry,
    find_latest,
    find_newest,
    load,
    names,
)
from notebook_cluster.checkpoints.writing import Contents, Part, save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Contents",
    "FileEntry",
    "FoundCheckpoint",
    "Manifest",
    "NodeEntry",
    "Part",
    "find_latest",
    "find_newest",
    "load",
    "names",
    "save",
]
