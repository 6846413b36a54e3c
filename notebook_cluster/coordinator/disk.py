"""A journal that cannot be written: what is held until there is room, and the line about it."""

import asyncio
import errno
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_cluster.coordinator.service import Coordinator

_FULL = (errno.ENOSPC, errno.EDQUOT)


class Disk:
    """Of one coordinator: agents keep what they said, people are told, and all goes on when there is room."""

    def __init__(self, hub: "Coordinator") -> None:
        self._hub = hub
        hub.log.on_holding = self._holding
        self._told = False

    def trouble(self, error: OSError | None = None) -> str:
        """One line: which disk, and what helps."""
        journal = self._hub.log
        folder, error = journal.path.parent, error or journal.trouble
        goes_on = "rounds and new cells wait, and go on by themselves"
        if error is None or error.errno in _FULL:
            return f"the disk of {folder} is full ({_free(str(folder))}): {goes_on} when there is room (1 MB is enough)"
        return f"{journal.path} cannot be written ({error.strerror or error}): {goes_on} when it can"

    def _holding(self, holding: bool) -> None:
        for link in self._hub.peers.links.values():
            link.dialer.hold(holding)
        if holding and self._hub.log.trouble is None:
            return  # a disk that is slow for a moment is no news
        if holding != self._told:
            self._told = holding
            text = self.trouble() if holding else f"{self._hub.log.path} is written again: everything goes on"
            # Not in the middle of what could not be written.
            asyncio.get_running_loop().call_soon(self._say, "error" if holding else "info", text)

    def _say(self, level: str, text: str) -> None:
        self._hub.tell(level, text)
        running = self._hub.state.running()
        if running is not None:
            self._hub.cells.changed(running.id, text)


def _free(folder: str) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free"
    except OSError as error:
        return str(error)
