"""Files that a teacher hands out: small ones, which travel inside their cell, so that who comes later gets them too.
Nothing that is there is replaced: it may be what somebody has made of it. And files that people ask for (reports,
curves): whole, or not there at all.
"""

import base64
import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from notebook_cluster.protocol.names import names_in

_HERE = '__import__("notebook_cluster.values.handed_out", fromlist=["put"])'


def put_source(files: Mapping[str, bytes]) -> str:
    """The cell that writes ``files`` (relative path with ``/`` -> content) into a node's working folder."""
    written = {path: base64.b64encode(data).decode() for path, data in files.items()}
    return f"{_HERE}.put({written!r})"


def put(files: Mapping[str, str]) -> None:
    """Write each file (relative path -> base64) into the folder in which this kernel was started, and say what came of
    it. Called on the node.

    Raises:
        ValueError: a path that leads out of it. OSError: it cannot be written.
    """
    root = _working_folder()
    for path, content in files.items():
        data = base64.b64decode(content)
        target = root.joinpath(*names_in(path))
        if _put_new(target, data):
            print(f"{path} is in the working folder now")
        elif target.is_file() and target.read_bytes() == data:
            print(f"{path} is there already")
        else:
            print(f"{path} is another one here already, and stays as it is")


def _working_folder() -> Path:
    from IPython import get_ipython

    shell = get_ipython()
    return Path(getattr(shell, "starting_dir", None) or os.getcwd())  # a cell may have gone elsewhere


def _put_new(target: Path, data: bytes) -> bool:
    """Write ``target`` whole, unless something is there."""
    if os.path.lexists(target):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_file(target, overwrite=False) as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


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
            try:
                os.link(partial, target)  # unlike a rename it fails where somebody has made that file meanwhile
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                if target.exists():
                    raise FileExistsError(str(target)) from None
                os.replace(partial, target)
    finally:
        Path(partial).unlink(missing_ok=True)
