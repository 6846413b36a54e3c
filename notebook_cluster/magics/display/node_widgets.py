"""Widgets of nodes in the notebook: opened when one is displayed, kept up to date, their clicks sent back.

What happens to them comes from the coordinator on the client's I/O thread and from the browser on a subshell; both only
put it into a queue. The queue is worked off by whoever comes first: the thread that is about to display a widget, which
so has everything that came before, or a thread of its own in a copy of the cell's context, while no cell waits.
"""

import atexit
import contextvars
import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from notebook_cluster.protocol.interaction import MAX_COMM_BYTES, WIDGET_MIME, NodeComm
from notebook_cluster.protocol.views import Closing

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster
    from notebook_cluster.magics.display.mirrored import MirroredWidget, State

REFERENCE = "IPY_MODEL_"
OPENED_AT_ONCE = 100
PAUSE_SECONDS = 0.25
"""After so many: jupyter_server drops what is over 1,000 messages a second."""
_TOO_LARGE = "over {} MB: use %cluster send"
_mirrors: list["NodeWidgets"] = []
_making = threading.Lock()


def showable(cluster: "Cluster | None", kernel: Any, data: dict[str, Any]) -> dict[str, Any]:
    """The bundle ``data`` of a node's output as this notebook can show it. Without ``cluster`` (nobody can click), and
    when the widget is no longer open, the view of a widget is left out; else the widget is open now in ``kernel``."""
    if WIDGET_MIME not in data:
        return data
    mirror = _mirror_of(cluster, kernel) if cluster is not None else None
    if mirror is not None and mirror.open(str(data[WIDGET_MIME].get("model_id", ""))):
        return data
    return {mime: value for mime, value in data.items() if mime != WIDGET_MIME}


def close(cluster: "Cluster") -> None:
    """This notebook leaves ``cluster``: its widgets stay where they are, greyed out."""
    for mirror in [mirror for mirror in _mirrors if mirror.cluster is cluster]:
        mirror.close()


def _mirror_of(cluster: "Cluster", kernel: Any) -> "NodeWidgets | None":
    """The one of ``cluster``, made with its first widget; None when the cluster has ended."""
    with _making:
        mirror = next((mirror for mirror in _mirrors if mirror.cluster is cluster), None)
        if mirror is None:
            mirror = NodeWidgets(cluster, kernel)
            if not mirror.start():
                return None
            _mirrors.append(mirror)
        return mirror


