"""IPython magics: parse what was typed, ask the client, show what the nodes put out.

May import: ``client``, ``tracking``, ``values``, ``widgets``, ``protocol``. Called by: IPython, through
``%load_ext notebook_cluster``.

Its files and folders import downward, in this order:

- :mod:`.extension`: the magics as functions, and how they come into a shell.
- :mod:`.cluster_command`: what ``%cluster`` does; :mod:`.transfer_commands`: ``%push``, ``%pull`` and
  ``%cluster send``; :mod:`.curve_commands`: ``%cluster export`` and ``track``; :mod:`.take_over_command`: ``%cluster
  take-over``; :mod:`.completion`: completion and inspection.
- :mod:`.session`: which cluster this notebook means, and cells without a magic.
- :mod:`.execution`: a cell on the nodes, with its errors, values, questions and Stop.
- :mod:`.display`: output, within what a Jupyter server lets through.
- :mod:`.parsing`: what was typed, and which nodes it means; :mod:`.grammar`: what may be typed, as data.
- :mod:`.errors`: how a failure is told.
"""

import sys
from typing import Any

__all__ = ["load_ipython_extension", "unload_ipython_extension", "why_not_here"]

_loaded: dict[int, Any] = {}


def why_not_here() -> str:
    """Why nothing of this package works on this system, with the way out; empty where it does."""
    system: str = sys.platform  # else mypy takes the rest for unreachable
    if system != "win32":
        return ""
    return (
        "notebook-cluster runs on Linux and macOS, not in Windows itself: install it in WSL (wsl --install) and start "
        "JupyterLab there; from WSL a machine joins others with notebook-cluster share --dial, as %cluster invite shows"
    )


def load_ipython_extension(shell: Any) -> None:
    """Register ``%cluster``, ``%push``, ``%pull``, ``%%on_all`` and ``%%on`` in ``shell``.

    Raises:
        UsageError: this kernel is itself a node of a cluster, or its system is not one that this package runs on.
    """
    if problem := why_not_here():
        from IPython.core.error import UsageError

        raise UsageError(problem)
    from notebook_cluster.magics.extension import Extension

    unload_ipython_extension(shell)
    extension = Extension(shell)
    extension.load()
    _loaded[id(shell)] = extension


def unload_ipython_extension(shell: Any) -> None:
    """Take the magics away; a cluster that runs goes on."""
    extension = _loaded.pop(id(shell), None)
    if extension is not None:
        extension.unload()
