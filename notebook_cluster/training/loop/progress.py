"""What is told of a training loop: step, loss and speed for the panel, cheap enough to tell at every step, and what
``nc.report()`` says of the global model inside ``with sync.global_model():``.

Only what the user has measured is told of that: a mean of the nodes' losses is not the loss of the model that they
share.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from notebook_cluster.protocol.node import GlobalMeasured
from notebook_cluster.training.runtime import Runtime

READ_SECONDS = 0.25
"""A loss on an accelerator is read at most this often: reading makes the host wait for the device."""

RATE_SECONDS = 0.5


class TrainingProgress:
    """Counts steps and samples of one run of a job and reports them."""

    def __init__(self, runtime: Runtime, job: str = "", run: int = 0) -> None:
        self.step = 0
        self.all_samples = 0.0
        """Of all steps, as the sync object was told."""
        self.job, self.run = job, run
        self._runtime = runtime
        self._read_at = 0.0
        self._unread: Any = None
        """The loss of the last step, where it was too soon to read it."""
        self._rate_from = self._waits_from = time.monotonic()
        self._samples = 0.0
        runtime.report(step=0)  # those before are of another run

    def count(self, loss: Any, samples: float) -> None:
        """One step. ``loss``: a number or an array of one element, or None.

        Raises:
            ValueError: not a number, or more than one element.
        """
        self.step += 1
        self._samples += samples
        self.all_samples += samples
        now = time.monotonic()
        value = self._value(loss, now)
        elapsed = now - self._rate_from
        if elapsed < RATE_SECONDS:
            self._runtime.report(step=self.step, loss=value, of_run=(self.job, self.run))
            return
        rate = self._samples / elapsed
        self._runtime.report(step=self.step, loss=value, samples_per_s=rate, of_run=(self.job, self.run))
        self._rate_from, self._samples = now, 0.0

    def tell_loss(self, loss: float) -> None:
        """The loss of the last step, where it is known only after :meth:`count`."""
        self._runtime.report(step=self.step, loss=loss, of_run=(self.job, self.run))

    def tell_unread(self) -> None:
        """After a round, for which the device was waited for in any case: the loss that :meth:`count` has not read."""
        loss, self._unread = self._unread, None
        if loss is not None:
            self.tell_loss(_number(loss))

    def waiting(self, what: str) -> None:
        """The main thread waits for ``what``; empty: it goes on, and the wait does not count as slow training."""
        self._runtime.report(waiting=what)
        now = time.monotonic()
        if what:
            self._waits_from = now
        else:
            # Rounds may follow each other faster than the rate is told, so the time of a wait is taken out of it.
            self._rate_from += now - self._waits_from

    def _value(self, loss: Any, now: float) -> float | None:
        self._unread = None
        if loss is None or isinstance(loss, float | int):
            return loss
        size = getattr(loss, "numel", None)
        count = size() if callable(size) else getattr(loss, "size", 1)
        if count != 1:
            raise ValueError(f"loss has {count} values: pass one number, for example loss.mean()")
        if _slow_to_read(loss):
            if now - self._read_at < READ_SECONDS:
                self._unread = loss
                return None
            self._read_at = now
        return _number(loss)


def _number(loss: Any) -> float:
    try:
        return float(loss.item() if hasattr(loss, "item") else loss)
    except (TypeError, ValueError):
        raise ValueError(
            f"loss={loss!r}: pass one number, for example the loss that backward() was called on"
        ) from None


def _slow_to_read(loss: Any) -> bool:
    """True for a torch tensor on an accelerator and for mlx arrays, which are computed when they are read."""
    device = getattr(loss, "device", None)
    return getattr(device, "type", "cpu") != "cpu" or type(loss).__module__.startswith("mlx")


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
        """The blocks that are open on this thread, the innermost last."""


_blocks = _Blocks()


def open_block() -> GlobalModelBlock | None:
    """The innermost block that is open on this thread, or None."""
    return _blocks.open[-1] if _blocks.open else None
