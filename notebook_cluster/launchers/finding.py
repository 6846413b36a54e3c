"""The launcher of an engine's name."""

from collections.abc import Callable
from importlib.metadata import entry_points

from notebook_cluster.launchers.ipyparallel_engines import IpyParallel
from notebook_cluster.launchers.launcher import Launcher, LaunchError
from notebook_cluster.launchers.pretended import Pretended
from notebook_cluster.launchers.slurm import Slurm
from notebook_cluster.launchers.ssh import Ssh
from notebook_cluster.protocol.names import did_you_mean

GROUP = "notebook_cluster.launchers"
"""Entry points of other packages: a name, and a class that is a Launcher."""
_OURS: dict[str, Callable[[], Launcher]] = {"slurm": Slurm, "ssh": Ssh, "ipp": IpyParallel, "fake": Pretended}


def known_engines() -> list[str]:
    """Their names; none of other packages is loaded."""
    return sorted({*_OURS, *(entry.name for entry in entry_points(group=GROUP))})


def find_launcher(engine: str) -> Launcher:
    """A new launcher for ``engine``.

    Raises:
        LaunchError: there is none of that name, or it cannot be loaded.
    """
    if engine in _OURS:
        return _OURS[engine]()
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    if engine not in others:
        known = known_engines()
        raise LaunchError(f"--on {engine}: no such engine{did_you_mean(engine, known)}. There are: {', '.join(known)}")
    try:
        launcher: Launcher = others[engine].load()()
    except Exception as error:
        raise LaunchError(f"--on {engine}: {others[engine].value} cannot be loaded: {error}") from error
    return launcher
