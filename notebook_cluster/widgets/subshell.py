"""What lies between a widget and the browser: its messages are handled while a cell runs, and what is sent to it keeps
a pace, and waits for a page that falls behind. ipykernel's private names are used only here.

A kernel handles one shell message at a time, so a click waits for the running cell. ipykernel 7 has subshells, threads
that handle shell messages of their own. Which one a comm's message goes to differs:

- 7.4 and later ask the comm (``_reply_subshell_for``); a comm opened in a cell answers "the main shell".
- 7.0 to 7.3 follow the message's header only. JupyterLab from 4.4 fills it, unless its setting ``commsOverSubshells``
  is off. Here they are taught to ask the comm too.
- before 7 there are none: clicks wait, and :func:`reroute` says so.

On the subshell nothing is done but posting: a subshell that is blocked blocks the kernel's shutdown, and a print or an
``execute`` hook there would go to a message that nobody shows.
"""

import concurrent.futures
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import zmq

Post = Callable[[Callable[[], None]], None]
_subshells: "WeakKeyDictionary[Any, str]" = WeakKeyDictionary()


def reroute(kernel: Any, widgets: Iterable[Any], post: Post) -> bool:
    """Hand every message from the browser for ``widgets`` to ``post`` as a call to make, also while a cell runs.

    Args:
        kernel: the running ``ipykernel`` kernel.
        widgets: open ipywidgets.
        post: called on a kernel thread with a function that handles one message; must return at once.

    Returns:
        False where the kernel has no subshells: the messages then arrive when the running cell has ended.
    """
    subshell = _panel_subshell(kernel)
    for comm in (widget.comm for widget in widgets):
        # Without the pre_execute and post_execute hooks: matplotlib flushes in them, on the main thread only.
        comm.handle_msg = partial(_post_message, comm, post)
        if subshell is not None:
            comm._reply_subshell_for = lambda data, default: subshell
    return subshell is not None


def _post_message(comm: Any, post: Post, message: dict[str, Any]) -> None:
    callback = getattr(comm, "_msg_callback", None)
    if callback is not None:
        post(partial(callback, message))


def _panel_subshell(kernel: Any) -> str | None:
    """Id of the subshell that all panels of ``kernel`` share, made at the first call; None where there is none."""
    channel: Any = getattr(kernel, "shell_channel_thread", None)
    manager: Any = getattr(channel, "manager", None)
    if not hasattr(manager, "_create_subshell"):
        return None
    known = _subshells.get(kernel)
    if known is None or known not in manager.list_subshell():
        made: concurrent.futures.Future[str] = concurrent.futures.Future()
        # Subshells may only be made on the thread that reads the shell channel.
        channel.io_loop.add_callback(_create, kernel, manager, made)
        known = _subshells[kernel] = made.result(5)
    return known


def _create(kernel: Any, manager: Any, made: "concurrent.futures.Future[str]") -> None:
    from ipykernel.comm.comm import BaseComm

    try:
        subshell = manager._create_subshell()
        if not hasattr(BaseComm, "_reply_subshell_for"):
            kernel.shell_stream.on_recv(partial(_ask_the_comm, kernel), copy=False)
        made.set_result(subshell)
    except Exception as error:
        made.set_exception(error)


async def _ask_the_comm(kernel: Any, parts: list[Any]) -> None:
    """Takes a shell message in place of ipykernel 7.0 to 7.3, which then finds in its header where it goes."""
    try:
        parts = _addressed(kernel, parts)
    except Exception:
        kernel.log.warning("cannot address this message to a subshell", exc_info=True)
    await kernel.shell_channel_thread_main(parts)