class NodeWidgets:
    """The widgets of one cluster's nodes in this kernel."""

    def __init__(self, cluster: "Cluster", kernel: Any) -> None:
        self.cluster = cluster
        self._kernel = kernel
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._lock = threading.RLock()
        self._over = False
        self._nodes: dict[str, str] = {}
        """Model -> node, of all that the coordinator has told of."""
        self._closed: dict[str, State] = {}
        """States of those that nothing displays."""
        self._links: dict[str, None] = {}
        """Those of them that link two others."""
        self._open: dict[str, MirroredWidget] = {}
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._run,), name="cluster-node-widgets", daemon=True
        )

    def start(self) -> bool:
        """Learn which widgets are open; True when all are known, False when the cluster does not answer."""
        self._unsubscribe = self.cluster.subscribe(self._on_event)
        if not self.cluster.watch_widgets():
            self._unsubscribe()
            return False
        self._thread.start()
        atexit.register(self._abandon)
        return True

    def open(self, model: str) -> bool:
        """Open ``model`` and all that it shows in this kernel; False when it is not open on its node."""
        with self._lock:
            self._work_off()
            self._open_all([model])
            return model in self._open

    def close(self) -> None:
        """End the thread and grey out the widgets."""
        self._abandon()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        with self._lock:
            self._disable(set(self._nodes.values()))

    def _abandon(self) -> None:
        self._unsubscribe()
        atexit.unregister(self._abandon)
        if self in _mirrors:
            _mirrors.remove(self)
        self._over = True
        self._wake.set()

    # ---- on other threads

    def _on_event(self, event: Any) -> None:
        if isinstance(event, NodeComm | Closing):
            self._put(event)

    def _put(self, item: Any) -> None:
        self._queue.put(item)
        self._wake.set()

    def _run(self) -> None:
        while not self._over:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                self._work_off()

    # ---- with the lock

    def _work_off(self) -> None:
        while not self._over:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return
            if isinstance(item, NodeComm):
                self._take(item)
            elif isinstance(item, Closing):
                self._disable(set(self._nodes.values()))
            else:
                item()

    def _take(self, event: NodeComm) -> None:
        model = event.model
        if event.kind == "dead":
            self._disable({event.node})
        elif event.kind == "close":
            self._forget(model)
        elif event.kind == "open":
            self._forget(model)
            self._nodes[model] = event.node
            self._closed[model] = _with_buffers(event)
            if "source" in event.state:
                self._links[model] = None
                self._open_links()
        elif model in self._open:
            state = _with_buffers(event)
            self._open_all(_references(state))
            self._open[model].change(state)
        elif model in self._closed:
            self._closed[model].update(_with_buffers(event))

    def _forget(self, model: str) -> None:
        widget = self._take_out(model)
        if widget is not None:
            widget.close()

    def _take_out(self, model: str) -> "MirroredWidget | None":
        self._nodes.pop(model, None)
        self._closed.pop(model, None)
        self._links.pop(model, None)
        return self._open.pop(model, None)

    def _open_all(self, models: "Iterator[str] | list[str]") -> None:
        """Open ``models`` and what they refer to, that first: a view asks for its parts at once."""
        wanted = list(models)
        order: dict[str, None] = {}
        while wanted:
            model = wanted.pop()
            if model in self._closed and model not in order:
                order[model] = None
                wanted += _references(self._closed[model])
        for count, model in enumerate(reversed(order), start=1):
            self._open_one(model)
            if count % OPENED_AT_ONCE == 0:
                time.sleep(PAUSE_SECONDS)
        if order:
            self._open_links()

    def _open_one(self, model: str) -> None:
        from notebook_cluster.magics.display.mirrored import MirroredWidget
        from notebook_cluster.widgets.subshell import reroute

        widget = MirroredWidget(model, self._closed.pop(model), self._to_node)
        self._open[model] = widget
        reroute(self._kernel, [widget], self._put)

    def _open_links(self) -> None:
        """Links between widgets are displayed nowhere: one is opened as soon as both its ends are."""
        for model in list(self._links):
            ends = [str(self._closed[model][end][0]).removeprefix(REFERENCE) for end in ("source", "target")]
            if all(end in self._open for end in ends):
                del self._links[model]
                self._open_one(model)

    def _disable(self, nodes: set[str]) -> None:
        """No click on a widget of ``nodes`` does anything any more: let people see it."""
        for model in [model for model, node in self._nodes.items() if node in nodes]:
            widget = self._take_out(model)
            if widget is not None and "disabled" in widget.get_state():
                widget.change({"disabled": True})

    def _to_node(self, model: str, data: dict[str, Any], buffers: list[bytes]) -> None:
        widget = self._open.get(model)
        if widget is None:
            return
        if sum(map(len, buffers)) > MAX_COMM_BYTES:
            widget.change({"description": _TOO_LARGE.format(MAX_COMM_BYTES // 1_000_000)})
            return
        self.cluster.send_to_widget(model, data, buffers)


def _with_buffers(event: NodeComm) -> "State":
    state = dict(event.state)
    for path, buffer in zip(event.buffer_paths, event.buffers, strict=True):
        state[str(path[0])] = buffer
    return state


def _references(value: Any) -> Iterator[str]:
    """The models that a state refers to, in whatever trait, and those that are displayed in an Output widget."""
    if isinstance(value, str):
        if value.startswith(REFERENCE):
            yield value.removeprefix(REFERENCE)
    elif isinstance(value, dict):
        view = value.get(WIDGET_MIME)
        if isinstance(view, dict):
            yield str(view.get("model_id", ""))
        for part in value.values():
            yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)
