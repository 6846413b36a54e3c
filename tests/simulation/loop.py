"""The event loop of a simulated process: asyncio's tasks and futures, on a thread of the schedule."""

import asyncio
import contextvars
import heapq
import itertools
from collections import deque

from tests.simulation.schedule import EPSILON, Thread


class SimulatedLoop(asyncio.AbstractEventLoop):
    """One thread of ``process`` that runs callbacks in order, and timers by the host's monotonic clock."""

    def __init__(self, process, on_error):
        self._process, self._schedule = process, process.schedule
        self._on_error = on_error
        self._ready = deque()
        self._timers = []
        self._numbers = itertools.count()
        self.thread = Thread(process, self._body, "loop", self)
        process.main = self.thread
        self.thread.start()

    # ---- what asyncio asks of a loop

    def time(self):
        return self._schedule.now - self._process.host.slept

    def get_debug(self):
        return False

    def is_running(self):
        return self._process.alive

    def is_closed(self):
        return False

    def call_soon(self, callback, *args, context=None):
        handle = asyncio.Handle(callback, args, self, context or contextvars.copy_context())
        self._ready.append(handle)
        if self._schedule.current is not self.thread:
            self.thread.wake()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        handle = asyncio.TimerHandle(when, callback, args, self, context or contextvars.copy_context())
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        handle._scheduled = True
        if self._schedule.current is not self.thread:
            self.thread.wake()
        return handle

    def _timer_handle_cancelled(self, handle):
        pass

    def create_future(self):
        return asyncio.Future(loop=self)

    def create_task(self, coro, *, name=None, context=None):
        return asyncio.Task(coro, loop=self, name=name)

    def run_in_executor(self, executor, function, *args):
        """Some other thread does it, a little later; nothing of it runs at the same time as this loop."""
        future = self.create_future()

        def work():
            try:
                result = function(*args)
            except BaseException as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(self._schedule.rng.random() * 0.003, work)
        return future

    def add_signal_handler(self, number, callback, *args):
        pass

    def remove_signal_handler(self, number):
        pass

    def call_exception_handler(self, context):
        self._on_error(self._process, context)

    def default_exception_handler(self, context):
        self._on_error(self._process, context)

    # ---- its thread

    def _body(self):
        while True:
            self._due()
            while self._ready:
                handle = self._ready.popleft()
                if not handle._cancelled:
                    handle._run()
                if not self._process.alive:
                    return
                self._due()
            wait = self._timers[0][0] - self.time() if self._timers else None
            self.thread.park(wait)

    def _due(self):
        now = self.time() + EPSILON
        while self._timers and self._timers[0][0] <= now:
            _, _, handle = heapq.heappop(self._timers)
            if not handle._cancelled:
                self._ready.append(handle)
