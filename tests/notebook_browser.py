"""A notebook's kernel with what a browser knows of its widgets, for tests with a real cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from notebook_cluster.protocol.interaction import WIDGET_MIME
from tests.cluster import stop_all
from tests.conftest import shared_folders, wait_until
from tests.notebook_kernel import Cell, NotebookKernel


class Browser(NotebookKernel):
    """A notebook's kernel and what a browser knows of its widgets: their states, and which are displayed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        self.models: dict[str, dict[str, Any]] = {}
        self.shown: list[str] = []
        self.messages = 0
        self.cells: dict[str, Cell] = {}
        receive = self.client.get_iopub_msg

        def look(**options: Any) -> dict[str, Any]:
            message: dict[str, Any] = receive(**options)
            self._take(message["msg_type"], message["content"])
            return message

        self.client.get_iopub_msg = look

    def _take(self, kind: str, content: dict[str, Any]) -> None:
        if kind == "comm_open" and content["target_name"] == "jupyter.widget":
            self.models[content["comm_id"]] = dict(content["data"]["state"])
        elif kind == "comm_msg" and content["comm_id"] in self.models:
            self.messages += 1
            self.models[content["comm_id"]].update(content["data"].get("state") or {})
        elif kind == "comm_close":
            self.models.pop(content["comm_id"], None)
        elif kind in ("display_data", "update_display_data") and WIDGET_MIME in content["data"]:
            self.shown.append(content["data"][WIDGET_MIME]["model_id"])

    def start(self, code: str, *, allow_stdin: bool = True) -> Cell:
        cell = super().start(code, allow_stdin=allow_stdin)
        self.cells[cell.request] = cell
        return cell

    def say(self, model: str, data: dict[str, Any]) -> None:
        """A comm_msg as a frontend sends it."""
        message = self.client.session.msg("comm_msg", {"comm_id": model, "data": data})
        self.client.shell_channel.send(message)

    def move(self, model: str, **state: Any) -> None:
        self.say(model, {"method": "update", "state": state, "buffer_paths": []})

    def click(self, model: str) -> None:
        self.say(model, {"method": "custom", "content": {"event": "click"}})

    def listen(self) -> bool:
        """Take what has come; False, so that ``listen() or condition`` looks again."""
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=0.02)
            except Exception:  # queue.Empty, which jupyter_client re-exports under other names
                return False
            cell = self.cells.get(message["parent_header"].get("msg_id", ""))
            if cell is not None:
                cell.take(message["msg_type"], message["content"])

    def until_model(self, model: str, **state: Any) -> None:
        """Wait until the widget has this state."""

        def fits() -> bool:
            self.listen()
            return state.items() <= self.models.get(model, {}).items()

        wait_until(fits, 60, lambda: f"{state} in {self.models.get(model)}")

    def show(self, code: str, count: int = 1) -> tuple[Cell, list[str]]:
        """Start ``code`` and wait until it has displayed ``count`` widgets: the cell and their models."""
        self.shown.clear()
        cell = self.start(code)

        def there() -> bool:
            self.listen()
            return len(self.shown) >= count

        wait_until(there, 60, lambda: f"{count} widgets: {self.shown}, {cell.shown} {cell.error}")
        return cell, list(self.shown)


@contextmanager
def notebook_browser() -> Iterator[Browser]:
    """A :class:`Browser` with a cluster of two local nodes."""
    with shared_folders() as root:
        (root / "work").mkdir()
        kernel = Browser(root / "work")
        try:
            kernel.works("%load_ext notebook_cluster\n%cluster start --local 2 --no-panel")
            yield kernel
        finally:
            stop_all()
            kernel.close()
