"""One kernel process: start it with jupyter_client, notice its end at once, interrupt and end it.

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

from notebook_cluster.agent.kernels.programs import Programs, below
from notebook_cluster.protocol.cell_mark import CELL_MARK

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
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("JPY_")}
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
