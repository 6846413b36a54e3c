"""A contribution encoded on the GPU that the model is on: encoded bytes cross to the host, not the model.

The arithmetic is that of :mod:`notebook_cluster.codecs` in torch, operation by operation, so the bytes are those that
the host would make. What the bytes do not say stays on the GPU too, as the error feedback of the next round.

Between two rounds a GPU holds two more vectors of the model's size in float32 (what the model was loaded with, error
feedback), while a round is open four. Where that leaves it no room, the host encodes.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from notebook_cluster.codecs import Buffer, Codec, NotFiniteError, Vector, WireFormat
from notebook_cluster.codecs.codes import Cast, Int4
from notebook_cluster.codecs.scaled import BlockScaled
from notebook_cluster.codecs.top_k import TopK
from notebook_cluster.training import vectors
from notebook_cluster.training.fragments import Fragments
from notebook_cluster.training.parameters import Parameters
from notebook_cluster.training.torch_parameters import TorchParameters

if TYPE_CHECKING:
    import torch

KINDS = ("cuda",)
"""Types of torch devices that encode; ROCm calls its own so."""

_AT_A_TIME = 4 << 20
"""Elements, at most, encoded in one go."""

_VECTORS = 6
"""Vectors of the model's size in float32, at most, that are needed at once."""


