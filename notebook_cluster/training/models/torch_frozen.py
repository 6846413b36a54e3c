"""The frozen parameters of a torch module, and its buffers that stay where they are (see :mod:`.frozen`)."""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from notebook_cluster.training.models.frozen import PIECE, FrozenTensor
from notebook_cluster.training.models.torch_names import is_distributed_tensor, plain_names

if TYPE_CHECKING:
    import torch

_SAMPLED = 256
"""Elements of a tensor, evenly spread, that are looked at to see whether it is as it was."""


def frozen_tensors(model: "torch.nn.Module") -> Iterator[FrozenTensor]:
    """Each parameter without ``requires_grad``, under every name that it has."""
    named = model.named_parameters(remove_duplicate=False)
    yield from _as_frozen(model, {name: tensor for name, tensor in named if not tensor.requires_grad})


def buffers_to_compare(model: "torch.nn.Module") -> Iterator[FrozenTensor]:
    """Each buffer that no round averages and the ``state_dict`` has, without counters: whole numbers that stand alone.
    A buffer that is not in the ``state_dict`` is a cache, which each node makes for itself."""
    named = own_buffers(model, every_name=True)
    yield from _as_frozen(model, {name: tensor for name, tensor in named.items() if not _counts(tensor)})


def own_buffers(model: "torch.nn.Module", *, every_name: bool = False) -> "dict[str, torch.Tensor]":
    """Those of the ``state_dict`` that no round averages: counters, masks. ``every_name``: a buffer that has several is
    there under each."""
    kept, named = model.state_dict(keep_vars=True), model.named_buffers(remove_duplicate=not every_name)
    return {name: tensor for name, tensor in named if name in kept and not is_averaged(name, tensor)}


def is_averaged(name: str, buffer: "torch.Tensor") -> bool:
    """Whether it is in rounds: running statistics of normalisation layers."""
    return name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()


def _counts(buffer: "torch.Tensor") -> bool:
    return not _unmade(buffer) and buffer.numel() == 1 and not buffer.is_floating_point()


def _as_frozen(model: "torch.nn.Module", named: "dict[str, torch.Tensor]") -> Iterator[FrozenTensor]:
    named = {name: tensor for name, tensor in named.items() if not _unmade(tensor)}
    plain = plain_names(model, list(named))
    for name, tensor in named.items():
        here = not tensor.is_meta and not is_distributed_tensor(tensor)
        yield FrozenTensor(
            plain[name],
            list(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tensor,
            _mark(tensor) if here else None,
            partial(_pieces, tensor) if here else None,
        )


def _unmade(tensor: "torch.Tensor") -> bool:
    from torch.nn.parameter import is_lazy

    return bool(is_lazy(tensor))


def _mark(tensor: "torch.Tensor") -> tuple[Any, ...] | None:
    """Writing through ``tensor.data`` counts no version, so some of the elements are looked at as well."""
    try:
        if not tensor.is_contiguous() or not tensor.numel():
            return None
        flat = tensor.detach().view(-1)
        some = bytes_in(flat[:: max(flat.numel() // _SAMPLED, 1)]).tobytes()
        return tensor.data_ptr(), tensor._version, str(tensor.device), tensor.dtype, tuple(tensor.shape), some
    except (RuntimeError, TypeError, ValueError):
        return None


def bytes_in(tensor: "torch.Tensor") -> Any:
    """A flat array. By way of DLPack, for ``numpy()`` of what lies in a tensor's memory keeps ``resize_()`` from it
    from then on."""
    import numpy
    import torch

    return numpy.from_dlpack(tensor.cpu().contiguous().view(torch.uint8)).reshape(-1)


def _pieces(tensor: "torch.Tensor") -> Iterator[Any]:
    """Some rows at a time: no more is copied of a tensor that does not lie in a row, or not in main memory."""
    if not tensor.numel():
        return
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    size = rows[0].numel() * rows.element_size()
    if size > PIECE and rows.dim() > 1:
        for row in rows:
            yield from _pieces(row)
        return
    step = max(PIECE // max(size, 1), 1)
    for start in range(0, rows.shape[0], step):
        yield bytes_in(rows[start : start + step])
