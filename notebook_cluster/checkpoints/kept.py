"""Checkpoints that a machine keeps when a cluster ends without having asked for one, and where they are found again.

A cluster on another person's machine works in ``work/<cluster>/`` of the agent there, and the next one, perhaps of
another owner, elsewhere. So what was kept (``<job>-kept``, nothing else) is looked for in all of them; a folder that is
reached through a link is none of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from notebook_cluster.checkpoints.manifest import CheckpointError, Manifest, read_manifest
from notebook_cluster.checkpoints.reading import FoundCheckpoint, find_latest

SUFFIX = "-kept"


@dataclass(frozen=True)
class KeptHere:
    """A kept checkpoint whose manifest can be read; its files are not looked at."""

    folder: Path
    manifest: Manifest


def kept_homes(work: Path) -> Iterator[Path]:
    """Every ``<cluster>/checkpoints/<job>-kept`` below ``work``."""
    root = work.resolve()
    for home in sorted(root.glob(f"*/checkpoints/*{SUFFIX}")):
        if home.is_dir() and home.resolve() == home:
            yield home


def kept_below(work: Path) -> list[KeptHere]:
    """The newest kept checkpoint of each name below ``work``, newest first."""
    newest: dict[str, KeptHere] = {}
    for home in kept_homes(work):
        for folder in home.glob("round-*"):
            if folder.is_symlink():
                continue
            try:
                manifest, _ = read_manifest(folder)
            except CheckpointError:
                continue
            known = newest.get(home.name)
            if known is None or manifest.saved_at > known.manifest.saved_at:
                newest[home.name] = KeptHere(folder, manifest)
    return sorted(newest.values(), key=lambda kept: -kept.manifest.saved_at)


def find_newest(directory: Path, name: str, work: Path | None) -> FoundCheckpoint | None:
    """:func:`.reading.find_latest` of ``directory``; a kept one also in what is below ``work``: the newest of all.

    Raises:
        CheckpointError: checkpoints of this name are there and none is whole.
    """
    places = [directory]
    if work is not None and name.endswith(SUFFIX):
        own = directory.resolve()
        places += [home.parent for home in kept_homes(work) if home.name == name and home.parent != own]
    found, damaged = [], []
    for place in places:
        try:
            one = find_latest(place, name)
        except CheckpointError as error:
            damaged.append(error)
        else:
            if one is not None and (place == directory or not one.path.is_symlink()):
                found.append(one)
    if damaged and not found:
        raise damaged[0]
    return max(found, key=lambda one: one.saved_at, default=None)


def names(directory: Path, work: Path | None) -> list[str]:
    """What ``resume=`` could be, where it is none of these."""
    here = {manifest.parent.parent.name for manifest in directory.glob("*/round-*/manifest.json")}
    return sorted(here | ({home.name for home in kept_homes(work)} if work is not None else set()))
