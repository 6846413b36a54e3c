"""Widgets of nodes: what their kernels say of them goes to views, what the browser says goes back to the node."""

import secrets
from typing import TYPE_CHECKING, Any

from notebook_cluster.coordinator import jupyter
from notebook_cluster.coordinator.kernels.comm_captures import OutputCaptures
from notebook_cluster.coordinator.kernels.comm_updates import WidgetUpdates
from notebook_cluster.coordinator.kernels.widget_models import Model, NodeModels
from notebook_cluster.coordinator.view_server import View
from notebook_cluster.journal.state import Node
from notebook_cluster.link import Drops
from notebook_cluster.protocol.comms import MAX_COMM_BYTES, CommToNode, NodeComm
from notebook_cluster.protocol.peer import ToKernel
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import WidgetView
from notebook_cluster.security.sanitise import safe_name

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

COMM_KINDS = frozenset(("comm_open", "comm_msg", "comm_close"))
TARGET = "jupyter.widget"
MOST_MESSAGE_BYTES = 10 * 1000 * 1000
"""Of one comm message of a node; more is not even decoded."""
MOST_WAITING = 100
"""Messages of the browser to one widget that wait until its node has handled those before."""
_LONGEST_ID = 200


class PendingComm:
    """What the browser has said to one widget and its node has not handled yet."""

    def __init__(self) -> None:
        self.handled_now = ""
        """Message id; empty: none is on its way."""
        self.waiting: list[CommToNode] = []

    def add(self, request: CommToNode) -> None:
        """Append, or merge with the last one when both are updates: only the newest value of a slider matters."""
        last = self.waiting[-1] if self.waiting else None
        if last is not None and _plain_update(last) and _plain_update(request):
            state = {**last.data["state"], **request.data["state"]}
            self.waiting[-1] = CommToNode(model=request.model, data={**request.data, "state": state})
        elif len(self.waiting) >= MOST_WAITING:
            raise RequestError(f"{MOST_WAITING} clicks on this widget wait for its node already: it is busy with one")
        else:
            self.waiting.append(request)


