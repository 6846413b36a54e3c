"""One model trained on several nodes: DiLoCo, Local SGD, SparseLoCo, DeMo and data-parallel.

- :mod:`.strategies`: what people call in a cell; each reads from top to bottom
- :mod:`.loop`: what a sync object does on the main thread: count steps, take part in rounds, take up what came of them
- :mod:`.background`: the job on the runtime's thread, which drives the member's machine of ``rounds``
- :mod:`.checkpointing`: written for all nodes, kept by one whose cluster is gone, begun from
- :mod:`.models`: a model of torch or MLX as one flat vector; :mod:`.settings`: what people pass, checked
- :mod:`.runtime`: what all of them need from the node they run in

Each imports from those below it only. May import: rounds, collectives, codecs, checkpoints, protocol. Called by:
``node`` (which provides the :class:`~.runtime.Runtime`) and, through the package's lazy names, people's cells.
Importing this room imports neither numpy nor torch: kernels start fast, and only a strategy that is constructed pays.
"""

from typing import TYPE_CHECKING, Any

from notebook_cluster.training.runtime import JobHandler, Runtime, current_runtime, set_runtime

if TYPE_CHECKING:
    from notebook_cluster.training.checkpointing.beside import load_checkpoint
    from notebook_cluster.training.loop.round_client import Round, TrainingError
    from notebook_cluster.training.settings.schedule import Seconds
    from notebook_cluster.training.strategies.data_parallel import DataParallel
    from notebook_cluster.training.strategies.demo import DeMo
    from notebook_cluster.training.strategies.diloco import DiLoCo, LocalSGD
    from notebook_cluster.training.strategies.sparse_loco import SparseLoCo

__all__ = [
    "DataParallel",
    "DeMo",
    "DiLoCo",
    "JobHandler",
    "LocalSGD",
    "Round",
    "Runtime",
    "Seconds",
    "SparseLoCo",
    "TrainingError",
    "current_runtime",
    "load_checkpoint",
    "set_runtime",
]

_LAZY = {
    "DataParallel": "notebook_cluster.training.strategies.data_parallel",
    "DeMo": "notebook_cluster.training.strategies.demo",
    "DiLoCo": "notebook_cluster.training.strategies.diloco",
    "LocalSGD": "notebook_cluster.training.strategies.diloco",
    "Round": "notebook_cluster.training.loop.round_client",
    "Seconds": "notebook_cluster.training.settings.schedule",
    "SparseLoCo": "notebook_cluster.training.strategies.sparse_loco",
    "TrainingError": "notebook_cluster.training.loop.round_client",
    "load_checkpoint": "notebook_cluster.training.checkpointing.beside",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
