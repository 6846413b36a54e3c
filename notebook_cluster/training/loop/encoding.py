"""A contribution encoded: on the host, at once or on a thread of its own while training goes on, or on the model's GPU.

Where the GPU encodes, encoded bytes cross to the host, not the model. The bytes are those that the host would make
(:func:`notebook_cluster.codecs.encode_tensor`). What they do not say stays on the GPU too, as the error feedback of the
next round. Between two rounds a GPU holds two more vectors of the model's size in float32 (what the model was loaded
with, error feedback), while a round is open four. Where that leaves it no room, the host encodes.
"""

import math
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from notebook_cluster.codecs import (
    Buffer,
    Memory,
    NotFiniteError,
    Vector,
    WireFormat,
    check_finite,
    encode_tensor,
    has_tensor_form,
)
from notebook_cluster.memory.nameless import file_of
from notebook_cluster.rounds.member.events_effects import Boundary
from notebook_cluster.rounds.member.state import MemberSettings
from notebook_cluster.rounds.numerics import vectors
from notebook_cluster.rounds.numerics.fragments import Fragments
from notebook_cluster.rounds.numerics.outer import CHUNK
from notebook_cluster.training.loop.reference import Reference
from notebook_cluster.training.models.parameters import Parameters
from notebook_cluster.training.models.torch_parameters import TorchParameters


class EncodingThread:
    """Makes one contribution at a time on a thread of its own. Main thread only."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, make: Callable[[], Boundary], hand_over: Callable[[Boundary], None]) -> None:
        """``hand_over(make())`` on the thread. The one before has been handed over."""
        self.wait()

        def run() -> None:
            try:
                hand_over(make())
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="encode", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what was begun is handed over: what the caller posts next comes after it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def error(self) -> Exception | None:
        """Why the last contribution could not be made; told once."""
        error, self._error = self._error, None
        return error


LATER_FROM = MemberSettings().in_place_from
"""Elements of a model from which on, as its next state, the error feedback is not kept aside while a round is open: it
is computed when the round is applied, in a second pass over the work."""


def encoded(
    wire: WireFormat,
    reference: Callable[[slice], Vector],
    local: Callable[[slice], Vector],
    feedback: Vector | None,
    beta: np.float32,
    keep_left: bool = True,
    memory: Memory = vectors.bytes_of,
) -> tuple[Buffer, Vector | None, float]:
    """``a = reference - local + beta * feedback`` as bytes, what of it they do not say (of a lossy codec, and unless
    :func:`left_by` is to compute it later), and the norm of ``reference - local``: what is fed back grows with the
    rounds that a node has been in. A group of blocks at a time, while its elements are in the cache; as float32 it is
    computed where it is sent from, in ``memory`` (of so many bytes). ``reference`` and ``local`` give the elements of a
    range, at most CHUNK.

    Raises:
        NotFiniteError: a value is NaN or infinite.
    """
    encoded, squares = memory(wire.size), 0.0
    exact = wire.is_float32
    left = encoded.view("<f4") if exact else vectors.empty(wire.count if keep_left else wire.encoded_at_a_time)
    scratch = np.empty(CHUNK, np.float32)
    for group in wire.groups(elements=wire.encoded_at_a_time):
        first, end = group.elements.start, group.elements.stop
        values = left[group.elements] if exact or keep_left else left[: end - first]
        for start in range(first, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            work = values[part.start - first : part.stop - first]
            with np.errstate(all="ignore"):  # a diverged model is told when it is encoded
                np.subtract(reference(part), local(part), out=work)
                square = float(np.dot(work, work))
                if feedback is not None:
                    work += _times(feedback[part], beta, scratch)
            squares += square
            if exact and not (feedback is None and math.isfinite(square)):
                check_finite(work, start)
        if not exact:
            encode = wire.encode_from if keep_left or wire.keeps_some(group) else wire.encode
            encoded[group.bytes] = encode(values, group.first, group.end)
    encoded.flags.writeable = False
    return encoded.data, left if keep_left and not exact else None, math.sqrt(squares)


def left_by(
    wire: WireFormat,
    data: Buffer,
    reference: Callable[[slice], Vector],
    local: Callable[[slice], Vector],
    feedback: Vector | None,
    beta: np.float32,
    out: Vector,
) -> None:
    """What ``data`` do not say, bit for bit as :func:`encoded`, which made them of the other arguments, would have
    returned it. ``out`` may be ``feedback``."""
    scratch, view = np.empty((2, CHUNK), np.float32), memoryview(data)
    for group in wire.groups(elements=wire.encoded_at_a_time):
        said = wire.decode(view[group.bytes], group.first, group.end)
        first, end = group.elements.start, group.elements.stop
        for start in range(first, end, CHUNK):
            part = slice(start, min(start + CHUNK, end))
            work, fed_back = scratch[:, : part.stop - part.start]
            np.subtract(reference(part), local(part), out=work)
            if feedback is not None:
                work += _times(feedback[part], beta, fed_back)
            np.subtract(work, said[part.start - first : part.stop - first], out=out[part])


def _times(feedback: Vector, beta: np.float32, scratch: Vector) -> Vector:
    return feedback if beta == 1 else np.multiply(feedback, beta, out=scratch[: feedback.size])


if TYPE_CHECKING:
    import torch

KINDS = ("cuda",)
"""Types of torch devices that encode; ROCm calls its own so."""

_VECTORS = 6
"""Vectors of the model's size in float32, at most, that are needed at once."""