class Comms:
    """The widgets of all nodes of a cluster."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        self._nodes: dict[str, NodeModels] = {}
        self._public: dict[str, Model] = {}
        self._errands: dict[str, PendingComm] = {}
        """By the widget's public id."""
        self._handled: dict[str, str] = {}
        """Message id -> public id, until the node says that it has handled the message."""
        self._updates = WidgetUpdates(self._to_views)
        self._captures = OutputCaptures(self._captured)
        self._dropped = Drops()

    # ---- from nodes

    def on_message(self, node: Node, kind: str, parts: list[bytes]) -> None:
        """A comm message that the kernel of ``node`` published. Raises msgspec.DecodeError."""
        size = sum(len(part) for part in parts)
        if size > MOST_MESSAGE_BYTES:
            self._dropped.note("size", "a %s of %s was left out: %d bytes", kind, node.name, size)
            return
        content = jupyter.content(parts)
        comm_id, data = content.get("comm_id"), content.get("data")
        if not isinstance(comm_id, str) or not 0 < len(comm_id) <= _LONGEST_ID or not isinstance(data, dict):
            self._dropped.note("shape", "a %s of %s is not one of a widget", kind, node.name)
            return
        models = self._models(node)
        if kind == "comm_close":
            self._close(models, comm_id)
        elif kind == "comm_open":
            if content.get("target_name") == TARGET:
                self._open(models, comm_id, data, parts[4:])
        elif data.get("method") in ("update", "echo_update"):
            self._update(models, comm_id, data, parts[4:])

    def _models(self, node: Node) -> NodeModels:
        models = self._nodes.get(node.name)
        if models is None or models.incarnation != node.incarnation:
            if models is not None:
                self.node_gone(node.name)
            models = NodeModels(node.name, node.incarnation, self._hub.state.cluster_id)
            self._nodes[node.name] = models
        return models

    def _open(self, models: NodeModels, comm_id: str, data: dict[str, Any], buffers: list[bytes]) -> None:
        self._close(models, comm_id)
        model = models.open(comm_id, _with_buffers(data, buffers))
        if model is None:
            self._dropped.note("many", "widgets of %s are left out: too many are open", models.node)
            return
        self._public[model.public] = model
        self._to_views(model.event("open", model.state))

    def _update(self, models: NodeModels, comm_id: str, data: dict[str, Any], buffers: list[bytes]) -> None:
        state, model = _with_buffers(data, buffers), models.get(comm_id)
        if model is None:
            return
        caught = list(model.state.get("outputs") or [])
        found = models.update(comm_id, state)
        if isinstance(state.get("msg_id"), str):
            self._captures.listen(model, state["msg_id"])
        if found is not None and "outputs" in found[1]:
            models.set(model, {"outputs": self._captures.merged(model, caught, model.state["outputs"])})
        # What the browser has just said itself comes back as an echo.
        if found is not None and data["method"] == "update":
            self._updates.add(*found)

    def _close(self, models: NodeModels, comm_id: str) -> None:
        model = models.close(comm_id)
        if model is not None:
            self._forget(model)
            self._to_views(model.event("close", {}))

    def _forget(self, model: Model) -> None:
        self._public.pop(model.public, None)
        self._updates.forget(model)
        self._captures.forget(model)
        errand = self._errands.pop(model.public, None)
        if errand is not None:
            self._handled.pop(errand.handled_now, None)

    def catches(self, node: Node, message_id: str, kind: str, content: dict[str, Any]) -> bool:
        """True for output that goes into an Output widget instead of below the cell."""
        if self._captures.take(node.name, message_id, kind, content, self.view_of(node.name)):
            return True
        if kind == "error" and message_id in self._handled and not self._hub.cells.runs.is_busy(node.name):
            # No cell shows it.
            name, value = safe_name(content.get("ename")), safe_name(content.get("evalue"))
            self._hub.tell("warning", f"{node.name}: the callback of a widget raised {name}: {value}")
        return False

    def _captured(self, model: Model, outputs: list[dict[str, Any]]) -> None:
        """An Output widget has caught output."""
        models = self._nodes.get(model.node)
        if models is not None and models.set(model, {"outputs": outputs}):
            self._updates.add(model, {"outputs"})

    def node_gone(self, name: str) -> None:
        """The kernel of node ``name`` has ended: its widgets act no more."""
        models = self._nodes.pop(name, None)
        if models is None:
            return
        for model in models.all():
            self._forget(model)
        self._to_views(NodeComm(kind="dead", node=name))

    # ---- to views

    def view_of(self, name: str) -> WidgetView:
        """How displays of node ``name`` name a widget: see :func:`notebook_cluster.security.safe_bundle`."""
        return self._models(self._hub.state.nodes[name]).view

    def watch(self, view: View) -> None:
        """Every open widget to ``view``, then what changes."""
        for model in self._public.values():
            self._hub.views.send(view, model.event("open", model.state))
            model.changed.clear()
        view.watches_widgets = True

    def _to_views(self, event: NodeComm) -> None:
        for view in self._hub.views.views.values():
            if view.watches_widgets:
                self._hub.views.send(view, event)

    # ---- to nodes

    def send(self, request: CommToNode) -> None:
        """Hand on what the browser says to a widget.

        Raises:
            RequestError: the widget is not open, or its node does not keep up.
        """
        if request.model not in self._public:
            raise RequestError("this widget is no longer open: its node was restarted or has closed it")
        if sum(map(len, request.buffers)) > MAX_COMM_BYTES:
            raise RequestError(f"over {MAX_COMM_BYTES // 1_000_000} MB for a widget: %cluster send FILE sends files")
        errand = self._errands.setdefault(request.model, PendingComm())
        errand.add(request)
        if not errand.handled_now:
            self._next(request.model, errand)

    def on_idle(self, node: str, message_id: str) -> None:
        """``node`` has handled a message; ``message_id`` may be any."""
        public = self._handled.get(message_id)
        if public is not None and self._public[public].node == node:
            del self._handled[message_id]
            self._next(public, self._errands[public])

    def _next(self, public: str, errand: PendingComm) -> None:
        errand.handled_now = ""
        model = self._public.get(public)
        if not errand.waiting or model is None:
            self._errands.pop(public, None)
            return
        request = errand.waiting.pop(0)
        node = self._hub.state.nodes[model.node]
        errand.handled_now = f"comm-{secrets.token_hex(8)}"
        self._handled[errand.handled_now] = public
        body = {"comm_id": model.comm_id, "data": request.data}
        parts = jupyter.message("comm_msg", errand.handled_now, self._hub.state.cluster_id, body)
        # An idle node handles it where it runs cells; a busy one on its subshell, beside the cell.
        busy = self._hub.cells.runs.is_busy(node.name)
        message = ToKernel(node=node.name, incarnation=node.incarnation, channel="shell", subshell=busy)
        self._hub.peers.send(node.peer, message, [*parts, *request.buffers])

    def close(self) -> None:
        self._updates.close()


def _with_buffers(data: dict[str, Any], buffers: list[bytes]) -> dict[str, Any]:
    """The state in ``data`` with buffers that are the whole value of a trait; others are left out."""
    state, paths = data.get("state"), data.get("buffer_paths")
    if not isinstance(state, dict):
        return {}
    for path, buffer in zip(paths if isinstance(paths, list) else [], buffers, strict=False):
        if isinstance(path, list) and len(path) == 1 and isinstance(path[0], str):
            state[path[0]] = bytes(buffer)
    return state


def _plain_update(request: CommToNode) -> bool:
    data = request.data
    return data.get("method") == "update" and isinstance(data.get("state"), dict) and not request.buffers
