"""IPython magics: parse what was typed, ask the client, show what the nodes put out.

May import: ``client``, ``values``, ``widgets``, ``protocol``. Called by: IPython, through
``%load_ext notebook_cluster``.

- :mod:`.grammar`: what may be typed; :mod:`.parsing`, :mod:`.targets`, :mod:`.naming`, :mod:`.completion`: pure
  functions on what was.
- :mod:`.extension`: the magics and how they are registered; :mod:`.session`: which cluster this notebook means.
- :mod:`.commands`: ``%cluster``; :mod:`.cells`: ``%%on_all`` and ``%%on``; :mod:`.running`: their options.
- :mod:`.handle`, :mod:`.handle_view`: ``--async``; :mod:`.values`: last values; :mod:`.sticky`: ``%cluster cells all``.
- :mod:`.push`, :mod:`.pull`, :mod:`.sending`: variables and files to and from nodes; :mod:`.progress`: how far.
- :mod:`.output`, :mod:`.slots`, :mod:`.line_buffer`, :mod:`.ansi`: output, within what a Jupyter server lets through;
  :mod:`.publishing`: where it goes.
- :mod:`.asking`: ``input()`` of nodes; :mod:`.remote_names`: completion and inspection of what lives on them.
- :mod:`.results`, :mod:`.errors`: how a cell's failure is told.
"""

from typing import Any

__all__ = ["load_ipython_extension", "unload_ipython_extension"]

_loaded: dict[int, Any] = {}


def load_ipython_extension(shell: Any) -> None:
    """Register ``%cluster``, ``%push``, ``%pull``, ``%%on_all`` and ``%%on`` in ``shell``.

    Raises:
        UsageError: this kernel is itself a node of a cluster.
    """
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
