"""What runs inside a kernel: the background runtime, the names of a node's cells, telemetry.

An agent starts each kernel with ``notebook_cluster.node`` as an IPython extension and tells it through environment
variables who it is. :func:`load_ipython_extension` starts one I/O thread (control messages to the agent, mesh to the
other nodes), puts ``nc``, ``rank``, ``world_size`` and ``device`` into the namespace and hooks into each cell.

- :mod:`.shell`: loading, and what happens before and after each cell
- :mod:`.namespace`: the ``nc`` names, and how people see what is in a node's namespace
- :mod:`.runtime`: the background runtime; implements :class:`notebook_cluster.training.runtime.Runtime`
- :mod:`.data`: how ``nc.shard`` divides data

May import: ``training``, ``checkpoints``, ``values``, ``collectives``, ``codecs``, ``mesh``, ``security``,
``protocol``. Called by: IPython (as an extension) and :mod:`notebook_cluster` (the ``nc`` names). Importing it imports
neither numpy nor torch.
"""

import sys
import types
from typing import Any

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(ip: Any) -> None:
    """Make this kernel a node; in a kernel that no agent started, say so and change nothing."""
    from notebook_cluster.node.shell.extension import load

    load(ip)


def unload_ipython_extension(ip: Any) -> None:
    """End the runtime and its sockets; the cluster sees the node as silent until the kernel ends."""
    from notebook_cluster.node.shell.extension import unload

    unload(ip)


class _CallableRoom(types.ModuleType):
    """``nc.node()`` is a function for people, and ``notebook_cluster.node`` is this room: both are this module."""

    def __call__(self) -> str:
        from notebook_cluster.node.namespace.api import node

        return node()


sys.modules[__name__].__class__ = _CallableRoom
