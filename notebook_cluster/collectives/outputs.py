"""``out=``: memory of the caller for a result."""

from typing import TYPE_CHECKING, Any

from notebook_cluster.collectives.values import Wire, carrier, describe, from_wire, library_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Output:
    """``out`` of one operation whose result is like its array ``wire``.

    Attributes:
        memory: of ``out``, flat, in the carrier dtype, where a result can be written straight into it: it may be the
            memory of ``wire``, but does not overlap with it in part. None: the result is copied there.

    Raises:
        TypeError: ``out`` is nothing that a result can be written to.
        ValueError: it has another library, dtype or shape than the array, or is read-only.
    """

    def __init__(self, out: Any, wire: Wire, operation: str) -> None:
        import numpy

        if not wire.is_array:
            raise TypeError(f"{operation}: out= takes the result of an array: leave it out for {wire.describe()}")
        kind = library_of(out)
        if kind not in ("numpy", "torch") or isinstance(out, numpy.generic):
            raise TypeError(
                f"{operation}: out cannot be a {type(out).__name__}, which is not written to: pass a numpy array or a "
                "torch tensor, or take what is returned"
            )
        dtype = str(out.dtype).removeprefix("torch.") if kind == "torch" else out.dtype.name
        if (kind, dtype, tuple(out.shape)) != (wire.kind, wire.dtype, wire.shape):
            raise ValueError(
                f"{operation}: out is {kind} {describe(kind, dtype, tuple(out.shape))}, the array {wire.kind} "
                f"{wire.describe()}: they must be alike"
            )
        if kind == "numpy" and not out.flags.writeable:
            raise ValueError(f"{operation}: out is a read-only array: pass a copy of it")
        self._out = out
        self._wire = wire
        self.memory: NDArray[Any] | None = None
        flat = _memory(out, dtype, kind)
        if flat is not None and (_begin(flat) == _begin(wire.data) or not numpy.may_share_memory(flat, wire.data)):
            self.memory = flat

    def take(self, flat: "NDArray[Any]") -> Any:
        """``out``, with the result ``flat``, in the carrier dtype."""
        wire = self._wire
        if wire.kind == "numpy":
            if flat is not self.memory:
                self._out[...] = from_wire(wire.kind, wire.dtype, wire.shape, flat)
            return self._out
        import torch

        with torch.no_grad():
            if flat is not self.memory:
                self._out.copy_(from_wire(wire.kind, wire.dtype, wire.shape, flat, self._out))
            elif not self._out.is_inference():
                torch.autograd.graph.increment_version(self._out)  # autograd did not see that it was written to
        return self._out


def _memory(out: Any, dtype: str, kind: str) -> "NDArray[Any] | None":
    """The memory of ``out`` itself, if its elements lie there one after the other as they travel."""
    flat: NDArray[Any] | None = None
    if kind == "torch":
        if out.device.type == "cpu" and out.is_contiguous() and not out.is_conj() and not out.is_neg():
            import torch

            flat = out.detach().reshape(-1).view(getattr(torch, carrier(dtype))).numpy()
    elif out.flags.c_contiguous and out.dtype.isnative:
        import numpy

        flat = numpy.asarray(out).reshape(-1).view(carrier(dtype))
    return flat


def _begin(flat: "NDArray[Any]") -> int:
    return int(flat.ctypes.data)
