"""What the panel sees of a training loop: step, loss and speed, cheap enough to tell at every step."""

import time
from typing import Any

from notebook_cluster.training.runtime import Runtime

READ_SECONDS = 0.25
"""A loss on an accelerator is read at most this often: reading makes the host wait for the device."""

RATE_SECONDS = 0.5


class TrainingProgress:
    """Counts steps and samples of one run of a job and reports them."""

    def __init__(self, runtime: Runtime, job: str = "", run: int = 0) -> None:
        self.step = 0
        self.job, self.run = job, run
        self._runtime = runtime
        self._read_at = 0.0
        self._rate_from = self._waits_from = time.monotonic()
        self._samples = 0.0

    def count(self, loss: Any, samples: float) -> None:
        """One step. ``loss``: a number or an array of one element, or None.

        Raises:
            ValueError: not a number, or more than one element.
        """
        self.step += 1
        self._samples += samples
        now = time.monotonic()
        value = self._value(loss, now)
        elapsed = now - self._rate_from
        if elapsed < RATE_SECONDS:
            self._runtime.report(step=self.step, loss=value, of_run=(self.job, self.run))
            return
        rate = self._samples / elapsed
        self._runtime.report(step=self.step, loss=value, samples_per_s=rate, of_run=(self.job, self.run))
        self._rate_from, self._samples = now, 0.0

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
        if loss is None or isinstance(loss, float | int):
            return loss
        if _slow_to_read(loss):
            if now - self._read_at < READ_SECONDS:
                return None
            self._read_at = now
        size = getattr(loss, "numel", None)
        count = size() if callable(size) else getattr(loss, "size", 1)
        if count != 1:
            raise ValueError(f"loss has {count} values: pass one number, for example loss.mean()")
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
