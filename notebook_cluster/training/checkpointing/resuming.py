"""Where a job begins on this node: the state it holds, a checkpoint, or the model as it is."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from msgspec import structs

from notebook_cluster.checkpoints import Checkpoint, CheckpointError, FoundCheckpoint, find_newest, load, names
from notebook_cluster.checkpoints.kept import find_taken
from notebook_cluster.codecs import Vector
from notebook_cluster.memory import amount
from notebook_cluster.protocol.kept import TakenState
from notebook_cluster.protocol.names import is_name
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.momentum import (
    FLOAT32,
    MEAN,
    MOMENTUM_DTYPES,
    NOT_KEPT,
    converted,
    kept_as,
    zeros,
)
from notebook_cluster.rounds.numerics.outer import former_state_hash, state_hash
from notebook_cluster.rounds.numerics.vectors import forget, placed
from notebook_cluster.training.checkpointing.optimizer_bytes import has_optimizer
from notebook_cluster.training.models.parameters import Parameters
from notebook_cluster.training.settings.arguments import SERVER, Settings

MOST_NAMES = 20

Momentum = Mapping[str, "np.ndarray[Any, np.dtype[np.float32]]"]
"""Outer momentum by the names of the parameters."""

Resume = str | Momentum | None
"""The name of a checkpoint, or the outer momentum that goes with the parameters which the model has."""


def resume_of(resume: Any) -> tuple[str, Momentum | None]:
    """What ``resume=`` says: the name of a checkpoint, or an outer momentum; the other one is empty.

    Raises:
        ValueError: a string that is not such a name, as the path of a checkpoint.
        TypeError: neither of them, as True.
    """
    way_out = "it takes the NAME that sync.checkpoint(NAME) was given"
    if isinstance(resume, str | PurePath):
        if is_name(name := str(resume)):
            return name, None
        parts = [part for part in PurePath(name).parts if part != "checkpoints" and not part.startswith("round-")]
        write = f": write resume={parts[-1]!r}" if parts and is_name(parts[-1]) else ""
        raise ValueError(f"resume={name!r} is not the name of a checkpoint ({way_out}){write}")
    if resume is not None and not (isinstance(resume, Mapping) and all(isinstance(name, str) for name in resume)):
        again = "; a cell that is run again goes on by itself, without resume="
        raise TypeError(f"resume= is a {type(resume).__name__} and not the name of a checkpoint: {way_out}{again}")
    return "", resume


@dataclass(frozen=True)
class Start:
    """A state that a node could begin from."""

    round: int
    theta: Vector
    momentum: Vector
    state_hash: str
    held: bool = False
    checkpoint: Checkpoint | None = None
    """Where it was read from (without its arrays)."""
    manifest_hash: str = ""
    warnings: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    """Checkpoints that are here, where the one that is wanted is not."""
    frozen: str = ""
    """What was not trained then, see :func:`.frozen.frozen_name`; empty: that is not known."""
    keeps: str = ""
    """Of a state that is held: see :attr:`.fragments.Fragments.keeps`."""


def start_of(
    parameters: Parameters,
    directory: Path,
    resume: str,
    fragments: Fragments,
    work: Path | None = None,
    taken: TakenState | None = None,
) -> Start:
    """The newest checkpoint called ``resume`` under ``directory`` if there is one, or of what was kept below ``work``;
    of it exactly the one that the cluster has ``taken`` over; else the model's own values.

    Raises:
        CheckpointError: checkpoints are there but none is whole, or it is of another model.
    """
    if taken is not None:
        found = find_taken(directory, taken)
    else:
        found = find_newest(directory, resume, work) if resume else None
    if found is None:
        theta = parameters.read()
        momentum, others = zeros(theta.size, fragments.momentum_dtype), names(directory, work) if resume else ()
        return Start(0, theta, momentum, state_hash(theta, momentum), names=tuple(others[:MOST_NAMES]))
    checkpoint = load(found.path)
    where = f"checkpoint {found.path}"
    try:
        theta = parameters.layout.vector(checkpoint.parameters, where)
        momentum = parameters.layout.vector(checkpoint.momentum, where) if checkpoint.momentum else zeros(0, NOT_KEPT)
    except ValueError as error:
        way_out = (
            f"where other parameters of it are frozen now, nc.load_checkpoint({resume!r}, into=model) and no resume="
        )
        raise CheckpointError(f"{error}; {way_out}") from None
    saved_as = _saved_as(theta, momentum, checkpoint.manifest.state_hash)
    if saved_as is None:
        raise CheckpointError(f"{where} does not have the state hash in its manifest: delete it to use the one before")
    is_mean = not saved_as.elements and not fragments.advances
    if is_mean or _has_no_outer_momentum(checkpoint.manifest.settings):
        momentum, saved_as = zeros(0, NOT_KEPT), _SavedAs(theta.size, NOT_KEPT)
    momentum, wanted = converted(momentum, fragments.momentum_dtype, theta.size), fragments.momentum_dtype
    hash = state_hash(theta[: saved_as.elements], momentum)
    line = []
    if saved_as.momentum not in (wanted, NOT_KEPT) and momentum.any():
        line.append(_converted(f"the outer momentum of {where}", saved_as.momentum, wanted))
    manifest = structs.replace(checkpoint.manifest, state_hash=hash)
    return Start(
        found.round,
        theta,
        momentum,
        hash,
        checkpoint=replace(checkpoint, manifest=manifest, parameters={}, momentum={}),
        manifest_hash=found.manifest_hash,
        warnings=(*found.warnings, *_elsewhere(found, directory), *line),
        frozen=str(checkpoint.manifest.settings.get("frozen") or ""),
    )


def kept_otherwise(start: Start, fragments: Fragments) -> Start:
    """``start``, which is held here, as ``fragments`` keep it, with a line where numbers are rounded. The mean of
    gradients is no outer momentum: that begins at zero."""
    if start.keeps == MEAN and not fragments.advances:
        momentum = zeros(start.theta.size, fragments.momentum_dtype)
        return replace(start, momentum=momentum, state_hash=state_hash(start.theta, momentum))
    before, momentum_dtype = kept_as(start.momentum), fragments.momentum_dtype
    if before == momentum_dtype:
        return start
    momentum = converted(start.momentum, momentum_dtype, start.theta.size)
    line = _converted("the outer momentum that was held here", before, momentum_dtype)
    lines, hash = () if NOT_KEPT in (before, momentum_dtype) else (line,), state_hash(start.theta, momentum)
    return replace(start, momentum=momentum, state_hash=hash, warnings=(*start.warnings, *lines))


def placed_start(start: Start, folder: Path | None) -> Start:
    """``start`` with its vectors in files below ``folder``, or in memory.

    Raises:
        MemoryError: there is no room for them.
    """
    try:
        theta, momentum = placed(start.theta, folder), placed(start.momentum, folder)
    except OSError as error:
        size = amount(start.theta.nbytes + start.momentum.nbytes)
        raise MemoryError(
            f"state='disk': {size} cannot be set aside in {folder}: {error.strerror or error}; free some, or use "
            "state='memory'"
        ) from None
    if folder is not None:
        forget()  # a round would not use memory of the model's size again
    return replace(start, theta=theta, momentum=momentum)


def _has_no_outer_momentum(settings: Settings) -> bool:
    """What a checkpoint of DeMo or of one optimizer for all has in its place, from before protocol 21, is the step that
    was taken last."""
    return settings.get("strategy") == "DeMo" or settings.get("mode") == SERVER


def _converted(what: str, before: str, after: str) -> str:
    how = "rounded to it" if after != FLOAT32 else "exactly, where rounds now round nothing"
    return f"{what} was kept as {before} and goes on as {after}, {how}"


def start_with(parameters: Parameters, momentum: Momentum, momentum_dtype: str = FLOAT32) -> Start:
    """The model's own values with the outer momentum that belongs to them, kept as ``momentum_dtype``.

    Raises:
        CheckpointError: it is of another model.
    """
    theta = parameters.read()
    try:
        given = parameters.layout.vector(dict(momentum), "the outer momentum in resume=")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    vector = converted(given, momentum_dtype, theta.size)
    return Start(0, theta, vector, state_hash(theta, vector))


def _elsewhere(found: FoundCheckpoint, directory: Path) -> list[str]:
    """A line where it is not one of the node's own working directory."""
    if found.path.parent.parent == directory.resolve():
        return []
    when = time.strftime("%-d %b %H:%M", time.localtime(found.saved_at))
    return [f"resumes from {found.path}, kept {when} after round {found.round}"]


