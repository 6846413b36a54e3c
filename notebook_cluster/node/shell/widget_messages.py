"""Messages of widgets between this node and the browser, also while its cell runs. ipykernel's private names stay here.

The coordinator addresses a message to this kernel's subshell while a cell runs, and to its main shell otherwise.
ipykernel 7.4 and later would ask the widget's comm instead, which answers with the shell in which it was opened: the
busy one.
"""

from typing import Any

MOST_QUEUED = 100_000
"""Messages that wait for the agent; a widget that changes in a loop makes thousands in a moment."""


def lose_nothing(kernel: Any) -> None:
    """A kernel's output socket drops what is over 1,000 waiting messages, also the last value of a progress bar."""
    thread = getattr(kernel, "iopub_thread", None)
    if thread is None:
        return

    def widen() -> None:
        thread.socket.sndhwm = MOST_QUEUED  # also for connections that are there already

    thread.schedule(widen)


def follow_headers() -> None:
    """Let each message for a widget go where its header says."""
    from ipykernel.comm.comm import BaseComm

    if hasattr(BaseComm, "_reply_subshell_for"):
        BaseComm._reply_subshell_for = _by_header


def _by_header(comm: Any, data: Any, default: Any) -> Any:
    return default
