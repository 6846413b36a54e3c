"""A notebook's kernel, driven as a frontend drives it, for tests with a real cluster."""

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ipc_kernels import start_kernel


class Cell:
    """What one executed cell has shown so far: ``text`` (streams), ``displays`` (as text; ``bundles``: as
    they came), ``kinds`` (MIME types), ``error``."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.text = ""
        self.kinds: set[str] = set()
        self.displays: dict[str, str] = {}
        self.bundles: dict[str, dict[str, Any]] = {}
        self.error: SimpleNamespace | None = None
        self.done = False

    def take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            self.text += content["text"]
        elif kind in ("display_data", "update_display_data", "execute_result"):
            self.kinds |= set(content["data"])
            key = content.get("transient", {}).get("display_id") or str(len(self.displays))
            self.displays[key] = content["data"].get("text/plain", "")
            self.bundles[key] = content["data"]
        elif kind == "error":
            self.error = SimpleNamespace(name=content["ename"], value=content["evalue"])
        elif kind == "status":
            self.done = content["execution_state"] == "idle"

    @property
    def shown(self) -> str:
        """Streams, then the newest text of every display."""
        return self.text + "\n".join(self.displays.values())


class NotebookKernel:
    """A kernel in ``folder``, of the environment of ``python``; ``allow_stdin`` False is how nbclient asks, with nobody
    there to click."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        environment = {**os.environ, "JPY_SESSION_NAME": str(folder / "lesson.ipynb")}
        command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager, self.client = start_kernel(command=command, env=environment, cwd=str(folder))

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.process.pid)

    def start(self, code: str, *, allow_stdin: bool = True) -> Cell:
        return Cell(self.client.execute(code, allow_stdin=allow_stdin))

    def until(self, cell: Cell, text: str | None = None, timeout: float = 60) -> Cell:
        """Take what ``cell`` shows until it shows ``text``, or else until it ends."""
        deadline = time.monotonic() + timeout
        while not (cell.done if text is None else text in cell.shown):
            if time.monotonic() > deadline or (cell.done and text is not None):
                pytest.fail(f"no {text or 'end'!r} in: {cell.shown[-3000:]} {cell.error}")
            try:
                message = self.client.get_iopub_msg(timeout=0.2)
            except Exception:  # queue.Empty, which jupyter_client re-exports under other names
                continue
            if message["parent_header"].get("msg_id") == cell.request:
                cell.take(message["msg_type"], message["content"])
        if cell.done:
            self._take_reply(cell)
        return cell

    def _take_reply(self, cell: Cell) -> None:
        """IPython publishes no error for a UsageError: the reply says it, which is what ends Run All."""
        while cell.error is None:
            reply = self.client.get_shell_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == cell.request:
                if reply["content"]["status"] == "error":
                    cell.error = SimpleNamespace(name=reply["content"]["ename"], value=reply["content"]["evalue"])
                return

    def run(self, code: str, **options: Any) -> Cell:
        return self.until(self.start(code, **options))

    def works(self, code: str) -> str:
        """Run a cell that must work; what it showed."""
        cell = self.run(code)
        assert cell.error is None, cell.error
        return cell.shown

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)
        self.manager.provisioner.process.wait(30)
        self.client.stop_channels()
        self.manager.cleanup_resources()

    def close(self) -> None:
        """Shut down as a frontend does."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()
