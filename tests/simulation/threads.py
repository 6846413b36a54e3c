"""Threading's primitives on the schedule, and the I/O thread of a node.

What waits on them parks; a process that runs one thread at a time needs no lock. Called from outside of a world they do
not wait.
"""

import collections
import contextlib
import heapq
import itertools
import queue

from tests.simulation import sockets
from tests.simulation.schedule import EPSILON, Thread


class Primitives:
    """Of one world: classes in the place of those of ``threading`` and ``queue``."""

    def __init__(self, schedule):
        self._schedule = schedule
        of_world = self

        class Event(SimulatedEvent):
            world = of_world

        class Condition(SimulatedCondition):
            world = of_world

        class SimpleQueue(SimulatedQueue):
            world = of_world

        class ThreadOfWorld(SimulatedThread):
            world = of_world

        self.event, self.condition, self.simple_queue, self.thread = Event, Condition, SimpleQueue, ThreadOfWorld

    @property
    def current(self):
        return self._schedule.current

    @property
    def now(self):
        thread = self.current
        return self._schedule.now - (thread.process.host.slept if thread is not None else 0.0)

    def wait(self, waiting, ready, timeout):
        """Park the current thread in the list ``waiting`` until ``ready()``; what it is then."""
        thread = self.current
        if thread is None or ready():
            return ready()
        deadline = None if timeout is None else self.now + timeout
        while not ready():
            left = None if deadline is None else deadline - self.now
            if left is not None and left <= EPSILON:
                break
            waiting.append(thread)
            try:
                thread.park(left)
            finally:
                with contextlib.suppress(ValueError):
                    waiting.remove(thread)
        return ready()

    def wake(self, waiting):
        for thread in list(waiting):
            thread.wake()


class SimulatedEvent:
    def __init__(self):
        self._set, self._waiting = False, []

    def is_set(self):
        return self._set

    def set(self):
        self._set = True
        self.world.wake(self._waiting)

    def clear(self):
        self._set = False

    def wait(self, timeout=None):
        return self.world.wait(self._waiting, self.is_set, timeout)


class SimulatedCondition:
    def __init__(self, lock=None):
        self._waiting, self._notified = [], 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def acquire(self, *args):
        return True

    def release(self):
        pass

    def notify(self, n=1):
        self.notify_all()

    def notify_all(self):
        self._notified += 1
        self.world.wake(self._waiting)

    def wait(self, timeout=None):
        before = self._notified
        return self.world.wait(self._waiting, lambda: self._notified != before, timeout)

    def wait_for(self, predicate, timeout=None):
        return self.world.wait(self._waiting, predicate, timeout)


class SimulatedQueue:
    def __init__(self, maxsize=0):
        self._items, self._waiting = collections.deque(), []

    def put(self, item, block=True, timeout=None):
        self._items.append(item)
        self.world.wake(self._waiting)

    put_nowait = put

    def get(self, block=True, timeout=None):
        if not self._items and block:
            self.world.wait(self._waiting, lambda: bool(self._items), timeout)
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self):
        return self.get(block=False)

    def empty(self):
        return not self._items

    def qsize(self):
        return len(self._items)


class SimulatedThread:
    def __init__(self, group=None, target=None, name=None, args=(), kwargs=None, *, daemon=None):
        self._target, self.name, self.daemon = target, name or "thread", daemon
        self._args, self._kwargs = args, kwargs or {}
        self._thread = None

    def start(self):
        process = self.world._schedule.process
        if process is not None:
            self._thread = Thread(process, self.run, self.name)
            self._thread.start()

    def run(self):
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    @property
    def ident(self):
        return id(self._thread) if self._thread is not None else None

    def is_alive(self):
        return self._thread is not None and not self._thread.done and self._thread.process.alive

    def join(self, timeout=None):
        if self._thread is not None:
            self.world.wait(self._thread.joiners, lambda: not self.is_alive(), timeout)


class SimulatedIOThread:
    """In the place of :class:`notebook_cluster.sockets.IOThread`: the same calls, on a thread of the schedule."""

    schedule = None

    def __init__(self, name="node-io", *, io_threads=2, linger=0):
        self.context = sockets.Context()
        self._calls = collections.deque()
        self._timers = []
        self._numbers = itertools.count()
        self._ready = {}
        self._closers = []
        self._inline = self._closing = False
        self._thread = Thread(self.schedule.process, self._run, name)

    def start(self):
        self._thread.start()

    @property
    def running(self):
        return not self._thread.done and not self._closing

    @property
    def ended(self):
        return self._thread.done

    @property
    def _now(self):
        return self.schedule.now - self._thread.process.host.slept

    def on_loop(self):
        return self._inline or self.schedule.current is self._thread

    def call_soon(self, callback, *, wake=True):
        self._calls.append(callback)
        if not self.on_loop():
            self._thread.wake()

    def call_later(self, delay, callback):
        heapq.heappush(self._timers, (self._now + delay, next(self._numbers), callback))
        if not self.on_loop():
            self._thread.wake()

    def every(self, period, callback):
        def again():
            self.call_later(period, again)
            callback(self._now)

        self.call_later(period, again)

    def call(self, callback, timeout=5.0):
        if self.on_loop():
            return callback()
        if not self.running:
            raise TimeoutError("the I/O thread has ended")
        self._inline = True
        try:
            return callback()
        finally:
            self._inline = False

    def register(self, socket, flags, ready):
        self._ready[socket] = (int(flags), ready)
        socket.on_change = self._thread.wake
        self._thread.wake()

    def unregister(self, socket):
        if self._ready.pop(socket, None) is not None:
            socket.on_change = None

    def at_close(self, callback):
        self._closers.append(callback)

    def close(self, timeout=2.0):
        self._closing = True
        self._thread.wake()

    def _run(self):
        while not self._closing:
            ready = [(s, flags & s.events) for s, (flags, _) in list(self._ready.items()) if flags & s.events]
            for socket, flags in ready:
                if socket in self._ready and not socket.closed:
                    self._ready[socket][1](flags)
            for _ in range(len(self._calls)):
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= self._now + EPSILON:
                heapq.heappop(self._timers)[2]()
            if self._calls or any(flags & s.events for s, (flags, _) in self._ready.items()):
                self._thread.park(0.0001)
            else:
                self._thread.park(self._timers[0][0] - self._now if self._timers else None)
        for closer in self._closers:
            closer()
        self.context.destroy()
