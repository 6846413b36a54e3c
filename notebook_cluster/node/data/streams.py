"""Data without a length: what can be opened, in one piece or as many files; .tar files as WebDataset writes them.

Everything here can be sent to a DataLoader's worker.
"""

import functools
import hashlib
import inspect
import os
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Literal

Mode = Literal["stride", "file"]

_TAR = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


class StreamSource:
    """A stream that is opened anew in each epoch.

    Args:
        whole: what opens all of it, given the epoch.
        files: how many parts it has that can be opened by themselves; 0: none.
        one: opens one of those, given the epoch and which.
        once: it can be opened once only.
        names: of the files; the same on every node.
    """

    def __init__(
        self,
        whole: Callable[[int], Iterable[Any]],
        files: int = 0,
        one: Callable[[int, int], Iterable[Any]] | None = None,
        *,
        once: bool = False,
        names: tuple[str, ...] = (),
    ) -> None:
        self.whole, self.files, self.one, self.once, self.names = whole, files, one, once, names

    def name(self, file: int) -> str:
        return self.names[file] if self.names else f"file {file} of {self.files}"


def stream_source(data: Any, mode: Mode | None) -> StreamSource | None:
    """What opens ``data``; None: it is no stream, but has a length and an index.

    Raises:
        ValueError: it cannot be divided in this ``mode``. TypeError: nor in any.
    """
    if mode not in (None, "stride", "file"):
        raise ValueError(f'shard: mode={mode!r}: use "stride" or "file", or leave it out')
    source = _source(data, mode)
    if source is None:
        if mode == "file" and isinstance(data, (list, tuple)):
            raise ValueError(
                f'shard: mode="file" reads .tar files; for others, as {data[0] if data else "none"!r}, pass functions '
                "that open one: [lambda path=path: open(path) for path in paths]"
            )
        if mode is not None:
            raise ValueError(
                f"shard: mode={mode!r} is for streams and files; a {type(data).__name__} has a length and an index and "
                "is divided by them: leave mode out"
            )
        return None
    if mode == "file" and not source.files:
        raise ValueError(
            f'shard: mode="file" needs a list of .tar files, of iterables or of functions that open one, or an '
            f"IterableDataset of Hugging Face with several shards; a {type(data).__name__} is one stream: use "
            'mode="stride"'
        )
    return source


def default_mode(data: Any) -> Mode:
    """By file where a list of files was given; otherwise by stride."""
    return "file" if isinstance(data, (list, tuple)) else "stride"


def is_hugging_face(data: Any) -> bool:
    """A ``datasets.IterableDataset``."""
    kinds = [kind.__module__.partition(".")[0] for kind in type(data).__mro__ if kind.__name__ == "IterableDataset"]
    return "datasets" in kinds


def _source(data: Any, mode: Mode | None) -> StreamSource | None:
    if isinstance(data, (list, tuple)) and data:
        if all(_is_tar(one) for one in data):
            names = tuple(os.path.basename(os.fspath(one)) for one in data)
            return StreamSource(_Chain(data, _tar_samples), len(data), _Each(data, _tar_samples), names=names)
        if mode is None or any(isinstance(one, (str, bytes, os.PathLike)) for one in data):
            return None
        if all(_is_function(one) or hasattr(one, "__iter__") for one in data):
            return StreamSource(_Chain(data, _opened), len(data), _Each(data, _opened), once=any(map(_is_once, data)))
        return None
    if is_hugging_face(data):
        shards = int(getattr(data, "num_shards", 0) or getattr(data, "n_shards", 0))
        return StreamSource(_Whole(data), shards if shards > 1 else 0, _ShardOf(data, shards))
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.IterableDataset):
        return StreamSource(_Whole(data))
    if isinstance(data, (str, bytes, dict, set, frozenset, type)) or (hasattr(data, "__len__") and _has_index(data)):
        return None
    if hasattr(data, "__iter__") or _is_function(data):
        return StreamSource(_Whole(data), once=_is_once(data))
    return None


