"""One way to get items and batches out of the many kinds of data that ``nc.shard`` takes."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import PureWindowsPath
from typing import TYPE_CHECKING, Any

from notebook_cluster.node.data.stream_readers import BatchMaker, columns
from notebook_cluster.node.data.streams import hash_of_item, is_hugging_face

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[Any]

_LOOKED_AT = 16
"""Elements of each part by which an order is told, as far from each other as they can be."""
_LONGEST_PATH = 4096
_WHOLE = re.compile(r"(torch\.|mlx\.core\.)?(u?int\d+|bool_?)")
"""dtypes whose numbers are the same to the bit on all machines."""
_ORDER = "order "
_NOT_DIVIDED = "so it cannot be divided: pass a map-style Dataset, a list or arrays"


class ShardSource:
    """``count`` items; ``item(index)`` is one of them, ``batch(indices)`` several.

    Raises:
        TypeError: ``data`` cannot be divided. ValueError: it is empty, or its arrays differ in length.
    """

    def __init__(self, data: Any) -> None:
        self.item: Callable[[int], Any]
        self.batch: Callable[[Indices], Any]
        if is_torch(data, "TensorDataset"):
            data = tuple(data.tensors)
        if isinstance(data, tuple) and data and all(is_array(part) for part in data):
            lengths = [len(part) for part in data]
            if len(set(lengths)) > 1:
                raise ValueError(f"shard: the arrays have different lengths {lengths}: they must belong together")
            self.count = lengths[0]
            self.item = lambda index: tuple(part[index] for part in data)
            self.batch = lambda indices: tuple(_take(part, indices) for part in data)
        elif is_array(data):
            self.count = len(data)
            self.item = lambda index: data[index]
            self.batch = lambda indices: _take(data, indices)
        else:
            _check_sequence(data)
            self.count = len(data)
            self.item = lambda index: data[index]
            self.batch = lambda indices: _batch(data, indices.tolist())
        if not self.count:
            raise ValueError("shard: the data is empty")


def is_torch(data: Any, name: str) -> bool:
    """Whether ``data`` is a torch.utils.data class of this name, without importing torch."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(data, getattr(module, name))


def order_of(data: Any) -> str:
    """Equal on nodes whose ``data`` has the same elements in the same order, as far as that is told by what is the same
    to the bit wherever it is: indices of a ``Subset`` (of ``random_split`` and the like), whole numbers, classes, names
    and texts. Empty where there is nothing of the kind."""
    parts = list(_told(data))
    return f"{_ORDER}{hash_of_item(parts)}" if parts else ""


def is_order(line: str) -> bool:
    """Whether it was said by :func:`order_of`."""
    return line.startswith(_ORDER)


def _told(data: Any) -> Iterator[Any]:
    if is_torch(data, "Subset"):
        yield from _told(data.indices)
        yield from _told(data.dataset)
    elif is_torch(data, "TensorDataset"):
        yield from _told(tuple(data.tensors))
    elif is_array(data):
        if _WHOLE.fullmatch(str(data.dtype)):
            yield [number for index in spread(len(data)) for number in few_of(data[index].reshape(-1)).tolist()]
    elif isinstance(data, tuple) and all(map(is_array, data)):
        for part in data:
            yield from _told(part)
    elif isinstance(data, list | tuple | range):
        if some := [one for index in spread(len(data)) for one in _plain(data[index])]:
            yield some
    elif any(kind.__module__.partition(".")[0] == "datasets" for kind in type(data).__mro__) and _has_columns(data):
        rows = data.with_format("arrow")[spread(len(data))]  # nothing is decoded
        for name in sorted(rows.column_names):
            if some := list(_plain(rows[name].to_pylist())):
                yield some
    else:  # of torchvision's the targets, of a class of one's own what it has for each element; nothing is computed
        for name, held in sorted(getattr(data, "__dict__", {}).items()):
            if (isinstance(held, list | tuple) or is_array(held)) and (name == "targets" or len(held) == _length(data)):
                yield from _told(held)


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        return -1


