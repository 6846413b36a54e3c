"""What panels show of a node: the newest reported values, a thinned loss curve, memory of the accelerator.

The main thread only stores; the I/O thread sends, at most four times a second. Both touch these objects without a lock:
each access is one atomic step of the interpreter, and a value that comes too late for one message is in the next.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from notebook_cluster.protocol.node import RunLosses, Telemetry

PERIOD = 0.25
"""Seconds between two messages, and between two reads of a value that lies on an accelerator (a read waits for it)."""
MAX_HISTORY = 50
MAX_POINTS = 1_000
"""Of all names of nc.report() in one message: with more than 20 each has fewer than MAX_HISTORY."""
MAX_SCALARS = 64
MAX_RUNS = 16
"""Of which losses are told at once."""
Run = tuple[str, int]
"""A job and its run; ("", 0): what nc.report() says."""
Point = tuple[int, float, float]
"""Step, time, value."""
_NO_RUN: Run = ("", 0)


def as_number(name: str, value: Any) -> float | Any:
    """``value`` as a float, or a detached one-element tensor of an accelerator to be read later.

    Raises:
        TypeError: it is no number; names ``name``.
    """
    if type(value) is float or type(value) is int:
        return value
    if callable(getattr(value, "item", None)):
        size = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", 0)
        if size != 1:
            raise TypeError(f"report: {name} has {size} elements: a single number is needed, for example {name}.mean()")
        if type(value).__module__.startswith("mlx"):
            return value  # lazy: reading it computes it
        kind = getattr(getattr(value, "device", None), "type", "cpu")
        return _read(name, value) if kind == "cpu" else value.detach()
    if isinstance(value, (int, float)):
        return float(value)
    raise TypeError(f"report: {name} is a {type(value).__name__}: a number is needed")


def _read(name: str, value: Any) -> float:
    try:
        return float(value.item()) if hasattr(value, "item") else float(value)
    except (TypeError, ValueError):
        raise TypeError(f"report: {name} is a {type(value).__name__} of {value!r:.40}: a number is needed") from None


class TelemetryKeeper:
    """Collects on the main thread, sends on the I/O thread (``tick``) and at a cell's end (``flush``)."""

    def __init__(self, device: str, send: Callable[[Telemetry], None]) -> None:
        self._device = device
        self._send = send
        self._step: int | None = None
        self._cell = self._step_cell = 0
        self._newest: dict[str, float] = {}
        self._unread: dict[str, tuple[int, Any]] = {}
        self._read_at = 0.0
        self._samples_per_s: float | None = None
        self._speed = 0.0
        self._waiting = ""
        self._threads, self._threads_chosen = 0, False
        self._histories: dict[Run, deque[Point]] = {}
        self._reported: dict[str, deque[Point]] = {}
        self._unread_run = _NO_RUN
        self._memory: tuple[int | None, int | None] = (None, None)
        self._changed = False
        self._sent_at = 0.0
        self._of_steps: int | None = None
        self.progress: Callable[[], tuple[int, float | None]] = lambda: (0, None)
        """Epoch of the loop that trains, and how much of this node's part of it is given out."""

    def report(
        self,
        *,
        step: int | None = None,
        loss: Any = None,
        samples_per_s: Any = None,
        waiting: str | None = None,
        of_steps: int | None = None,
        run: Run | None = None,
        scalars: dict[str, Any] | None = None,
    ) -> None:
        """Keep the newest values; nothing is kept when one of them is refused (TypeError)."""
        numbers = {name: as_number(name, value) for name, value in (scalars or {}).items()}
        if loss is not None:
            numbers["loss"] = as_number("loss", loss)
        if len(self._newest.keys() | numbers.keys()) > MAX_SCALARS:
            raise ValueError(f"report: more than {MAX_SCALARS} different names: put steps into step=, not into names")
        if step is not None:
            self._step = int(as_number("step", step))
        elif loss is not None:
            self._step = (self._step or 0) + 1
        if step is not None or loss is not None:
            self._step_cell = self._cell
        if samples_per_s is not None:
            self._samples_per_s = self._speed = float(as_number("samples_per_s", samples_per_s))
        if waiting is not None:
            self._waiting = waiting
        if of_steps is not None:
            self._of_steps = of_steps
        self._keep(numbers, run or _NO_RUN)
        self._changed = True

    def _keep(self, numbers: dict[str, Any], run: Run) -> None:
        now = time.monotonic()
        for name, value in numbers.items():
            if isinstance(value, (int, float)):
                self._newest[name] = value
                self._unread.pop(name, None)
                self._note(name, run, self._step or 0, float(value))
            else:
                self._unread[name] = self._step or 0, value
                self._unread_run = run if name == "loss" else self._unread_run
        if self._unread and now - self._read_at >= PERIOD:
            self._read_at = now
            self._read_waiting()

    def _read_waiting(self) -> None:
        """Read what lies on the accelerator; on the main thread, which alone may wait for it."""
        unread, self._unread = self._unread, {}
        for name, (step, value) in unread.items():
            number = self._newest[name] = _read(name, value)
            self._note(name, self._unread_run, step, number)

    def _note(self, name: str, run: Run, step: int, value: float) -> None:
        """A point of a curve: the loss of ``run``, or what is reported under ``name``."""
        of_run = name == "loss" and run != _NO_RUN
        history = self._histories.get(run) if of_run else self._reported.get(name)
        if history is None:
            history = deque[Point](maxlen=10_000)
            if of_run:
                self._histories[run] = history
            else:
                self._reported[name] = history
        history.append((step, time.time(), value))

    def begin_cell(self, cell: int) -> None:
        """How long the loop before was, and how fast, is not this cell's."""
        self._cell = cell
        self._of_steps = self._samples_per_s = None
        self._changed = True

    def set_waiting(self, text: str) -> None:
        """What the main thread waits for, or ``""`` (any thread)."""
        self._waiting = text
        self._changed = True

    def set_threads(self, threads: int, chosen: bool) -> None:
        """How many threads libraries take here; ``chosen``: by the user."""
        self._threads, self._threads_chosen = threads, chosen
        self._changed = True

    def speed(self) -> float:
        """The newest samples per second that were told, in an earlier cell too; 0 when none were (any thread)."""
        return self._speed

    def flush(self) -> None:
        """On the main thread, at a cell's end: read all, and let the next tick send it at once."""
        self._read_waiting()
        self._sent_at = 0.0

    def tick(self, now: float) -> None:
        """On the I/O thread: send when something is new and the last message is a quarter of a second old."""
        if now - self._sent_at < PERIOD:
            return
        if (memory := device_memory(self._device)) != self._memory:
            self._memory = memory
            self._changed = True
        if not self._changed:
            return
        self._changed = False
        self._sent_at = now
        newest = dict(self._newest)
        epoch, share = self.progress()
        self._send(
            Telemetry(
                step=self._step, loss=newest.pop("loss", None), scalars=newest, samples_per_s=self._samples_per_s,
                memory_used=self._memory[0], memory_peak=self._memory[1], waiting=self._waiting,
                threads=self._threads, threads_chosen=self._threads_chosen,
                history=self._take_reported(), losses=self._take_losses(), sent=time.time(),
                epoch=epoch, epoch_share=share, of_steps=self._of_steps, step_cell=self._step_cell,
            )
        )  # fmt: skip

    def _take_losses(self) -> list[RunLosses]:
        """The points of the newest runs since the last call. The main thread may add a run meanwhile."""
        runs = list(self._histories)
        for run in runs[:-MAX_RUNS]:
            del self._histories[run]
        taken = ((run, _take(self._histories[run], MAX_HISTORY)) for run in runs[-MAX_RUNS:])
        return [RunLosses(job=job, run=run, points=points) for (job, run), points in taken if points]

    def _take_reported(self) -> dict[str, list[Point]]:
        """What nc.report() was told since the last call. The main thread may add a name meanwhile."""
        filled = [name for name in list(self._reported) if self._reported[name]]
        most = min(MAX_HISTORY, MAX_POINTS // max(1, len(filled)))
        return {name: _take(self._reported[name], most) for name in filled}


def _take(history: deque[Point], most: int) -> list[Point]:
    """What ``history`` holds, which is empty then: evenly thinned to ``most``; the newest point always stays."""
    points = [history.popleft() for _ in range(len(history))]
    stride = max(1, -(-len(points) // most))
    return points[::-1][::stride][::-1]


def device_memory(device: str) -> tuple[int | None, int | None]:
    """(used, peak) bytes that torch or mlx hold on the accelerator; None on cpu and while neither is in use."""
    try:
        return _device_memory(device)
    except AttributeError:  # the main thread is in the middle of importing it
        return None, None


def _device_memory(device: str) -> tuple[int | None, int | None]:
    torch = sys.modules.get("torch")
    if device.startswith("cuda") and torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.memory_allocated()), int(torch.cuda.max_memory_allocated())
    if device == "mps":
        mlx = sys.modules.get("mlx.core")
        if mlx is not None:
            return int(mlx.get_active_memory()), int(mlx.get_peak_memory())
        if torch is not None:
            used = int(torch.mps.current_allocated_memory())
            return used, max(used, int(torch.mps.driver_allocated_memory()))
    return None, None