class Encoded(NamedTuple):
    """``data``: the bytes; ``left``: what they do not say; ``norm``: of what was to be said, without what is fed back;
    ``local``: the elements of the fragment in the model (of gradients nothing). Tensors are flat float32 on the model's
    device."""

    data: Buffer
    left: "torch.Tensor"
    norm: float
    local: "torch.Tensor | None" = None


class DeviceEncoder:
    """Encodes for one model, as long as that works.

    Its methods return None where the host has to do it: the model is not on one GPU, the codec has no form for it, a
    value is not finite, or there is no room.
    """

    def __init__(self, parameters: TorchParameters) -> None:
        self._parameters = parameters
        self._failed = False

    def encode(
        self,
        wire: WireFormat,
        fragments: Fragments,
        fragment: int,
        reference: Reference,
        feedback: Any,
        beta: np.float32,
    ) -> Encoded | None:
        """``a = reference - model + beta * feedback`` of the elements of ``fragment``.

        Args:
            wire: how they are encoded.
            reference: what the model was loaded with.
            feedback: ``left`` of this fragment's round before, or its vector on the host, or None.
        """
        return self._encoded(wire, lambda: self._work(fragments, fragment, reference), feedback, beta)

    def encode_gradients(self, wire: WireFormat, steps: int, error: Any) -> Encoded | None:
        """The mean gradient of so many ``steps``, with the buffers' values behind it, and ``error`` added: ``left`` of
        the round before, or its vector on the host, or None."""
        return self._encoded(wire, lambda: (self._gradients(wire, steps), None), error)

    def _encoded(
        self,
        wire: WireFormat,
        make: "Callable[[], tuple[torch.Tensor, torch.Tensor | None]]",
        feedback: Any,
        beta: np.float32 | None = None,
    ) -> Encoded | None:
        """``make``: gives what to encode, and the elements that it was made from; ``feedback`` is added, times
        ``beta``."""
        import torch

        device = self._device(wire)
        if device is None:
            self._parameters.keep_loaded(False)
            return None
        try:
            with torch.no_grad():
                work, local = make()
                norm = float(torch.linalg.vector_norm(work, dtype=torch.float64))
                if feedback is not None:
                    fed_back = torch.as_tensor(feedback, device=work.device)
                    work += fed_back if beta is None else fed_back * float(beta)
                return Encoded(encode_tensor(wire, work), work, norm, local)
        except NotFiniteError:
            return None
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self._failed = True
            self._parameters.keep_loaded(False)
            text = f"contributions are encoded on the host from now on, because {device} could not: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return None

    def _device(self, wire: WireFormat) -> "torch.device | None":
        """Where to encode. Asked at every step of data-parallel training: what is known at once comes first."""
        if self._failed or not has_tensor_form(wire.codec):
            return None
        device = self._parameters.device()
        if device is None or device.type not in KINDS or not _has_room(device, self._parameters.layout.size):
            return None
        return device

    def _work(self, fragments: Fragments, fragment: int, reference: Reference) -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        parameters = self._parameters
        parameters.keep_loaded(parameters.exact)
        local, kept = parameters.values(), reference.with_work.get(fragment)
        base = parameters.held_on_device(reference.theta) if kept is None else parameters.on_device(kept)
        if fragments.count > 1:
            ranges = fragments.ranges(fragment)
            local = torch.cat([local[part] for part in ranges])
            base = base if kept is not None else torch.cat([base[part] for part in ranges])
        return torch.sub(base, local), local

    def _gradients(self, wire: WireFormat, steps: int) -> "torch.Tensor":
        import torch

        values = self._parameters.gradient_values()
        # by a number torch may multiply with its reciprocal
        values[: wire.parameters] /= torch.full((1,), float(steps), device=values.device)
        return values


def encoder_of(parameters: Parameters) -> DeviceEncoder | None:
    """For a torch model; None for others."""
    return DeviceEncoder(parameters) if isinstance(parameters, TorchParameters) else None


def on_host(vector: Any) -> Vector:
    """A vector that may be a tensor on another device."""
    if isinstance(vector, np.ndarray):
        return vector
    values: Vector = vector.cpu().numpy()
    return values


def kept_beside(theta: Vector, feedback: Any) -> Any:
    """Error feedback that was computed in memory, in a file where ``theta`` is in one."""
    if not isinstance(feedback, np.ndarray) or file_of(theta) is None or file_of(feedback) is not None:
        return feedback
    kept = vectors.like(theta, feedback.size)
    kept[...] = feedback
    return kept


def _has_room(device: "torch.device", elements: int) -> bool:
    """Whether as much stays free as is taken."""
    import torch

    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * _VECTORS * 4 * elements <= free
