"""Samples out of .tar files, as WebDataset writes them."""

import os
import tarfile
from collections.abc import Iterator
from typing import Any

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def is_tar(one: Any) -> bool:
    """Whether this is the path of a tar file, by its name."""
    return isinstance(one, (str, os.PathLike)) and os.fspath(one).endswith(_SUFFIXES)


def tar_samples(path: Any) -> Iterator[dict[str, Any]]:
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
