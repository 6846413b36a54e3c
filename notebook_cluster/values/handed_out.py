"""Files that a teacher hands out: small ones, which travel inside their cell, so that who comes later gets them too.

Nothing that is there is replaced: it may be what somebody has made of it.
"""

import base64
import os
from collections.abc import Mapping
from pathlib import Path

from notebook_cluster.protocol.names import names_in
from notebook_cluster.values.whole_files import whole_file

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
