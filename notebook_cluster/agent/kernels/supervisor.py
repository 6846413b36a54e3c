"""A kernel's process: start it with jupyter_client, notice its end at once, interrupt and end it; and where the kernels
of one cluster work and write on this peer, and with which variables they are started.

The kernel talks over ipc sockets in the agent's 0700 folder, in a session (and process group) of its own, with stdout
and stderr in a 0600 file.
"""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from notebook_cluster.agent.devices import Devices
from notebook_cluster.agent.kernels.programs import Programs, below
from notebook_cluster.agent.sharing.admission import StartRefused
from notebook_cluster.processors import PLACE, NodeCount, count_nodes, thread_variables, threads_for
from notebook_cluster.protocol.cell_mark import CELL_MARK
from notebook_cluster.protocol.peer import StartNode
from notebook_cluster.security import without_tokens

_TAIL_BYTES = 64 * 1024
_WAKE_AFTER_S = (0.05, 0.5)
NODE_EXTENSION = "notebook_cluster.node"
_KERNEL_ARGUMENTS = [
    sys.executable,
    "-m",
    "ipykernel_launcher",
    "-f",
    "{connection_file}",
    # One SQLite file for all kernels of a user is a lock to wait for, and a node's history is of no use.
    "--HistoryManager.enabled=False",
    f"--IPKernelApp.extra_extensions={NODE_EXTENSION}",
]


@dataclass(frozen=True)
class KernelOptions:
    """What a kernel is started with.

    ``sockets``: a path below the agent's socket folder, the beginning of the kernel's ipc addresses; ``log``: file for
    stdout and stderr; ``directory``: working folder; ``environment``: on top of the agent's own.
    """

    sockets: Path
    log: Path
    directory: Path
    environment: dict[str, str]


class KernelProcess:
    """A running kernel. Make it with :meth:`start`.

    Attributes:
        pid: process id, also the id of its process group.
        connection: jupyter_client's connection information.
        ended: set once the process is gone.
    """

    def __init__(self, manager: Any, options: KernelOptions, programs: Programs) -> None:
        self._manager = manager
        self._process: subprocess.Popen[bytes] = manager.provisioner.process
        self._options = options
        self.pid = self._process.pid
        self.connection: dict[str, object] = manager.get_connection_info()
        self.ended = asyncio.Event()
        self.return_code: int | None = None
        self._programs = programs
        self._below: list[psutil.Process] = []
        programs.add(self.pid, options.environment.get(CELL_MARK, ""))

    @classmethod
    async def start(
        cls, options: KernelOptions, on_end: "Callable[[KernelProcess], None]", programs: Programs
    ) -> "KernelProcess":
        """Start a kernel; ``on_end`` is called on the loop when its process, and all that it has started, is gone.

        Raises:
            OSError: the process could not be started.
        """
        manager = _new_manager(options.sockets)
        # An agent may run below another Jupyter process, whose JPY_ variables would mislead the kernel.
        inherited = {name: value for name, value in without_tokens(os.environ).items() if not name.startswith("JPY_")}
        # Else the debugger that ipykernel loads warns of itself, in the middle of the first cell.
        quiet = {"PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        descriptor = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            with programs.starting():
                await manager.start_kernel(
                    stdout=descriptor,
                    stderr=descriptor,
                    cwd=str(options.directory),
                    env=quiet | inherited | options.environment,
                )
                kernel = cls(manager, options, programs)
        finally:
            os.close(descriptor)
        loop = asyncio.get_running_loop()
        # jupyter_client polls; waiting in a thread tells at once on every system.
        threading.Thread(target=kernel._wait, args=(loop, on_end), name=f"kernel-{kernel.pid}", daemon=True).start()
        return kernel

    def interrupt(self) -> None:
        """SIGINT to the kernel itself; it passes it on to what it runs in the foreground."""
        self._signal(signal.SIGINT)
        self.wake()

    def wake(self) -> None:
        """Let a SIGINT come through that reached the kernel just before a system call, such as a sleep.

        Python raises KeyboardInterrupt between two steps of the interpreter: then only once that call has returned.
        The kernel does nothing at SIGWINCH but return from it, soon and, if it was busy then, again a little later: see
        :class:`notebook_cluster.node.runtime.running_cell.CellInterrupts`.
        """
        loop = asyncio.get_running_loop()
        for delay in _WAKE_AFTER_S:
            loop.call_later(delay, self._signal, signal.SIGWINCH)

    def look_below(self) -> None:
        """Before it is ended: note what it has started, which may leave no other trace once it is gone."""
        self._below = below(self.pid)

    def kill(self) -> None:
        """SIGKILL to the kernel and everything in its process group."""
        if not self.ended.is_set():
            self._kill_group()

    def reason(self) -> str:
        """Why it ended, in words for people."""
        code = self.return_code
        if code is None or code >= 0:
            return f"exit code {code}"
        if -code == signal.SIGKILL:
            return "killed by SIGKILL (out of memory? see dmesg)"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def ended_by_itself(self) -> bool:
        """False where somebody asked it to end, as a machine does that shuts down."""
        return self.return_code not in (None, -signal.SIGTERM, -signal.SIGHUP)

    def log_lines(self, count: int) -> list[str]:
        """The last ``count`` lines of the kernel's stdout and stderr."""
        return read_tail(self._options.log, count)

    def remove_files(self) -> None:
        """Remove its sockets and its connection file; the log stays."""
        self._manager.cleanup_connection_file()
        self._manager.cleanup_ipc_files()

    def _wait(self, loop: asyncio.AbstractEventLoop, on_end: "Callable[[KernelProcess], None]") -> None:
        code = self._process.wait()
        # What the kernel started goes with it (worker processes of a data loader).
        self._kill_group()
        self._programs.end_those_of(self.pid, self._below)
        try:
            loop.call_soon_threadsafe(self._ended, code, on_end)
        except RuntimeError:
            # The agent's loop is closed: nobody is left to be told.
            pass

    def _ended(self, code: int, on_end: "Callable[[KernelProcess], None]") -> None:
        self.return_code = code
        self.ended.set()
        on_end(self)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass

    def _kill_group(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # PermissionError: what macOS says of a group in which only a zombie is left.
            pass


def _new_manager(sockets: Path) -> Any:
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    class Manager(AsyncKernelManager):  # type: ignore[misc]
        def _connect_control_socket(self) -> None:
            """None: the relay has a control channel, and another zmq.Context for each kernel would cost threads."""

    manager = Manager(transport="ipc", ip=str(sockets), connection_file=f"{sockets}.json")
    # The environment that runs the agent, not a kernel spec that happens to be installed under the name python3.
    manager._kernel_spec = KernelSpec(
        argv=_KERNEL_ARGUMENTS, display_name="notebook-cluster", language="python", interrupt_mode="signal"
    )
    return manager


def read_tail(path: Path, count: int) -> list[str]:
    """The last ``count`` lines of a text file, of its last 64 KiB at most; empty when it is missing."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


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
