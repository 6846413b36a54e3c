"""A Jupyter-native cluster: ``%load_ext notebook_cluster``, ``%cluster start``, ``%%on_all``.

In a notebook this package is an IPython extension. In a cell that runs on the nodes it is ``nc``::

    sync = nc.DiLoCo(model, every=100)
    for x, y in nc.shard(dataset, batch_size=64):
        loss = train_step(model, optimizer, x, y)
        sync.step(loss=loss, samples=len(x))

Nothing is imported until it is used: kernels and command lines start fast.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers know this name; typing itself would cost more than the rest of this module
if TYPE_CHECKING:
    from typing import Any

    from notebook_cluster.collectives import Deadlock, PeerLost
    from notebook_cluster.integrations import lightning as lightning
    from notebook_cluster.integrations import transformers as transformers
    from notebook_cluster.integrations.hooks import sync_every
    from notebook_cluster.node.namespace.api import (
        all_gather,
        all_reduce,
        barrier,
        broadcast,
        device,
        jax_distributed,
        one_node_first,
        rank,
        recv,
        reduce_scatter,
        report,
        send,
        world_size,
    )
    from notebook_cluster.node.namespace.decisions import mean_metrics, should_stop
    from notebook_cluster.node.namespace.shard import shard
    from notebook_cluster.node.namespace.torch_group import torch_distributed
    from notebook_cluster.protocol.wire import VERSION as __version__
    from notebook_cluster.training import DataParallel, DeMo, DiLoCo, LocalSGD, Seconds, SparseLoCo, load_checkpoint

_HOMES = {
    "DataParallel": "notebook_cluster.training",
    "DeMo": "notebook_cluster.training",
    "Deadlock": "notebook_cluster.collectives",
    "DiLoCo": "notebook_cluster.training",
    "LocalSGD": "notebook_cluster.training",
    "PeerLost": "notebook_cluster.collectives",
    "Seconds": "notebook_cluster.training",
    "SparseLoCo": "notebook_cluster.training",
    "jax_distributed": "notebook_cluster.node.namespace.api",
    "load_checkpoint": "notebook_cluster.training",
    "mean_metrics": "notebook_cluster.node.namespace.decisions",
    "shard": "notebook_cluster.node.namespace.shard",
    "should_stop": "notebook_cluster.node.namespace.decisions",
    "sync_every": "notebook_cluster.integrations.hooks",
    "torch_distributed": "notebook_cluster.node.namespace.torch_group",
} | dict.fromkeys(
    (
        "all_gather", "all_reduce", "barrier", "broadcast", "device", "one_node_first", "rank", "recv",
        "reduce_scatter", "report", "send", "world_size",
    ),
    "notebook_cluster.node.namespace.api",
)  # fmt: skip
_ROOMS = {
    "lightning": "notebook_cluster.integrations.lightning",
    "node": "notebook_cluster.node",
    "transformers": "notebook_cluster.integrations.transformers",
}
"""Names that are modules; two of them need a library that is not always there."""

__all__ = [
    "DataParallel",
    "DeMo",
    "Deadlock",
    "DiLoCo",
    "LocalSGD",
    "PeerLost",
    "Seconds",
    "SparseLoCo",
    "__version__",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "device",
    "jax_distributed",
    "load_checkpoint",
    "load_ipython_extension",
    "mean_metrics",
    "node",
    "one_node_first",
    "rank",
    "recv",
    "reduce_scatter",
    "report",
    "send",
    "shard",
    "should_stop",
    "sync_every",
    "torch_distributed",
    "unload_ipython_extension",
    "world_size",
]


def load_ipython_extension(ip: Any) -> None:
    """``%load_ext notebook_cluster``: the ``%cluster``, ``%%on_all`` and ``%%on`` magics."""
    from notebook_cluster import magics

    magics.load_ipython_extension(ip)


def unload_ipython_extension(ip: Any) -> None:
    """``%unload_ext notebook_cluster``: takes the magics out again; the cluster goes on."""
    from notebook_cluster import magics

    magics.unload_ipython_extension(ip)


def __getattr__(name: str) -> Any:
    import importlib

    if name in _ROOMS:
        return importlib.import_module(_ROOMS[name])
    if name == "__version__":
        return importlib.import_module("notebook_cluster.protocol.wire").VERSION
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_meant(name)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def _meant(name: str) -> str:
    """``: do you mean 'DiLoCo'?``, or nothing. Python says so itself, but a notebook does not show it."""
    import difflib

    known = {one.lower(): one for one in __all__}
    close = difflib.get_close_matches(name.lower(), known, 1, 0.75)
    return f": do you mean {known[close[0]]!r}?" if close and not name.startswith("_") else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})


_MAGICS = "cluster", "on_all", "on", "push", "pull"


def _offer_magics() -> None:
    """In a notebook ``import notebook_cluster`` is enough: the first of these magics loads the extension. A node takes
    them back."""
    import sys

    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    lazy = getattr(getattr(shell, "magics_manager", None), "lazy_magics", {})
    lazy.update(dict.fromkeys(_MAGICS, __name__))


_offer_magics()
