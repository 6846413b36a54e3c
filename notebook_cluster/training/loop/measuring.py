"""What is said about the global model: ``nc.report()`` inside ``with sync.global_model():``.

Only what the user has measured is told: a mean of the nodes' losses is not the loss of the model that they share.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from notebook_cluster.protocol.node import GlobalMeasured


class GlobalModelBlock:
    """One block in which the model holds the global parameters of run ``run`` of ``job`` after round ``round``.

    ``step``: steps that this node had taken when it took over that round.
    """

    def __init__(self, job: str, run: int, round: int, step: int) -> None:
        self._job, self._run, self._round, self._step = job, run, round, step
        self._values: dict[str, Any] = {}

    def note(self, values: dict[str, Any], step: int | None = None) -> None:
        """Keep ``values``: numbers, or one-element tensors that are read at the end. The last one of a name counts."""
        self._values.update(values)
        if step is not None:
            self._step = step

    @contextlib.contextmanager
    def opened(self, send: Callable[[GlobalMeasured], None]) -> Iterator[None]:
        """Until the end of the ``with`` block ``nc.report()`` notes its numbers here; a block that ends well sends
        what was noted, if anything was."""
        _blocks.open.append(self)
        try:
            yield
        finally:
            _blocks.open.remove(self)
        if self._values:
            values = {name: float(v.item() if hasattr(v, "item") else v) for name, v in self._values.items()}
            told = GlobalMeasured(
                job=self._job, run=self._run, round=self._round, step=self._step, time=time.time(), values=values
            )  # fmt: skip
            send(told)


class _Blocks(threading.local):
    def __init__(self) -> None:
        self.open: list[GlobalModelBlock] = []
        """Of this thread, the innermost last."""


_blocks = _Blocks()


def open_block() -> GlobalModelBlock | None:
    """The innermost block that is open on this thread, or None."""
    return _blocks.open[-1] if _blocks.open else None
