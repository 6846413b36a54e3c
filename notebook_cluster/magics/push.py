"""``%push``: plain data, numpy arrays and torch tensors of the notebook as variables on the nodes.

Values travel inside cells of their own: JSON for plain data, base64 of the raw bytes for arrays. No pickle, in either
direction. :func:`take_piece` and :func:`finish` are what those cells call on the node.
"""

import base64
import json
import sys
import uuid
from collections.abc import Iterator
from typing import Any

from notebook_cluster.magics.errors import UsageError

MOST_BYTES = 64 * 1024 * 1024
PIECE_BYTES = 3 * 1024 * 1024
"""Raw bytes in one cell: 4 MiB as base64, half of what one message may have."""
MOST_REPLAYED = 1024 * 1024
"""Characters of a ``%push`` that goes into the cluster's cell log, for nodes that restart or join later."""
_ON_NODE = '__import__("notebook_cluster.magics.push", fromlist=["push"])'
_pieces: dict[str, bytearray] = {}


def push_sources(name: str, value: Any) -> Iterator[str]:
    """Cells that make ``value`` the variable ``name`` on a node when they run there in order.

    Raises:
        UsageError: not plain data, numpy or torch; or more than 64 MB. Says what to do instead.
    """
    header, data = _pack(name, value)
    if len(data) > MOST_BYTES:
        raise UsageError(_too_large(name, len(data)))
    key = uuid.uuid4().hex
    for start in range(0, len(data), PIECE_BYTES):
        piece = base64.b64encode(data[start : start + PIECE_BYTES]).decode("ascii")
        yield f'{_ON_NODE}.take_piece("{key}", {start}, "{piece}")'
    yield f'{name} = {_ON_NODE}.finish("{key}", {len(data)}, {json.dumps(header)!r})'


def take_piece(key: str, start: int, text: str) -> None:
    """On a node: the bytes of value ``key`` from ``start`` on."""
    if start == 0:
        _pieces.clear()
    held = _pieces.setdefault(key, bytearray())
    if len(held) != start:
        raise ValueError(f"%push: bytes from {start} came when {len(held)} were there: push the variable again")
    held += base64.b64decode(text)


def finish(key: str, size: int, header_text: str) -> Any:
    """On a node: the value whose bytes are all there."""
    data = _pieces.pop(key, bytearray())
    if len(data) != size:
        raise ValueError(f"%push: {len(data)} of {size} bytes came: push the variable again")
    header = json.loads(header_text)
    if header["kind"] == "plain":
        return _from_plain(json.loads(data))
    if header["kind"] == "torch":
        import torch

        dtype = getattr(torch, header["dtype"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(header["shape"])
    import numpy

    array = numpy.frombuffer(data, dtype=numpy.dtype(header["dtype"])).reshape(header["shape"])
    return array[()] if header["kind"] == "numpy scalar" else array


def _pack(name: str, value: Any) -> tuple[dict[str, Any], bytes]:
    """What kind of value it is, and its bytes."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _pack_tensor(name, value, torch)
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        return _pack_array(name, value, numpy)
    try:
        return {"kind": "plain"}, json.dumps(_to_plain(name, value), separators=(",", ":")).encode()
    except RecursionError:
        raise UsageError(f"cannot push {name!r}: it is nested too deeply or holds itself") from None


def _pack_tensor(name: str, value: Any, torch: Any) -> tuple[dict[str, Any], bytes]:
    if value.layout is not torch.strided or value.is_quantized:
        raise UsageError(f"cannot push {name!r}: a sparse or quantized tensor; push {name}.to_dense() or make it there")
    _check_size(name, value.numel() * value.element_size())
    flat = value.detach().cpu().contiguous().reshape(-1)
    header = {"kind": "torch", "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    return header, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _pack_array(name: str, value: Any, numpy: Any) -> tuple[dict[str, Any], bytes]:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise UsageError(
            f"cannot push {name!r}: an array of {value.dtype}; only arrays of plain numbers and text travel"
        )
    _check_size(name, value.nbytes)
    kind = "numpy" if isinstance(value, numpy.ndarray) else "numpy scalar"
    return {"kind": kind, "dtype": value.dtype.str, "shape": list(value.shape)}, value.tobytes()


def _check_size(name: str, size: int) -> None:
    """Before anything is copied."""
    if size > MOST_BYTES:
        raise UsageError(_too_large(name, size))


def _too_large(name: str, size: int) -> str:
    return f"{name!r} has {size / 1e6:,.0f} MB, %push sends at most 64 MiB: make it on the nodes, in a %%on_all cell"


def _to_plain(name: str, value: Any) -> Any:
    """JSON values; what JSON lacks becomes ``{"#": type, "=": content}``."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_to_plain(name, item) for item in value]
    if kind is dict:
        return {"#": "dict", "=": [[_to_plain(name, key), _to_plain(name, item)] for key, item in value.items()]}
    if kind in (tuple, set, frozenset):
        return {"#": kind.__name__, "=": [_to_plain(name, item) for item in value]}
    if kind is bytes:
        return {"#": "bytes", "=": base64.b64encode(value).decode("ascii")}
    if kind is complex:
        return {"#": "complex", "=": [value.real, value.imag]}
    raise UsageError(
        f"cannot push {name!r}: {kind.__qualname__} is not plain data, a numpy array or a torch tensor; "
        "make it on the nodes, in a %%on_all cell"
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = value["#"], value["="]
    if kind == "dict":
        return {_from_plain(key): _from_plain(item) for key, item in content}
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "complex":
        return complex(*content)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_from_plain(item) for item in content)
