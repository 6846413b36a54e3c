"""What a coordinator is started with."""

import math
from pathlib import Path

import msgspec


class Settings(msgspec.Struct):
    """``lease``: seconds without any view and without a running cell after which the cluster ends."""

    cluster: str
    directory: str
    """The notebook's working directory: local nodes run there."""
    runtime: Path
    """The cluster's folder: connection file, journal, logs."""
    lease: float = 600.0
    agent_lease: float = 600.0
    resume: bool = False
    known: str = ""
    """PeerLinks that the notebook's environment names (NOTEBOOK_CLUSTER_PEERS): HOST:PORT or names, commas between."""
    progress: int = -1
    """File descriptor for lines about how far the start is; -1 for none."""


def check_settings(settings: Settings) -> None:
    """Raise ValueError that names the setting."""
    for name in ("lease", "agent_lease"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name} {value}: use a positive number of seconds")
