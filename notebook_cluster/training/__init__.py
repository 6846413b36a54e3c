"""One model trained on several nodes: DiLoCo and Local SGD.

:mod:`.outer` (the outer step) and :mod:`.member` (one node's side of a round) are a pure numeric core: flat float32
arrays and plain messages in and out, no sockets, no threads. :mod:`.job` drives that core on a node's runtime thread,
:mod:`.sync` on the main thread, and :mod:`.diloco` is what people call in a cell. :mod:`.replica` is the local model
between two rounds; :mod:`.torch_parameters` and :mod:`.mlx_parameters` turn a model into one flat vector and back.

May import: collectives, codecs, checkpoints, mesh, security, protocol. Called by: ``node`` (which provides the
:class:`~.runtime.Runtime`), ``coordinator`` (:mod:`.outer` only) and, through the package's lazy names, people's cells.
Importing this room imports neither numpy nor torch: kernels start fast, and only a strategy that is constructed pays.
"""

from typing import TYPE_CHECKING, Any

from notebook_cluster.training.runtime import JobHandler, Runtime, current_runtime, set_runtime

if TYPE_CHECKING:
    from notebook_cluster.training.diloco import DiLoCo, LocalSGD
    from notebook_cluster.training.results import Round, TrainingError

__all__ = [
    "DiLoCo",
    "JobHandler",
    "LocalSGD",
    "Round",
    "Runtime",
    "TrainingError",
    "current_runtime",
    "set_runtime",
]

_LAZY = {
    "DiLoCo": "notebook_cluster.training.diloco",
    "LocalSGD": "notebook_cluster.training.diloco",
    "Round": "notebook_cluster.training.results",
    "TrainingError": "notebook_cluster.training.results",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
