"""The engines that a cluster can be started on, and what each of them is to be asked for in a form."""

from typing import Literal

from notebook_cluster.launchers import known_engines
from notebook_cluster.protocol.launches import LAUNCH_OPTIONS
from notebook_cluster.protocol.sidebar import EngineChoice

_OPTIONS = [name for name in LAUNCH_OPTIONS if name not in ("on", "hosts")]
_OURS: dict[str, tuple[str, Literal["number", "names", "either"], list[str]]] = {
    "slurm": ("Slurm", "number", _OPTIONS),
    "ssh": ("SSH", "names", ["nodes_per_host", "setup", "address"]),
    "ipp": ("ipyparallel", "either", ["nodes_per_host", "setup", "address", "folder"]),
}


def engine_choices() -> list[EngineChoice]:
    """All that are known, ours first. Those of other packages are not loaded: what they ask for is not known, so they
    are offered everything and say themselves what they do not take."""
    known = known_engines()
    names = [*(name for name in _OURS if name in known), *sorted(set(known) - _OURS.keys())]
    return [EngineChoice(name, *_OURS.get(name, (name, "either", _OPTIONS))) for name in names]
