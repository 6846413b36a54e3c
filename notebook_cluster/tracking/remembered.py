"""What was logged where, in the folder of the run: ``track-wandb.json``. No key of anybody stands in it."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

import msgspec

from notebook_cluster.journal.kept_runs import TRACKED, is_held
from notebook_cluster.security import write_private

TRACKERS = ("wandb", "mlflow", "tensorboard")
TITLES = {"wandb": "Weights & Biases", "mlflow": "MLflow", "tensorboard": "TensorBoard"}
Condition = Literal["connecting", "logging", "retrying", "ended", "failed"]


class Target(msgspec.Struct):
    """One run of a tracker, and what is in it.

    ``last``: of each curve the step and the time of the last point that was logged.
    """

    run_id: str = ""
    address: str = ""
    """Where people look at it: a URL or a folder."""
    points: int = 0
    rows: int = 0
    """Of Weights & Biases: where steps must increase over all that is logged."""
    last: dict[str, tuple[int, float]] = {}
    settings: dict[str, str] = {}
    """What was logged of the configuration."""


class Remembered(msgspec.Struct):
    """All that a tracker knows of this run. ``targets``: by project and server; ``places``: job -> its runs in the
    order in which they were first seen, so that a curve keeps its name when old runs are dropped."""

    pid: int = 0
    condition: Condition = "ended"
    text: str = ""
    waiting: int = 0
    """Points that were handed to the library and are not known to be on the disk or with the server yet: after a kill
    they are logged again."""
    project: str = ""
    target: str = ""
    targets: dict[str, Target] = {}
    places: dict[str, list[int]] = {}

    @property
    def current(self) -> Target:
        return self.targets.setdefault(self.target, Target())


def read_remembered(folder: Path, tracker: str) -> Remembered | None:
    """What ``tracker`` has left in ``folder``, or None. ValueError: the file is damaged; names it and the way out."""
    path = _path(folder, tracker, "json")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Remembered)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is not readable ({error}): delete it, and all points are logged once more, to a new run"
        ) from None


def write_remembered(folder: Path, tracker: str, remembered: Remembered) -> None:
    """Keep it in the place of what was there; whole or not at all. OSError: the disk is full or the folder is gone."""
    write_private(_path(folder, tracker, "json"), msgspec.json.encode(remembered))


@contextlib.contextmanager
def only_tracker(folder: Path, tracker: str) -> Iterator[bool]:
    """True in the block when no other process tracks this run with ``tracker``; it holds the lock to the end."""
    with open(_path(folder, tracker, "lock"), "w") as file:
        yield any(_locks(file) for _ in range(_TRIES))


_TRIES, _PAUSE = 10, 0.1
"""Whoever only looks holds the lock for a moment as well."""


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(_PAUSE)
        return False
    return True


def is_tracked(folder: Path, tracker: str) -> bool:
    """True while a process holds the lock of :func:`only_tracker`."""
    return is_held(_path(folder, tracker, "lock"))


def log_path(folder: Path, tracker: str) -> Path:
    """What the library and the process print."""
    return _path(folder, tracker, "log")


def _path(folder: Path, tracker: str, ending: str) -> Path:
    return folder / f"{TRACKED}{tracker}.{ending}"
