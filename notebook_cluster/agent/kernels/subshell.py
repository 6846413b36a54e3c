"""The second shell of a kernel, on which it answers while its main shell runs a cell (ipykernel 7 and later)."""

import json
import logging
from collections.abc import Callable, Sequence

from notebook_cluster.protocol.peer import KernelChannel

log = logging.getLogger(__name__)

MOST_HELD = 1000
"""Messages that wait while the subshell is made; those after them are dropped."""
FEATURE = "kernel subshells"

Request = Callable[[KernelChannel, str, dict[str, object]], None]


class Subshell:
    """Makes one subshell when the first message needs it, and addresses messages to it.

    A kernel without subshells gets the messages on its main shell: it answers them when its cell has ended.

    Args:
        request: sends the kernel a request of the agent's own; its reply comes back to :meth:`on_reply`.
        deliver: signs the parts of a message and sends them on the shell channel.
    """

    def __init__(self, request: Request, deliver: Callable[[Sequence[bytes]], None]) -> None:
        self._request = request
        self._deliver = deliver
        self._held: list[Sequence[bytes]] = []
        self._identity = ""
        self._main_runs = False
        self._asked = False
        self._supported: bool | None = None
        self._settled = False
        self.dropped = 0

    def send(self, parts: Sequence[bytes]) -> None:
        """Deliver ``parts`` on the subshell, in order, as soon as it is there."""
        if self._settled:
            self._pass_on(parts)
            return
        if len(self._held) >= MOST_HELD:
            self.dropped += 1
            return
        self._held.append(parts)
        if not self._asked:
            self._asked = True
            # On control it is answered at once, and says whether there are subshells; on shell it proves that the main
            # loop runs: a subshell that is made before that is broken.
            self._request("control", "kernel_info_request", {})
            if not self._main_runs:
                self._request("shell", "kernel_info_request", {})

    def main_runs(self) -> None:
        """The main shell has answered something."""
        if not self._main_runs:
            self._main_runs = True
            self._make_if_ready()

    def on_reply(self, channel: KernelChannel, kind: str, content: bytes) -> None:
        """A reply to a request of the agent's own."""
        if channel == "shell":
            self.main_runs()
        elif kind == "kernel_info_reply" and self._asked and self._supported is None:
            features = _field(content, "supported_features")
            self._supported = isinstance(features, list) and FEATURE in features
            if self._supported:
                self._make_if_ready()
            else:
                self._settle("")
        elif kind == "create_subshell_reply" and not self._settled:
            identity = _field(content, "subshell_id")
            if not isinstance(identity, str):
                log.warning("a kernel could not make a subshell: %s", content[:200])
            self._settle(identity if isinstance(identity, str) else "")

    def _make_if_ready(self) -> None:
        if self._main_runs and self._supported and not self._settled:
            self._request("control", "create_subshell_request", {})

    def _settle(self, identity: str) -> None:
        self._settled, self._identity = True, identity
        held, self._held = self._held, []
        for parts in held:
            self._pass_on(parts)

    def _pass_on(self, parts: Sequence[bytes]) -> None:
        if self._identity:
            try:
                header = json.loads(parts[0])
            except ValueError:
                header = None
            if not isinstance(header, dict):
                self.dropped += 1
                return
            parts = [json.dumps({**header, "subshell_id": self._identity}).encode(), *parts[1:]]
        self._deliver(parts)


def _field(content: bytes, name: str) -> object:
    try:
        value = json.loads(content)
    except ValueError:
        return None
    return value.get(name) if isinstance(value, dict) else None