def _is_function(data: Any) -> bool:
    return inspect.isroutine(data) or isinstance(data, functools.partial)


def _has_index(data: Any) -> bool:
    return hasattr(data, "__getitem__") or hasattr(data, "iloc")


def _is_once(data: Any) -> bool:
    """A generator and the like: it is its own iterator."""
    return hasattr(data, "__next__")


def _opened(data: Any) -> Iterable[Any]:
    opened: Iterable[Any] = data if hasattr(data, "__iter__") else data()
    return opened


class _Whole:
    def __init__(self, data: Any) -> None:
        self._data = data

    def __call__(self, epoch: int) -> Iterable[Any]:
        if callable(getattr(self._data, "set_epoch", None)):
            self._data.set_epoch(epoch)
        return _opened(self._data)


class _Chain:
    def __init__(self, files: Any, opens: Callable[[Any], Iterable[Any]]) -> None:
        self._files, self._opens = files, opens

    def __call__(self, epoch: int) -> Iterable[Any]:
        return chain.from_iterable(map(self._opens, self._files))


class _Each:
    def __init__(self, files: Any, opens: Callable[[Any], Iterable[Any]]) -> None:
        self._files, self._opens = files, opens

    def __call__(self, epoch: int, file: int) -> Iterable[Any]:
        return self._opens(self._files[file])


class _ShardOf:
    """One of the shards of Hugging Face's IterableDataset."""

    def __init__(self, data: Any, count: int) -> None:
        self._data, self._count = data, count

    def __call__(self, epoch: int, file: int) -> Iterable[Any]:
        part: Any = self._data.shard(num_shards=self._count, index=file)
        part.set_epoch(epoch)
        return _opened(part)


def hash_of_item(item: Any) -> str:
    """Equal on two nodes for equal items of plain data, arrays and tensors; of other things only the type counts."""
    state = hashlib.blake2b(digest_size=8)
    for part in _parts(item):
        state.update(part)
    return state.hexdigest()


def _parts(item: Any) -> Iterator[bytes]:
    yield type(item).__name__.encode()
    if isinstance(item, (bytes, bytearray)):
        yield bytes(item)
    elif isinstance(item, str):
        yield item.encode("utf-8", "surrogatepass")
    elif item is None or isinstance(item, (int, float, complex)):
        yield repr(item).encode()
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from _parts(key)
            yield from _parts(value)
    elif isinstance(item, (list, tuple)):
        for value in item:
            yield from _parts(value)
    elif hasattr(item, "shape") and hasattr(item, "dtype"):
        yield repr(tuple(item.shape)).encode()
        array = item.detach().cpu() if hasattr(item, "detach") else item
        array = array.numpy() if hasattr(array, "numpy") and "bfloat16" not in str(item.dtype) else array
        yield array.tobytes() if hasattr(array, "tobytes") else b""


def _is_tar(one: Any) -> bool:
    return isinstance(one, (str, os.PathLike)) and os.fspath(one).endswith(_TAR)


def _tar_samples(path: Any) -> Iterator[dict[str, Any]]:
    """Members that follow each other and have the same name up to the first dot of the last part are one sample:
    ``0001.jpg`` and ``0001.cls`` become ``{"__key__": "0001", "jpg": bytes, "cls": bytes}``.

    The file is read once, from its beginning to its end, and one sample at a time is in memory.

    Raises:
        OSError, tarfile.TarError: it cannot be read; the message names it.
    """
    sample: dict[str, Any] = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                stem, dot, kind = name.partition(".")
                if not member.isfile() or not stem or not dot:
                    continue
                key = f"{folder}/{stem}" if folder else stem
                if sample and (key != sample["__key__"] or kind in sample):
                    yield sample
                    sample = {}
                content = archive.extractfile(member)
                assert content is not None
                sample["__key__"] = key
                sample[kind] = content.read()
    except tarfile.TarError as error:
        raise type(error)(f"shard: {os.fspath(path)} cannot be read as a tar file: {error}") from None
    if sample:
        yield sample
