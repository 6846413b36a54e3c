"""Where the kernels of one cluster work and write on this peer, and what they are started with."""

import os
from pathlib import Path

from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.kernels.supervisor import KernelOptions, read_tail
from notebook_cluster.agent.sharing.admission import StartRefused
from notebook_cluster.processors import PLACE, NodeCount, count_nodes, thread_variables, threads_for
from notebook_cluster.protocol.cell_mark import CELL_MARK
from notebook_cluster.protocol.peer import StartNode

_KEPT_LOGS = 3
_MAX_LOG_LINES = 10_000
_MAX_VARIABLES = 1000
_MAX_VARIABLE_BYTES = 64 * 1024
_OURS = ("NOTEBOOK_CLUSTER_", "JPY_")
"""Beginnings of the variables that no coordinator sets: by them a kernel knows its agent, or a Jupyter above it."""


class KernelEnvironment:
    """The folders of one cluster: ``work/<folder>/`` and ``logs/<folder>/`` below ``directory``.

    Args:
        peer: this machine, as refusals name it.
        folder: a name that no other cluster here has, see :meth:`.clusters.Clusters.new_session`.
        sockets: a path whose extensions are the kernels' ipc addresses.
        mesh_sockets: 0700 folder for the sockets between this cluster's kernels.
    """

    def __init__(self, peer: str, directory: Path, folder: str, sockets: Path, mesh_sockets: Path) -> None:
        self._peer = peer
        self._directory = directory
        self._folder = folder
        self._sockets = sockets
        self.mesh_sockets = mesh_sockets
        self._started = 0
        self._logs: dict[str, Path] = {}
        self._folders: dict[str, Path] = {}

    def options(
        self, message: StartNode, device: str, devices: Devices, control: str, node_count: NodeCount
    ) -> KernelOptions:
        """What the kernel for ``message`` is started with, its folder made.

        ``control``: endpoint for its runtime; ``node_count``: has this node in it.

        Raises:
            StartRefused: the folder that was asked for does not exist, or the environment is unusable.
        """
        self._started += 1
        own = {
            "NOTEBOOK_CLUSTER_CONTROL": control,
            "NOTEBOOK_CLUSTER_NODE": message.node,
            "NOTEBOOK_CLUSTER_INCARNATION": str(message.incarnation),
            "NOTEBOOK_CLUSTER_DEVICE": device,
            "NOTEBOOK_CLUSTER_SOCKETS": str(self.mesh_sockets),
            "NOTEBOOK_CLUSTER_WORK": str(self._directory / "work"),
            CELL_MARK: str(self.mesh_sockets / f"cell-{self._started}"),
            PLACE: node_count.place,
        }
        given = checked_environment(message.environment)
        own |= thread_variables(os.environ | given, threads_for(count_nodes(node_count.place)))
        directory = self._folders[message.node] = self._working_folder(message.directory)
        return KernelOptions(
            sockets=self._sockets.with_name(f"{self._sockets.name}.{self._started}"),
            log=self._new_log(message),
            directory=directory,
            environment=given | devices.environment(device) | own,
        )

    def log_lines(self, node: str, count: int) -> list[str]:
        """The last ``count`` lines, within bounds, of the newest kernel of ``node``; empty for an unknown node."""
        path = self._logs.get(node)
        # A slice of minus nothing would be everything.
        return read_tail(path, min(count, _MAX_LOG_LINES)) if path is not None and count > 0 else []

    def folder_of(self, node: str) -> Path | None:
        """The working folder of the newest kernel of ``node``; None for an unknown node."""
        return self._folders.get(node)

    def _working_folder(self, wanted: str) -> Path:
        if not wanted:
            directory = self._directory / "work" / self._folder
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            return directory
        try:
            directory = Path(wanted).expanduser()
            found = directory.is_dir()
        except (OSError, RuntimeError, ValueError):
            # A home folder of nobody, a NUL character, a name too long.
            found = False
        if not found:
            raise StartRefused(f"folder {wanted[:200]!r} does not exist on {self._peer}: create it there")
        return directory

    def _new_log(self, message: StartNode) -> Path:
        """A file of this incarnation's own; the oldest of the node are removed."""
        folder = self._directory / "logs" / self._folder / message.node
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for old in present[: max(0, len(present) - _KEPT_LOGS + 1)]:
            old.unlink(missing_ok=True)
        path = folder / f"{message.incarnation}.log"
        path.unlink(missing_ok=True)
        self._logs[message.node] = path
        return path


def checked_environment(variables: dict[str, str]) -> dict[str, str]:
    """``variables`` of a coordinator, without those that are not its to set.

    Raises:
        StartRefused: they are too many, too long, or no variables.
    """
    if len(variables) > _MAX_VARIABLES:
        raise StartRefused(f"{len(variables)} environment variables are too many: at most {_MAX_VARIABLES} are taken")
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise StartRefused(
                f"{name[:80]!r} is no environment variable: its name or value has characters that none has"
            )
        if len(name) + len(value) > _MAX_VARIABLE_BYTES:
            raise StartRefused(
                f"environment variable {name[:80]!r} is over {_MAX_VARIABLE_BYTES >> 10} KiB: use a file"
            )
    return {name: value for name, value in variables.items() if not name.startswith(_OURS)}
