"""TensorBoard's event files, written with TensorBoard's own record writer: a folder for each node and for the global
model.

Not with its ``EventFileWriter``: that has a thread for each file, which loses the error of a full disk.
"""

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from notebook_cluster.client.connection import ClusterError

EVENT_FILE = "events.out.tfevents."
"""With which the name of each begins."""
_VERSION = "brain.Event:2"
_numbers = itertools.count()


class EventFiles:
    """Scalars in ``folder``, each curve below the folder of its run and its node.

    Raises:
        ClusterError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise ClusterError("TensorBoard is not installed here: pip install tensorboard") from None
        self._event, self._summary, self._writer = Event, Summary, RecordWriter
        self._folder = folder
        self._open: dict[tuple[str, str], Any] = {}

    def add(self, place: tuple[str, str], tag: str, step: int, time: float, value: float) -> None:
        """One point of curve ``tag`` below ``place``, at ``time`` (seconds since 1970); kept as float32.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        writer = self._open.get(place) or self._begin(place)
        told = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
        writer.write(self._event(wall_time=time, step=step, summary=told).SerializeToString())

    def flush(self) -> None:
        """All points so far are in the files; raises as :meth:`add`."""
        for writer in self._open.values():
            writer.flush()

    def close(self) -> None:
        """As :meth:`flush`; what comes later goes to new files."""
        writers, self._open = self._open, {}
        for writer in writers.values():
            writer.close()

    def _begin(self, place: tuple[str, str]) -> Any:
        folder = self._folder.joinpath(*place)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{EVENT_FILE}{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        writer = self._open[place] = self._writer(open(folder / name, "xb"))  # noqa: SIM115
        writer.write(self._event(wall_time=time.time(), file_version=_VERSION).SerializeToString())
        return writer
