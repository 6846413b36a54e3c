"""Where displays go: a kernel's frontend, or the terminal; whether somebody is there to click, and to answer; and the
line that says how far something large is.
"""

import sys
import time
import uuid
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from notebook_cluster.magics.display.folding import MIME_TYPE
from notebook_cluster.magics.display.node_widgets import showable
from notebook_cluster.magics.display.slots import Bundle
from notebook_cluster.memory import amount

if TYPE_CHECKING:
    from notebook_cluster.client import Cluster


class Publisher(Protocol):
    """Where displays go."""

    live: bool
    """False where a display cannot be changed: everything is then published once, at the end."""

    def begin(self) -> None:
        """Several displays follow at once."""

    def publish(self, data: Bundle, metadata: Bundle, display_id: str, update: bool) -> None:
        """Make the display ``display_id``, or change it (``update``)."""


class ShellPublisher:
    """Publishes through an IPython shell: a kernel's frontend, or the terminal."""

    def __init__(self, shell: Any, cluster: "Cluster | None" = None) -> None:
        """``cluster``: whose widgets may be shown."""
        self._shell = shell
        self.live = getattr(shell, "kernel", None) is not None
        self._with_tabs = not is_headless(shell)
        self._cluster = None if is_headless(shell) else cluster
        self._prints_are_out = False

    def begin(self) -> None:
        self._prints_are_out = False

    def publish(self, data: Bundle, metadata: Bundle, display_id: str, update: bool) -> None:
        if not self._with_tabs and MIME_TYPE in data:
            data = {mime: value for mime, value in data.items() if mime != MIME_TYPE}
        data = showable(self._cluster, getattr(self._shell, "kernel", None), data)
        # Looked up each time: %%capture swaps the shell's publisher while a cell runs.
        publisher = self._shell.display_pub
        transient = {"display_id": display_id}
        if not self._prints_are_out or not _is_bare(publisher):
            publisher.publish(data=data, metadata=metadata, transient=transient, update=update)
            self._prints_are_out = True
            return
        # ipykernel's publish() waits for stdout and stderr to be sent, 0.3 ms each time: once before several is enough.
        publisher.session.send(
            publisher.pub_socket,
            "update_display_data" if update else "display_data",
            {"data": data, "metadata": metadata, "transient": transient},
            parent=publisher.parent_header,
            ident=publisher.topic,
        )


def _is_bare(publisher: Any) -> bool:
    """True for ipykernel's own publisher with nothing hooked into it."""
    sends = all(hasattr(publisher, name) for name in ("session", "pub_socket", "parent_header", "topic"))
    return sends and not getattr(publisher, "_hooks", True)


_FIRST_AFTER = 0.5
"""Seconds: what is done before needs no bar."""
_EVERY = 0.25
_WIDTH = 24


class ProgressLine:
    """Call it with (bytes done, bytes in all). As a context manager it takes its line away at the end, so that what is
    saved in the notebook is only what was said about the result."""

    def __init__(self, shell: Any, label: str) -> None:
        self._publisher = ShellPublisher(shell)
        self._label = label
        self._display_id = f"nbc-{uuid.uuid4().hex[:12]}"
        self._began = self._last = time.monotonic()
        self._shown = False
        self.note = ""
        """Stands behind the bar: what is being waited for."""

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not self._publisher.live or now - self._began < _FIRST_AFTER or now - self._last < _EVERY:
            return
        self._last = now
        self._show(bar(self._label, done, total, now - self._began) + (f" · {self.note}" if self.note else ""))

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown:
            self._show("")

    def _show(self, text: str) -> None:
        self._publisher.begin()
        self._publisher.publish({"text/plain": text}, {}, self._display_id, self._shown)
        self._shown = True


def bar(label: str, done: int, total: int, seconds: float) -> str:
    """``sending data.csv  ████████░░░░  40 %  4.0 of 10.0 MB, 2.0 MB/s, 3 s left``."""
    share = min(done / total, 1.0) if total else 1.0
    full = round(share * _WIDTH)
    rate = done / seconds if seconds > 0 else 0.0
    left = f", {(total - done) / rate:.0f} s left" if rate > 0 and done < total else ""
    amounts = f"{done / 1e6:,.1f} of {amount(total)}, {amount(rate)}/s{left}"
    return f"{label}  {'█' * full}{'░' * (_WIDTH - full)} {share:4.0%}  {amounts}"


def is_headless(shell: Any) -> bool:
    """True when nobody can click: nbclient and papermill say so by refusing input, a terminal has no widgets."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        return True
    parent = kernel.get_parent() or {}
    return not parent.get("content", {}).get("allow_stdin", True)


def can_ask(shell: Any) -> bool:
    """Whether somebody is there to answer: nbclient and papermill say no; a terminal must be one."""
    if getattr(shell, "kernel", None) is not None:
        return not is_headless(shell)
    return sys.stdin is not None and sys.stdin.isatty()
