"""What a model's ``state_dict`` holds that is in no round, for checkpoints: frozen parameters, the other names of tied
ones, buffers such as counters. With it a checkpoint gives the whole ``state_dict`` back (:func:`load_checkpoint`).

Frozen parameters are written once: the next checkpoint has a hard link to the same file as long as they are the same.
A base that is large beside what is trained is left out, and its names are kept: whoever loads the checkpoint has it.
"""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from notebook_cluster.checkpoints import Checkpoint, CheckpointError, find_latest, load
from notebook_cluster.training.checkpointing.optimizer_bytes import extra_in
from notebook_cluster.training.models.parameters import Parameters
from notebook_cluster.training.runtime import current_runtime

FROZEN_FILE = "frozen.safetensors"
OTHER_BUFFERS = "other buffers"
"""Under which name a node's part has them."""

_MOST_FROZEN = 2 << 30
"""Bytes of frozen parameters that are written in any case; beyond them at most four times what is trained."""


class OtherBuffers:
    """Buffers of a model that no round averages, as something with a state."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def state_dict(self) -> dict[str, Any]:
        return self._parameters.other_buffers()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._parameters.put_other_buffers(state)


class StateBeside:
    """For the writer of checkpoints of one sync object. Called on its thread: frozen parameters do not change."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._written: tuple[Path, Any] | None = None

    def metadata(self) -> dict[str, str]:
        """For the file with the parameters: texts, as safetensors wants them."""
        parameters = self._parameters
        frozen = parameters.frozen_arrays()
        about = {
            "framework": parameters.framework,
            "tied": parameters.tied(),
            "dtypes": {name: dtype for name, _, dtype in parameters.layout.schema if dtype != "float32"},
            "frozen": sorted(frozen),
            "frozen_left_out": not self._is_small(frozen),
        }
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}

    def files(self) -> dict[str, Any]:
        """File -> what writes it, given its path."""
        frozen = self._parameters.frozen_arrays()
        return {FROZEN_FILE: self._write} if frozen and self._is_small(frozen) else {}

    def _is_small(self, frozen: Mapping[str, Any]) -> bool:
        return sum(int(array.nbytes) for array in frozen.values()) <= max(
            _MOST_FROZEN, 16 * self._parameters.layout.size
        )

    def _write(self, path: Path) -> None:
        frozen = self._parameters.frozen_arrays()
        marks = self._parameters.marks_of(frozen)
        if self._written is not None and self._written[1] == marks:
            # the folder has been renamed since, and may be gone
            for before in sorted(path.parent.parent.glob(f"round-*/{self._written[0].name}"), reverse=True):
                with contextlib.suppress(OSError):
                    os.link(before, path)
                    return
        self._parameters.save_arrays(frozen, path)
        self._written = (path, marks)


def load_checkpoint(name: str | Path, into: Any = None, *, directory: str | Path | None = None) -> dict[str, Any]:
    """The whole ``state_dict`` of the newest checkpoint ``name``: global parameters, tied ones under each of their
    names, frozen ones, buffers. ``model.load_state_dict(nc.load_checkpoint("digits"))`` takes it.

    Args:
        name: as in ``sync.checkpoint(name)``; or the path of a checkpoint's folder.
        into: a model to put it into, whatever that is wrapped in (DistributedDataParallel, torch.compile, PEFT).
        directory: where checkpoints are; None: ``checkpoints`` below the working directory.

    Returns:
        Name -> torch tensor on the CPU (of a model of MLX: mlx array), each in its dtype.

    Raises:
        CheckpointError: there is none, it is damaged, or ``into`` is another model; names the file or parameter.
    """
    checkpoint = load(_folder_of(name, directory))
    try:
        state, left_out = _whole_state(checkpoint)
    except CheckpointError:
        raise
    except ImportError as error:
        framework = checkpoint.about().get("framework", "torch")
        raise CheckpointError(
            f"{checkpoint.path} is of a model of {framework}, which cannot be loaded here ({error}): pip install it"
        ) from None
    except Exception as error:  # json, safetensors and the frameworks each raise their own
        raise CheckpointError(
            f"{checkpoint.path} is not as it was written ({type(error).__name__}: {error}): copy it back, or delete it "
            "to use the checkpoint before it"
        ) from None
    if into is not None:
        from notebook_cluster.training.models import parameters_of

        try:
            parameters_of(into).put_whole_state(state, left_out)
        except ValueError as error:
            raise CheckpointError(f"checkpoint {checkpoint.path} does not fit this model: {error}") from None
    elif left_out:
        print(
            f"checkpoint {checkpoint.path.parent.name!r} leaves out {len(left_out)} frozen parameters, {left_out[0]!r} "
            "first: they are those of the base that the model was made from. into=model keeps the model's own",
            file=sys.stderr,
        )
    return state


