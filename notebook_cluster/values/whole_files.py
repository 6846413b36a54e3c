"""Files that people ask for (reports, curves): whole, or not there at all."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def whole_file(target: Path, *, overwrite: bool) -> Iterator[BinaryIO]:
    """A binary file that appears as ``target`` at the end of the block, readable for all, or not at all.

    Raises:
        FileExistsError: ``target`` is there, made meanwhile or before, and ``overwrite`` is False.
        OSError: it cannot be written.
    """
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:80]}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(partial, 0o644)
        if overwrite:
            os.replace(partial, target)
        else:
            _put_new(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)


def _put_new(made: str, target: Path) -> None:
    try:
        os.link(made, target)  # unlike a rename it fails where somebody has made that file meanwhile
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if target.exists():
            raise FileExistsError(str(target)) from None
        os.replace(made, target)