class Encoded(NamedTuple):
    """``data``: the bytes; ``left``: what they do not say; ``norm``: of what was to be said; ``local``: the elements of
    the fragment in the model (of gradients nothing). Tensors are flat float32 on the model's device."""

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
        self, fragments: Fragments, fragment: int, reference: Vector, feedback: Any, beta: np.float32
    ) -> Encoded | None:
        """``a = reference - model + beta * feedback`` of the elements of ``fragment``.

        Args:
            reference: of the whole model.
            feedback: ``left`` of this fragment's round before, or its vector on the host, or None.
        """
        wire = fragments.wires[fragment]
        return self._encoded(wire, lambda: self._work(fragments, fragment, reference, feedback, beta))

    def encode_gradients(self, wire: WireFormat, steps: int, error: Any) -> Encoded | None:
        """The mean gradient of so many ``steps``, with the buffers' values behind it, and ``error`` added: ``left`` of
        the round before, or its vector on the host, or None."""
        return self._encoded(wire, lambda: (self._gradients(wire, steps, error), None))

    def _encoded(
        self, wire: WireFormat, make: "Callable[[], tuple[torch.Tensor, torch.Tensor | None]]"
    ) -> Encoded | None:
        """``make``: gives what to encode, and the elements that it was made from."""
        import torch

        device = self._parameters.device()
        usable = not self._failed and device is not None and device.type in KINDS and _has_form(wire.codec)
        if not usable or not _has_room(device, self._parameters.layout.size):
            self._parameters.keep_loaded(False)
            return None
        try:
            with torch.no_grad():
                work, local = make()
                norm = float(torch.linalg.vector_norm(work, dtype=torch.float64))
                return Encoded(encode(wire, work), work, norm, local)
        except NotFiniteError:
            return None
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            self._failed = True
            self._parameters.keep_loaded(False)
            text = f"contributions are encoded on the host from now on, because {device} could not: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return None

    def _work(
        self, fragments: Fragments, fragment: int, reference: Vector, feedback: Any, beta: np.float32
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        import torch

        parameters = self._parameters
        parameters.keep_loaded(parameters.exact)
        local, base = parameters.values(), parameters.on_device(reference)
        if fragments.count > 1:
            ranges = fragments.ranges(fragment)
            local, base = (torch.cat([whole[part] for part in ranges]) for whole in (local, base))
        work = torch.sub(base, local)
        if feedback is not None:
            work += torch.as_tensor(feedback, device=work.device) * float(beta)
        return work, local

    def _gradients(self, wire: WireFormat, steps: int, error: Any) -> "torch.Tensor":
        import torch

        values = self._parameters.gradient_values()
        # by a number torch may multiply with its reciprocal
        values[: wire.parameters] /= torch.full((1,), float(steps), device=values.device)
        if error is not None:
            values += torch.as_tensor(error, device=values.device)
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


def encode(wire: WireFormat, work: "torch.Tensor") -> Buffer:
    """The bytes of ``work`` (flat float32, ``wire.count`` elements), from which what they say is taken away.

    Raises:
        NotFiniteError: a value is NaN or infinite.
    """
    import torch

    codec, encoded, position = wire.codec, vectors.bytes_of(wire.size), 0
    blocks = wire.parameters // codec.block
    whole, step = work[: blocks * codec.block].view(-1, codec.block), max(1, _AT_A_TIME // codec.block)
    for start in range(0, blocks, step):
        rows = whole[start : start + step]
        records = _largest_of(codec, rows) if isinstance(codec, TopK) else _scaled(codec, rows)
        encoded[position : position + records.size] = records.reshape(-1)
        position += records.size
    if blocks * codec.block < wire.count:
        values = on_host(work[blocks * codec.block :])
        for group in wire.groups(blocks):
            data = wire.encode(values[group.elements], group.first, group.end)
            encoded[position + group.bytes.start : position + group.bytes.stop] = data
            wire.take_out(data, group, values[group.elements])
        work[blocks * codec.block :] = torch.from_numpy(values)
    encoded.flags.writeable = False
    return encoded.data


def _has_form(codec: Codec) -> bool:
    return isinstance(codec, TopK) or (isinstance(codec, BlockScaled) and isinstance(codec.codes, Cast | Int4))


def _has_room(device: "torch.device | None", elements: int) -> bool:
    """Whether as much stays free as is taken."""
    import torch

    if device is None or device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * _VECTORS * 4 * elements <= free


def _largest_of(codec: TopK, rows: "torch.Tensor") -> Any:
    """Records of chunks (n, 4096): the largest are found there, what is left to do with them takes the host no time."""
    import torch

    magnitudes = rows.abs()
    largest = magnitudes.topk(codec.keep, dim=1, sorted=False).values
    if not bool(torch.isfinite(largest).all()):  # NaN counts as larger than any number
        raise NotFiniteError("NaN or infinity among the parameters")
    threshold = largest.amin(dim=1, keepdim=True)
    chosen, tied = magnitudes > threshold, magnitudes == threshold
    missing = codec.keep - chosen.sum(dim=1, keepdim=True)
    chosen |= tied & (tied.cumsum(dim=1, dtype=torch.int16) <= missing)  # of equal ones the first
    indices = chosen.nonzero()[:, 1].view(-1, codec.keep)
    kept = rows.gather(1, indices)
    records = np.empty((len(rows), codec.size(codec.block)), np.uint8)
    codec.write_kept(indices.cpu().numpy(), kept.cpu().numpy(), records)
    _, said = codec.entries(records.reshape(-1).data, rows.numel())
    kept -= torch.from_numpy(said.reshape(-1, codec.keep)).to(rows.device)
    rows.scatter_(1, indices, kept)
    return records


def _scaled(codec: Any, rows: "torch.Tensor") -> Any:
    """Records of blocks (n, 256): see :mod:`notebook_cluster.codecs.scaled`."""
    import torch

    codes = codec.codes
    absmax = rows.abs().amax(dim=1, keepdim=True)
    if not bool(torch.isfinite(absmax).all()):
        raise NotFiniteError("NaN or infinity among the parameters")
    largest = torch.full_like(absmax, codes.largest)  # by a number torch may multiply with its reciprocal
    scale = (absmax / largest).clamp_(max=float(codec.largest_scale))
    empty = scale < float(codes.smallest_scale)
    scale[empty] = 0
    absmax[empty] = torch.inf  # codes become 0
    scaled = rows * (largest / absmax)
    if isinstance(codes, Int4):
        pairs = (scaled.round_() + 8).to(torch.uint8)
        data = pairs[:, 0::2] | (pairs[:, 1::2] << 4)
        said = pairs.to(torch.float32) - 8
    else:
        data = scaled.round_().to(torch.int8) if codes.code.kind == "i" else scaled.to(torch.float16)
        said = data.to(torch.float32)
    rows -= said * scale
    records = np.empty((len(rows), codec.size(codec.block)), np.uint8)
    records[:, :4] = scale.cpu().numpy().view(np.uint8)
    records[:, 4:] = data.view(torch.uint8).cpu().numpy()
    return records
