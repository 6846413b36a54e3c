"""Kernels over ipc sockets, for tests.

jupyter_client picks TCP ports that any process may take before the kernel binds them; an ipykernel whose iopub port
was taken lives on and never answers.
"""

import os
import uuid
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from traitlets.config import Config


def kernel_config() -> Config:
    """Configuration of nbclient and papermill for one kernel; its sockets lie in JUPYTER_RUNTIME_DIR."""
    return Config({"KernelManager": {"transport": "ipc", "ip": str(_new_place())}})


def run_notebook(notebook: Any, folder: Path, timeout: int = 60) -> None:
    """Execute ``notebook`` in ``folder`` by nbclient, as it does by default but for the sockets."""
    NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        config=kernel_config(),
    ).execute()


def start_kernel(
    place: Path | None = None, command: list[str] | None = None, ready: float | None = 60, **options: Any
) -> tuple[Any, Any]:
    """A kernel's manager, and its client, whose channels are started.

    ``place`` begins the paths of its sockets and of its connection file (default: a new one in JUPYTER_RUNTIME_DIR),
    ``command`` starts it (default: ipykernel), ``ready`` is how many seconds its first answer is waited for (None: not
    at all), ``options`` are those of Popen.
    """
    place = place or _new_place()
    manager: Any = KernelManager(transport="ipc", ip=str(place), connection_file=f"{place}.json")
    if command is not None:
        manager._kernel_spec = KernelSpec(argv=command, display_name="Python", language="python")
    manager.start_kernel(**options)
    client = manager.client()
    client.start_channels()
    if ready is not None:
        client.wait_for_ready(timeout=ready)
    return manager, client


def _new_place() -> Path:
    return Path(os.environ["JUPYTER_RUNTIME_DIR"], f"k-{uuid.uuid4().hex[:8]}")