def _plain(item: Any) -> Iterator[str | int]:
    """The whole numbers and texts of an item, of a path the name: it lies elsewhere on each machine."""
    if isinstance(item, str):
        yield PureWindowsPath(item).name if len(item) < _LONGEST_PATH else item
    elif isinstance(item, int):
        yield item
    elif isinstance(item, dict):
        for name in sorted(item, key=str):
            yield from _plain(item[name])
    elif isinstance(item, list | tuple):
        for one in item[:_LOOKED_AT]:
            yield from _plain(one)


def few_of(row: Any) -> Any:
    return row[:: max(1, row.shape[0] // _LOOKED_AT)]


def spread(count: int) -> list[int]:
    """Up to ``_LOOKED_AT`` of so many positions: the first, the last, and some between."""
    looked_at = min(count, _LOOKED_AT)
    return [number * (count - 1) // max(1, looked_at - 1) for number in range(looked_at)]


def loader_batches(loader: Any, batches: "Iterator[Indices]") -> Iterator[Any]:
    """The DataLoader's own machinery (workers, collate_fn, pinned memory) over our batches."""
    from torch.utils.data import DataLoader

    class Batches:
        def __iter__(self) -> Iterator[list[int]]:
            return (batch.tolist() for batch in batches)

    workers = {"prefetch_factor": loader.prefetch_factor} if loader.num_workers else {}
    ours: Any = DataLoader(
        loader.dataset,
        batch_sampler=Batches(),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        **workers,
    )
    yield from ours


def loader_reads(loader: Any, reader: Any) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Answers of ``reader`` to requests, in one worker of the DataLoader's; without workers here."""
    if loader is None or not loader.num_workers:
        return lambda requests: (_pinned(reader[request], loader) for request in requests)

    def reads(requests: Iterator[Any]) -> Iterator[Any]:
        from torch.utils.data import DataLoader

        class Requests:
            def __iter__(self) -> Iterator[Any]:
                return requests

        ours: Any = DataLoader(
            reader,
            sampler=Requests(),
            batch_size=None,
            num_workers=1,
            collate_fn=_as_it_is,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
        )
        for answer in ours:
            yield _pinned(answer, loader)

    return reads


def _as_it_is(answer: Any) -> Any:
    return answer


def _pinned(answer: Any, loader: Any) -> Any:
    if loader is None or not loader.pin_memory:
        return answer
    import torch

    return replace(answer, batch=_pin(answer.batch)) if torch.cuda.is_available() else answer


def _pin(batch: Any) -> Any:
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {name: _pin(value) for name, value in batch.items()}
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(map(_pin, batch))
    return batch


def batch_maker(data: Any, loader: Any, batch_size: int | None) -> BatchMaker:
    """What makes a batch of a stream's items."""
    if loader is not None:
        return BatchMaker(loader.collate_fn, batch_size is None)
    if batch_size is None:
        return BatchMaker(None, True)
    if is_hugging_face(data):
        return BatchMaker(columns, False)
    if is_torch(data, "IterableDataset"):
        from torch.utils.data import default_collate

        return BatchMaker(default_collate, False)
    return BatchMaker(None, False)


def loader_batch_size(loader: Any, batch_size: int | None) -> int | None:
    """``batch_size``, or the loader's own when that is None.

    Raises:
        ValueError: the loader has neither, since its batch_sampler makes its batches.
    """
    if batch_size is None and loader.batch_size is None and loader.batch_sampler is not None:
        raise ValueError(
            f"shard: a {type(loader.batch_sampler).__name__} makes the batches of this DataLoader, and does not "
            "divide them between nodes: pass batch_size= to shard"
        )
    return loader.batch_size if batch_size is None else batch_size


def _check_sequence(data: Any) -> None:
    if isinstance(data, dict):
        named = [f"data[{name!r}]" for name, part in data.items() if is_array(part) or isinstance(part, list)]
        lists = "list(zip" if any(isinstance(part, list) for part in data.values()) else ""
        columns = f"{lists}({', '.join(named)}){')' * bool(lists)}"
        one = columns if len(named) > 1 else f"data[{next(iter(data), '...')!r}]"
        raise TypeError(f"shard: a {type(data).__name__} is indexed by keys, {_NOT_DIVIDED}, for example {one}")
    if isinstance(data, list) and _belong_together(data):
        raise TypeError(
            f"shard: a list of {len(data)} arrays is {len(data)} items. For {len(data[0])} items with an element of "
            "each array pass a tuple, as in nc.shard((x, y))"
        )
    if isinstance(data, tuple):
        _check_labels(data)
    if isinstance(data, tuple) and (place := _list_among_columns(data)) is not None:
        raise TypeError(
            f"shard: part {place} of the tuple is a {type(data[place]).__name__}, and a tuple of arrays or tensors is "
            "divided by their rows: pass np.asarray() or torch.tensor() of it, or list(zip(x, y)) for a list of items"
        )
    if hasattr(data, "iloc"):
        raise TypeError(
            f"shard: a {type(data).__name__} is indexed by labels, not by position: pass data.to_numpy(), or a tuple "
            "of its columns as arrays"
        )
    if isinstance(data, type):
        raise TypeError(f"shard: {data.__name__} is a class: pass one of its objects")
    if isinstance(data, (str, bytes)):
        raise TypeError(f"shard: a {type(data).__name__} is one item, {_NOT_DIVIDED}")
    lacks = {"__len__": "no length", "__getitem__": "no [index]"}
    if missing := " and ".join(what for method, what in lacks.items() if not hasattr(data, method)):
        raise TypeError(f"shard: a {type(data).__name__} has {missing}, {_NOT_DIVIDED}")


def _check_labels(parts: tuple[Any, ...]) -> None:
    """Of dicts alone each is an item."""
    dicts = [isinstance(part, dict) for part in parts]
    for place, part in enumerate(parts):
        if hasattr(part, "iloc") or (dicts[place] and not all(dicts)):
            way = (
                "the arrays in it as parts of their own, as in (x, y['label'])" if dicts[place] else ".to_numpy() of it"
            )
            raise TypeError(
                f"shard: part {place} of the tuple is a {type(part).__name__}, which is indexed by labels, not by "
                f"position: pass {way}"
            )


def _belong_together(parts: list[Any]) -> bool:
    """Arrays with as many elements each, which are unlike: no batch has them as its items."""
    if len(parts) < 2 or not all(map(is_array, parts)):
        return False
    return len(parts[0]) > 1 and len({len(part) for part in parts}) == 1 and len({part.shape for part in parts}) > 1


def _list_among_columns(parts: tuple[Any, ...]) -> int | None:
    """The place of the first list where some parts are arrays, or all are as long and longer than there are parts:
    nobody means so few items."""
    lists = [place for place, part in enumerate(parts) if isinstance(part, list | tuple)]
    if len(parts) < 2 or not lists or not all(isinstance(part, list | tuple) or is_array(part) for part in parts):
        return None
    lengths = {len(part) for part in parts}
    meant = len(lists) < len(parts) or (len(lengths) == 1 and lengths.pop() > len(parts))
    return lists[0] if meant else None


def _batch(data: Any, indices: list[int]) -> Any:
    if _has_columns(data):
        return data[indices]
    many = getattr(data, "__getitems__", None)
    items = many(indices) if callable(many) else [data[index] for index in indices]
    if not is_torch(data, "Dataset"):
        return items
    from torch.utils.data import default_collate

    return default_collate(items)


def _has_columns(data: Any) -> bool:
    """A ``datasets.Dataset`` of Hugging Face or what behaves alike: a list of indices gives a dict of columns."""
    return isinstance(getattr(data, "column_names", None), list) and not is_torch(data, "Dataset")


def is_array(data: Any) -> bool:
    """An array or tensor with a first dimension; tables have a shape too."""
    shape = getattr(data, "shape", None)
    if shape is None or hasattr(data, "iloc") or hasattr(data, "column_names"):
        return False
    return hasattr(data, "__getitem__") and len(shape) > 0


def _take(array: Any, indices: "Indices") -> Any:
    module = type(array).__module__.partition(".")[0]
    if module == "mlx":
        import mlx.core as mx

        return array[mx.array(indices)]
    if module == "torch" or _is_torch_tensor(array):
        import torch

        return array[torch.from_numpy(indices.copy()).to(array.device)]
    return array[indices]


def _is_torch_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)
