"""Which cell a kernel is in, readable at any moment: in a busy loop its runtime needs milliseconds to answer.

The kernel writes the cell's number into a small file of ours when the user's code begins, and 0 when it has ended
(:class:`notebook_cluster.node.runtime.cell_mark.CellMark`). A SIGINT in between does what Stop is to do; outside of
a cell it would be lost.
"""

import os
from pathlib import Path


class CellMark:
    """The file for one kernel, mode 0600; the kernel finds its path in NOTEBOOK_CLUSTER_CELL_MARK."""

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
