"""Widgets of nodes: what their kernels say of them goes to views, what the browser says goes back to the node."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from notebook_cluster.coordinator.core import Core, Departure, MembershipWatcher
from notebook_cluster.coordinator.delivery import Delivery, kernel_message, read_content
from notebook_cluster.coordinator.kernels.widget_models import Model, NodeModels, OutputCaptures
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.journal.state import Node
from notebook_cluster.link import Drops
from notebook_cluster.protocol.hand_over import OpenWidget
from notebook_cluster.protocol.interaction import MAX_COMM_BYTES, CommToNode, NodeComm
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.security import WidgetView
from notebook_cluster.security.sanitise import safe_name

TARGET = "jupyter.widget"
MOST_MESSAGE_BYTES = 10 * 1000 * 1000
"""Of one comm message of a node; more is not even decoded."""
MOST_WAITING = 100
"""Messages of the browser to one widget that wait until its node has handled those before."""
_LONGEST_ID = 200
FLUSH_SECONDS = 0.2
MOST_PER_FLUSH = 10
BYTES_PER_SECOND = 100_000
LONGEST_PAUSE = 3.0
"""Seconds between two batches of changes to views, however large one is."""


class WidgetUpdates:
    """Changes of widgets on their way to views: only the newest value of each trait, no faster than a notebook takes.

    jupyter_server drops what comes faster than 1,000 messages or 1 MB a second, and the text of a cell is shown beside
    the widgets: so 50 changes and about 100 KB a second for all widgets of all nodes together. ``send`` gets one event
    for each widget that changed, the one that has waited longest first.
    """

    def __init__(self, send: Callable[[NodeComm], None]) -> None:
        self._send = send
        self._waiting: dict[str, Model] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_flush = 0.0

    def add(self, model: Model, names: set[str]) -> None:
        """The traits ``names`` of ``model`` have changed."""
        model.changed |= names
        self._waiting.setdefault(model.public, model)
        if self._timer is None:
            loop = asyncio.get_running_loop()
            # Not at once: a callback on a node changes several traits one after the other.
            self._timer = loop.call_at(max(self._next_flush, loop.time() + 0.005), self._flush)

    def forget(self, model: Model) -> None:
        """It is closed."""
        self._waiting.pop(model.public, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _flush(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        size = 0
        for public in list(self._waiting)[:MOST_PER_FLUSH]:
            model = self._waiting.pop(public)
            size += sum(model.sizes.get(name, 0) for name in model.changed)
            state: dict[str, Any] = {name: model.state[name] for name in model.changed if name in model.state}
            model.changed.clear()
            if state:
                self._send(model.event("update", state))
            if size > BYTES_PER_SECOND * FLUSH_SECONDS:
                break
        self._next_flush = loop.time() + min(LONGEST_PAUSE, max(FLUSH_SECONDS, size / BYTES_PER_SECOND))
        if self._waiting:
            self._timer = loop.call_at(self._next_flush, self._flush)


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


class Comms(MembershipWatcher):
    """The widgets of all nodes of a cluster."""

    def __init__(self, core: Core, *, delivery: Delivery, views: ViewServer, is_busy: Callable[[str], bool]) -> None:
        """``is_busy(node)``: it runs a cell, or replays an earlier one."""
        self._core = core
        self._delivery = delivery
        self._view_server = views
        self._is_busy = is_busy
        self._nodes: dict[str, NodeModels] = {}
        self._public: dict[str, Model] = {}
        self._pending: dict[str, PendingComm] = {}
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
        content = read_content(parts)
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
                self._kernel_gone(node.name)
            models = NodeModels(node.name, node.incarnation, self._core.state.cluster_id)
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
        pending = self._pending.pop(model.public, None)
        if pending is not None:
            self._handled.pop(pending.handled_now, None)

    def catches(self, node: Node, message_id: str, kind: str, content: dict[str, Any]) -> bool:
        """True for output that goes into an Output widget instead of below the cell."""
        if self._captures.take(node.name, message_id, kind, content, self.view_of(node.name)):
            return True
        if kind == "error" and message_id in self._handled and not self._is_busy(node.name):
            # No cell shows it.
            name, value = safe_name(content.get("ename")), safe_name(content.get("evalue"))
            self._core.tell("warning", f"{node.name}: the callback of a widget raised {name}: {value}")
        return False

    def _captured(self, model: Model, outputs: list[dict[str, Any]]) -> None:
        """An Output widget has caught output."""
        models = self._nodes.get(model.node)
        if models is not None and models.set(model, {"outputs": outputs}):
            self._updates.add(model, {"outputs"})

    def node_down(self, departure: Departure) -> None:
        if departure.dead:
            self._kernel_gone(departure.node)

    def _kernel_gone(self, name: str) -> None:
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
        return self._models(self._core.state.nodes[name]).view

    def watch(self, view: View) -> None:
        """Every open widget to ``view``, then what changes."""
        for model in self._public.values():
            self._view_server.send(view, model.event("open", model.state))
            model.changed.clear()
        view.watches_widgets = True

    def _to_views(self, event: NodeComm) -> None:
        for view in self._view_server.views.values():
            if view.watches_widgets:
                self._view_server.send(view, event)

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
        pending = self._pending.setdefault(request.model, PendingComm())
        pending.add(request)
        if not pending.handled_now:
            self._next(request.model, pending)

    def on_idle(self, node: str, message_id: str) -> None:
        """``node`` has handled a message; ``message_id`` may be any."""
        public = self._handled.get(message_id)
        if public is not None and self._public[public].node == node:
            del self._handled[message_id]
            self._next(public, self._pending[public])

    def _next(self, public: str, pending: PendingComm) -> None:
        pending.handled_now = ""
        model = self._public.get(public)
        if not pending.waiting or model is None:
            self._pending.pop(public, None)
            return
        request = pending.waiting.pop(0)
        node = self._core.state.nodes[model.node]
        pending.handled_now = f"comm-{secrets.token_hex(8)}"
        self._handled[pending.handled_now] = public
        body = {"comm_id": model.comm_id, "data": request.data}
        parts = kernel_message("comm_msg", pending.handled_now, self._core.state.cluster_id, body)
        # An idle node handles it where it runs cells; a busy one on its subshell, beside the cell.
        busy = self._is_busy(node.name)
        self._delivery.to_kernel(node.name, "shell", [*parts, *request.buffers], subshell=busy)

    def close(self) -> None:
        self._updates.close()

    # ---- from one coordinator to the next

    def moved(self) -> list[OpenWidget]:
        """Every open widget."""
        return [
            OpenWidget(
                node=model.node, incarnation=models.incarnation, comm_id=model.comm_id, public=model.public,
                state=msgspec.msgpack.encode(model.state), refusal=model.refusal,
                catches=self._captures.message_of(model),
            )
            for models in self._nodes.values()
            for model in models.all()
        ]  # fmt: skip

    def restore(self, widgets: list[OpenWidget]) -> None:
        """Those that another coordinator had, of kernels that still run."""
        for widget in widgets:
            node = self._core.state.nodes.get(widget.node)
            if node is not None and node.incarnation == widget.incarnation:
                model = self._models(node).restore(widget)
                self._public[model.public] = model
                self._captures.listen(model, widget.catches)


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
