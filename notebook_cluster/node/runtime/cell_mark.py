"""Tells the agent without a message which cell is running: see :mod:`notebook_cluster.agent.kernels.cell_mark`."""

import os


class CellMark:
    """Writes to the agent's file; to none where there is no agent's file."""

    def __init__(self, path: str) -> None:
        self._file: int | None = None
        if path:
            try:
                self._file = os.open(path, os.O_WRONLY)
            except OSError:
                pass  # the agent asks the runtime then

    def set(self, cell: int) -> None:
        """The user's code of ``cell`` begins, or (0) has ended."""
        if self._file is not None:
            os.pwrite(self._file, b"%020d" % cell, 0)
