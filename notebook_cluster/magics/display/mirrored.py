"""A widget of a node as a widget of the notebook's kernel: the browser cannot tell the difference.

It is an ipywidget, so that a page that is loaded again gets it with all the others from the kernel.
"""

from collections.abc import Callable, Iterable
from typing import Any

from ipywidgets import Widget

State = dict[str, Any]


class MirroredWidget(Widget):  # type: ignore[misc]
    """Opens a comm with the id ``model``.

    Args:
        model: the id that the coordinator gave it.
        state: its whole state, bytes included.
        to_node: called with (model, data, buffers) of each message of the browser.
    """

    def __init__(self, model: str, state: State, to_node: Callable[[str, dict[str, Any], list[bytes]], None]) -> None:
        self._state = state
        self._to_node = to_node
        for name in ("_model_name", "_model_module", "_model_module_version"):
            self.set_trait(name, state[name])
        super().__init__(model_id=model)

    def get_state(self, key: str | Iterable[str] | None = None, drop_defaults: bool = False) -> State:
        """As the node and the browser have set it last."""
        wanted = set(self._state) if key is None else {key} if isinstance(key, str) else set(key)
        return {name: value for name, value in self._state.items() if name in wanted}

    def change(self, state: State) -> None:
        """The node has changed it."""
        self._state.update(state)
        self.send_state(list(state))

    def _handle_msg(self, message: dict[str, Any]) -> None:
        data = message["content"]["data"]
        method, state = data.get("method"), data.get("state")
        if method == "request_state":
            self.send_state()
            return
        if method == "update" and isinstance(state, dict) and not data.get("buffer_paths"):
            self._state.update({name: value for name, value in state.items() if name in self._state})
        if method in ("update", "custom"):
            self._to_node(self.model_id, data, [bytes(buffer) for buffer in message.get("buffers") or ()])