@dataclass(frozen=True)
class _SavedAs:
    """``elements`` of theta are in its hash; how its momentum was kept."""

    elements: int
    momentum: str


def _saved_as(theta: Vector, momentum: Vector, hash: str) -> _SavedAs | None:
    """Which state of a checkpoint with this ``momentum``, float32, has this ``hash``: both, or where each node steps
    with its own optimizer the mean of gradients alone. None: none."""
    for elements in (theta.size, 0) if momentum.size else (theta.size,):
        for dtype in MOMENTUM_DTYPES if momentum.size else (NOT_KEPT,):
            kept = converted(momentum, dtype, theta.size)
            if state_hash(theta[:elements], kept) == hash:
                return _SavedAs(elements, dtype)
        if former_state_hash(theta[:elements], momentum) == hash:
            return _SavedAs(elements, FLOAT32)
    return None


def shared_optimizer(checkpoint: Checkpoint, state_hash: str) -> bytes | None:
    """The first part of ``checkpoint`` that has an optimiser's state; empty: none has. None: it is the checkpoint of
    another state than the one with this hash."""
    if checkpoint.manifest.state_hash != state_hash:
        return None
    round = checkpoint.manifest.round
    return next((part for part in checkpoint.parts() if has_optimizer(part, round)), b"")