def _addressed(kernel: Any, parts: list[Any]) -> list[Any]:
    """A message for a comm that names a subshell, with that in its header and signed again; others as they are."""
    session = kernel.session
    identities, rest = session.feed_identities(parts, copy=False)
    message = session.deserialize(rest, content=False, copy=False)
    if message["header"]["msg_type"] not in ("comm_msg", "comm_close"):
        return parts
    content = session.unpack(message["content"])
    comm = kernel.comm_manager.get_comm(content["comm_id"])
    if not hasattr(comm, "_reply_subshell_for"):
        return parts
    message["header"]["subshell_id"] = comm._reply_subshell_for(content.get("data"), None)
    signed = session.serialize(message, identities)
    return [zmq.Frame(part) for part in [*signed, *message["buffers"]]]


class Pace:
    """Lets at most one act pass per ``interval`` seconds; the last one asked for is never lost."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._next = 0.0
        self._asked = False

    def take_from(self, now: float) -> None:
        """An act was made at ``now`` by other means."""
        self._next = now + self.interval

    def ask(self) -> None:
        """Something changed that should be sent."""
        self._asked = True

    def wait(self, now: float) -> float | None:
        """Seconds from ``now`` (monotonic) until the next act is due; None when nothing was asked for."""
        return max(self._next - now, 0.0) if self._asked else None

    def take(self, now: float) -> bool:
        """True once when an act is due at ``now``; the caller then does it."""
        if not self._asked or now < self._next:
            return False
        self._asked, self._next = False, now + self.interval
        return True


PATIENCE_SECONDS = 5.0
"""That a view is waited for, which may have been closed, until what is new is sent all the same."""
PROMPT_SECONDS, PROMPT_STATES = 0.25, 10
"""A view that has drawn so many states in a row, each within that time, keeps up again."""
_MOST_VIEWS = 16


@dataclass
class _SlowView:
    waits_since: float | None = None
    """When the first state that it has not drawn yet was sent, or it has drawn the last one that it has drawn."""
    prompt: int = 0


class SlowViews:
    """The views that fall behind: the next state is sent when each of them has drawn the last one.

    A view that keeps up says nothing, for each message of a page makes a busy kernel look idle. One in which states
    pile up says ``{action: "behind", view}``, and from then on states have a number and each view that has drawn one
    says ``{action: "drawn", view, number}``, until those that were behind are prompt again.
    """

    def __init__(self) -> None:
        self._views: dict[str, _SlowView] = {}
        self._sent = 0

    def hear(self, message: object, now: float) -> bool:
        """False where ``message`` is of something else. Of views that are not waited for it changes nothing."""
        match message:
            case {"action": "behind", "view": str(view)}:
                if len(self._views) < _MOST_VIEWS:
                    self._views.setdefault(view, _SlowView())
            case {"action": "drawn", "view": str(view), "number": int(number)}:
                self._note_drawn(view, number, now)
            case _:
                return False
        return True

    def _note_drawn(self, name: str, number: int, now: float) -> None:
        view = self._views.get(name)
        if view is None or view.waits_since is None:
            return
        has_all = number >= self._sent
        view.prompt = view.prompt + 1 if has_all and now - view.waits_since <= PROMPT_SECONDS else 0
        view.waits_since = None if has_all else now
        if view.prompt >= PROMPT_STATES:
            del self._views[name]

    def number(self, now: float) -> int:
        """Of the state that is sent at ``now``, or 0: nobody shall say that it was drawn. Who was waited for in vain is
        forgotten."""
        self._views = {name: view for name, view in self._views.items() if _patience(view, now) != 0}
        for view in self._views.values():
            view.waits_since = now if view.waits_since is None else view.waits_since
        self._sent += 1
        return self._sent if self._views else 0

    def wait(self, now: float) -> float:
        """Seconds from ``now`` until what is new is sent, unless all have drawn the last state before."""
        return max((_patience(view, now) or 0.0 for view in self._views.values()), default=0.0)


def _patience(view: _SlowView, now: float) -> float | None:
    """Seconds for which ``view`` is waited for; None where it has drawn everything."""
    return None if view.waits_since is None else max(view.waits_since + PATIENCE_SECONDS - now, 0.0)
