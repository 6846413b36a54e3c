"""One model trained on several nodes: DiLoCo, Local SGD, SparseLoCo, DeMo and data-parallel.

:mod:`notebook_cluster.rounds` (the outer step, one node's side of a round) is a pure numeric core: flat float32 arrays
and plain messages in and out, no sockets, no threads. :mod:`.job` drives that core on a node's runtime thread,
:mod:`.exchanges` and :mod:`.sync` on the main thread; :mod:`.diloco`, :mod:`.sparse_loco`, :mod:`.demo` and
:mod:`.data_parallel` are what people call in a cell. :mod:`.replica` is the local model between two rounds,
:mod:`.schedule` when its fragments are sent,
:mod:`.gradients` (:mod:`.served`, where one node steps for all) and :mod:`.local_momentum` are the replica of
data-parallel training and of DeMo; :mod:`.torch_parameters` and :mod:`.mlx_parameters` turn a model and its gradients
into one flat vector and back, :mod:`.host_encoding` and, on a GPU, :mod:`.device_encoding` encode it, and
:mod:`.mlx_optimizer` is what the last two strategies need of mlx's optimizers.

May import: rounds, collectives, codecs, checkpoints, mesh, security, protocol, memory. Called by: ``node`` (which
provides the :class:`~.runtime.Runtime`) and, through the package's lazy names, people's cells.
Importing this room imports neither numpy nor torch: kernels start fast, and only a strategy that is constructed pays.
"""

from typing import TYPE_CHECKING, Any

from notebook_cluster.training.runtime import JobHandler, Runtime, current_runtime, set_runtime

if TYPE_CHECKING:
    from notebook_cluster.training.data_parallel import DataParallel
    from notebook_cluster.training.demo import DeMo
    from notebook_cluster.training.diloco import DiLoCo, LocalSGD
    from notebook_cluster.training.results import Round, TrainingError
    from notebook_cluster.training.schedule import Seconds
    from notebook_cluster.training.sparse_loco import SparseLoCo

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
    "set_runtime",
]

_LAZY = {
    "DataParallel": "notebook_cluster.training.data_parallel",
    "DeMo": "notebook_cluster.training.demo",
    "DiLoCo": "notebook_cluster.training.diloco",
    "LocalSGD": "notebook_cluster.training.diloco",
    "Round": "notebook_cluster.training.results",
    "Seconds": "notebook_cluster.training.schedule",
    "SparseLoCo": "notebook_cluster.training.sparse_loco",
    "TrainingError": "notebook_cluster.training.results",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
