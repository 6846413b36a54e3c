"""The checkpoint that a node keeps by itself before its kernel ends, because its cluster is out of reach.

It is one like any other, ``checkpoints/<job>-kept/``, with the parts of the nodes that share the folder: those of one
peer hold the same state, so each adds its own part to what the one before it has written.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from notebook_cluster.checkpoints import CheckpointError, Part, find_latest, load, save
from notebook_cluster.checkpoints.reading import SUFFIX
from notebook_cluster.protocol.names import check_name
from notebook_cluster.training.checkpointing.saving import TrainingSnapshot

_MAX_NAME = 63


def kept_name(job: str) -> str:
    """The checkpoint's name, which ``resume=`` takes."""
    return check_name(job[: _MAX_NAME - len(SUFFIX)] + SUFFIX, "checkpoint")


def kept_writer(
    directory: Path, job: str, snapshot: TrainingSnapshot, node: str, rank: int, part: Callable[[], bytes | None]
) -> Callable[[], Path]:
    """What saves ``snapshot`` with the ``part`` of ``node`` (None: without it) under ``directory`` and returns the
    folder. It raises CheckpointError when that was not possible: the checkpoint before is then still valid."""

    def write() -> Path:
        name, own = kept_name(job), Part(node, rank, part())
        with _one_at_a_time(directory.absolute() / name):
            parts = [*_parts_of_others(directory, name, snapshot, node), own]
            return save(directory.absolute(), name, snapshot.contents(job, parts))[0]

    return write


def _parts_of_others(directory: Path, name: str, snapshot: TrainingSnapshot, node: str) -> list[Part]:
    """What other nodes than ``node`` put into the newest kept checkpoint, when that is of the same state."""
    try:
        found = find_latest(directory, name)
        checkpoint = load(found.path) if found is not None else None
    except CheckpointError:
        return []
    if checkpoint is None or checkpoint.manifest.state_hash != snapshot.state_hash:
        return []
    rows = [row for row in checkpoint.manifest.nodes if row.name != node]
    return [Part(row.name, row.rank, checkpoint.part(row.name, row.rank)) for row in rows]


@contextlib.contextmanager
def _one_at_a_time(home: Path) -> Iterator[None]:
    """Nodes of one peer may write there at the same moment."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CheckpointError(f"checkpoint not written to {home}: {error.strerror or error}: make room there") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
