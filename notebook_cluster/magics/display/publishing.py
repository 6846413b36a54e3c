"""Where displays go: a kernel's frontend, or the terminal."""

from typing import TYPE_CHECKING, Any, Protocol

from notebook_cluster.magics.display.node_widgets import showable
from notebook_cluster.magics.display.slots import Bundle
from notebook_cluster.magics.display.tabs import MIME_TYPE
from notebook_cluster.magics.session import is_headless

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
