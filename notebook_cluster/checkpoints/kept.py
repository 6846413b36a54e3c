"""The kept checkpoints of one folder as a coordinator is told of them, and the one that a cluster has taken over."""

from collections.abc import Iterator
from pathlib import Path

from notebook_cluster.checkpoints.reading import (
    SUFFIX,
    CheckpointError,
    FoundCheckpoint,
    Manifest,
    folders_newest_first,
    read_manifest,
    verify,
)
from notebook_cluster.protocol.kept import MOST_LINES, MOST_STATES, MOST_TEXT, KeptState, TakenState
from notebook_cluster.protocol.names import is_name

CLUSTER_ID, EPOCH = "cluster_id", "epoch"
"""Among the settings in the manifest of a kept checkpoint: whose training it is, see :class:`.KeptState`."""


def kept_states(checkpoints: Path, cluster: str = "") -> tuple[list[KeptState], list[str]]:
    """Of each kept checkpoint in the folder ``checkpoints`` the newest whole one of the latest training, and a line for
    each damaged one before it. ``cluster``: only of clusters of this name, where several work in one folder. Reads all
    files: seconds for some gigabytes."""
    found: list[KeptState] = []
    damaged: list[str] = []
    for home in _homes(checkpoints):
        read: list[tuple[Path, Manifest]] = []
        for folder in folders_newest_first(home):
            try:
                read.append((folder, read_manifest(folder)[0]))
            except CheckpointError as error:
                damaged.append(str(error)[:MOST_TEXT])
        # nodes of an earlier cluster may have kept their training once more after the later one did
        for folder, manifest in sorted(read, key=lambda row: -_epoch(row[1])):
            if cluster and not _is_of(manifest, cluster):
                continue
            try:
                verify(folder)
            except CheckpointError as error:
                damaged.append(str(error)[:MOST_TEXT])
                continue
            found.append(_state(manifest, home.name))
            break
    return found[:MOST_STATES], damaged[:MOST_LINES]


def find_taken(checkpoints: Path, taken: TakenState) -> FoundCheckpoint | None:
    """Where in the folder ``checkpoints`` the state lies that the cluster goes on from; None: it lies elsewhere.

    Raises:
        CheckpointError: it is here and damaged.
    """
    for folder in folders_newest_first(checkpoints / taken.name):
        try:
            manifest, _ = read_manifest(folder)
        except CheckpointError:
            continue
        if (manifest.round, manifest.state_hash) == (taken.round, taken.state_hash):
            _, manifest_hash = verify(folder)
            return FoundCheckpoint(manifest.round, folder, manifest_hash, saved_at=manifest.saved_at)
    return None


def _homes(checkpoints: Path) -> Iterator[Path]:
    """Those of nodes' own folders alone: none that is reached through a link."""
    root = checkpoints.resolve()
    for home in sorted(root.glob(f"*{SUFFIX}")):
        if is_name(home.name) and home.is_dir() and home.resolve() == home:
            yield home


def _is_of(manifest: Manifest, cluster: str) -> bool:
    """The id of a cluster is its name with a number behind it."""
    return str(manifest.settings.get(CLUSTER_ID, "")).rpartition("-")[0] == cluster[:40]


def _epoch(manifest: Manifest) -> int:
    epoch = manifest.settings.get(EPOCH, 0)
    return epoch if isinstance(epoch, int) else 0


def _state(manifest: Manifest, name: str) -> KeptState:
    return KeptState(
        name=name,
        job=manifest.job[:MOST_TEXT],
        round=manifest.round,
        time=manifest.saved_at,
        bytes=sum(file.bytes for file in manifest.files.values()),
        state_hash=manifest.state_hash[:MOST_TEXT],
        cluster_id=str(manifest.settings.get(CLUSTER_ID, ""))[:MOST_TEXT],
        epoch=_epoch(manifest),
    )
