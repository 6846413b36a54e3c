"""The cluster's name when none is typed: the notebook's."""

import os
from collections.abc import Mapping
from pathlib import PurePath, PureWindowsPath
from typing import Any

from notebook_cluster.protocol.names import as_name


def default_cluster_name(namespace: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> str:
    """The stem of the notebook's file as a usable name, or ``cluster`` where nothing says what it is.

    Jupyter servers name the file in ``JPY_SESSION_NAME``; VS Code puts it into the namespace.
    """
    for path in (namespace.get("__vsc_ipynb_file__"), environment.get("JPY_SESSION_NAME")):
        if not isinstance(path, str) or not path.lower().endswith(".ipynb"):
            continue
        pure = PureWindowsPath(path) if "\\" in path else PurePath(path)
        return as_name(pure.stem)
    return "cluster"
