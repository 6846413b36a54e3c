"""Which cell a kernel is in, readable for its agent at any moment: a busy loop answers no message for milliseconds.

The kernel writes the cell's number into a small file of the agent's when the user's code begins, and 0 when it has
ended. A SIGINT in between does what Stop is to do; outside of a cell it would be lost.
"""

import os
from pathlib import Path

CELL_MARK = "NOTEBOOK_CLUSTER_CELL_MARK"
"""The variable in a kernel's environment that names its file: another one in each kernel."""


class CellMark:
    """The agent's end: the file for one kernel, mode 0600."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def cell(self) -> int:
        """The cell's number, 0 outside of cells and when the file says nothing that can be read."""
        data = b"" if self._file is None else os.pread(self._file, 32, 0)
        return int(data) if data.isdigit() else 0

    def close(self) -> None:
        """The kernel is gone. May be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self.path.unlink(missing_ok=True)


class CellMarkWriter:
    """The kernel's end; writes nothing where there is no agent's file."""

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