def _whole_state(checkpoint: Checkpoint) -> tuple[dict[str, Any], list[str]]:
    """The ``state_dict``, and the names of frozen parameters that are not in it."""
    about = checkpoint.about()
    framework = about.get("framework", "torch")
    if framework not in ("torch", "mlx"):
        raise CheckpointError(f"{checkpoint.path} is of a model of {framework[:40]!r}: upgrade notebook-cluster")
    state = _as_arrays(checkpoint, framework, json.loads(about.get("dtypes", "{}")))
    left_out = json.loads(about.get("frozen", "[]")) if about.get("frozen_left_out") == "true" else []
    others = [_read_with(framework, checkpoint.path / FROZEN_FILE)] if FROZEN_FILE in checkpoint.manifest.files else []
    for part in checkpoint.parts():
        buffers = extra_in(part, OTHER_BUFFERS)
        if buffers is not None:
            others.append(buffers)
            break
    for more in others:
        for name in sorted(more.keys() & state.keys()):
            raise CheckpointError(f"{checkpoint.path} has {name!r} twice: copy it back, or delete it")
        state |= more
    tied = json.loads(about.get("tied", "{}"))
    return state | {alias: state[own] for alias, own in tied.items() if own in state}, list(left_out)


def _folder_of(name: str | Path, directory: str | Path | None) -> Path:
    path = Path(name)
    if isinstance(name, Path) or len(path.parts) > 1:
        if (path / "manifest.json").exists():
            return path
        home, text = path.parent, path.name
    else:
        home, text = _home(directory), str(name)
    try:
        found = find_latest(home, text)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if found is None:
        there = sorted({one.parent.parent.name for one in home.glob("*/round-*/manifest.json")})
        other = f"there are {', '.join(map(repr, there))}" if there else "there is none"
        elsewhere = "" if directory or _on_a_node() else _ELSEWHERE.format(text)
        raise CheckpointError(f"checkpoint {text!r} was not found in {home.absolute()}: {other}{elsewhere}")
    for warning in found.warnings:
        print(warning, file=sys.stderr)
    return found.path


def _home(directory: str | Path | None) -> Path:
    if directory is not None:
        return Path(directory)
    return current_runtime().checkpoint_directory() if _on_a_node() else Path("checkpoints")


_ELSEWHERE = (
    "; it lies on the machine of the node that saved it: weights = nc.load_checkpoint({!r}) in a cell that begins with "
    "%%on and that node's name, then %pull weights"
)


def _on_a_node() -> bool:
    try:
        current_runtime()
    except RuntimeError:
        return False
    return True


def _as_arrays(checkpoint: Checkpoint, framework: str, dtypes: Mapping[str, str]) -> dict[str, Any]:
    if framework == "mlx":
        import mlx.core as mx

        return {
            name: mx.array(value).astype(getattr(mx, dtypes.get(name, "float32")))
            for name, value in checkpoint.parameters.items()
        }
    import torch

    return {
        name: torch.from_numpy(value).to(getattr(torch, dtypes.get(name, "float32")))
        for name, value in checkpoint.parameters.items()
    }


def _read_with(framework: str, path: Path) -> dict[str, Any]:
    if framework == "mlx":
        import mlx.core as mx

        loaded: Any = mx.load(str(path))
        return dict(loaded)
    from safetensors.torch import load_file

    return dict(load_file(path))
