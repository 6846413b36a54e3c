"""What a node's shell does otherwise than a notebook's, so that people see what is on the node."""

import threading
from collections.abc import Callable
from typing import Any

from notebook_cluster.node.namespace.variables import describe_namespace
from notebook_cluster.protocol.introspection import FetchVariables, Variables
from notebook_cluster.protocol.wire import Message

_MOST_SECONDS = 5.0
_UP_SECONDS = 0.05


def prepare_shell(ip: Any) -> None:
    """Fast completion, ``name?`` as output of the cell, and nothing kept of what was printed.

    Jedi takes seconds while the node computes and holds up every later question meanwhile (measured: 3 ms without it,
    0.45 s and more with it); what is in the namespace is found without it. A notebook shows ``name?`` in a pager of its
    own, which an answer from a node never reaches. IPython 9 keeps every printed string for ``%notebook``, which nobody
    asks of a node: 175 MB after 100 MB of prints, until the kernel ends. ipykernel makes a record of each debug line
    that no handler shows: 3 % of the time of a short cell.
    """
    completer = getattr(ip, "Completer", None)
    if completer is not None and hasattr(completer, "use_jedi"):
        completer.use_jedi = False
    ip.set_hook("show_in_pager", _print_page, 0)
    log = ip.kernel.log
    if log.handlers:
        log.setLevel(max(log.level, min(handler.level for handler in log.handlers)))
    if hasattr(ip.history_manager, "outputs"):
        ip.history_manager.outputs = _KeepsNothing()


class _KeepsNothing(dict[int, list[Any]]):
    """Stands in for IPython's outputs of each execution."""

    def __missing__(self, execution: int) -> list[Any]:
        return []


def _print_page(ip: Any, data: Any, start: int = 0, screen_lines: int = 0) -> None:
    text = data.get("text/plain", "") if isinstance(data, dict) else data
    print(str(text).rstrip("\n"))


def answer_when_idle(ip: Any, send: Callable[[Message], None], request: FetchVariables) -> None:
    """Send the node's variables as soon as its main thread is between cells. For any thread."""
    loop = getattr(getattr(ip, "kernel", None), "io_loop", None)
    if loop is None:
        # The runtime says hello a moment before the kernel is up.
        later = threading.Timer(_UP_SECONDS, answer_when_idle, (ip, send, request))
        later.daemon = True
        later.start()
        return

    def answer() -> None:
        rows, left_out = describe_namespace(
            ip, request.pattern, everything=request.everything, seconds=min(request.seconds, _MOST_SECONDS)
        )
        send(Variables(ticket=request.ticket, variables=rows, left_out=left_out))

    loop.add_callback(answer)
