"""Hosts, processes and threads of a simulated world, and the order in which they run.

A thread is a greenlet: it runs until it parks, and nobody else meanwhile. When it goes on, and which of those that
could go on is first, comes from the seed. Seconds are virtual: they pass only while everybody waits.
"""

import asyncio
import heapq
import random

import greenlet

EPSILON = 1e-6
"""Seconds: what is so near is now (the clocks of hosts that slept differ by more than a rounding)."""
WAKE_DELAY = 0.0005
"""Seconds within which a thread that is woken goes on."""


class WorldStuck(AssertionError):
    """Nothing is left to happen, or far too much happens at one moment."""


class Host:
    """A machine: its clocks, and whether it sleeps.

    Attributes:
        slept: seconds for which the monotonic clock stood still.
        wall: seconds by which the time of day is ahead.
    """

    def __init__(self, name, address):
        self.name, self.address = name, address
        self.slept, self.wall = 0.0, 0.0
        self.processes = []


class Process:
    """One process of a host. A dead one never runs again, a paused one when it goes on."""

    def __init__(self, schedule, host, name):
        self.schedule, self.host, self.name = schedule, host, name
        self.pid = schedule.new_pid(self)
        self.alive, self.paused = True, False
        self.replaced = False
        """Another process does its work: it stands still until nobody takes it for the right one."""
        self.deferred = []
        self.threads = []
        self.main = None
        """The thread that signals interrupt."""
        self.contexts = []
        self.on_end = []
        self.exit_code = None
        host.processes.append(self)

    def __repr__(self):
        return f"<{self.name} on {self.host.name}>"

    def spawn(self, body, name="thread", loop=None):
        thread = Thread(self, body, name, loop)
        thread.start()
        return thread

    def end(self, code=-9):
        """It is gone, between two of its steps."""
        if not self.alive:
            return
        self.alive, self.exit_code = False, code
        self.host.processes.remove(self)
        for context in self.contexts:
            context.process_ended()
        ends, self.on_end = self.on_end, []
        for call in ends:
            call(self)

    def pause(self):
        self.paused = True

    def resume(self):
        """It goes on with all that was to happen meanwhile."""
        self.paused = False
        deferred, self.deferred = self.deferred, []
        for call in deferred:
            self.schedule.soon(call)


class Thread:
    """A greenlet of a process."""

    def __init__(self, process, body, name, loop=None):
        self.process, self.body, self.name, self.loop = process, body, name, loop
        self.schedule = process.schedule
        self.done = False
        self.interrupts = 0
        """KeyboardInterrupts that it has not raised."""
        self.deferring = False
        """Whether interrupts wait."""
        self._token = 0
        self._parked = self._woken = False
        self._greenlet = greenlet.greenlet(self._run, parent=self.schedule.hub)
        self.joiners = []
        process.threads.append(self)

    def start(self):
        self.schedule.soon(self._begin)

    def _begin(self):
        if self._held():
            self.process.deferred.append(self._begin)
        elif self.process.alive:
            self.schedule.switch_to(self, self._greenlet)

    def _held(self):
        return self.process.paused

    def _run(self):
        try:
            self.body()
        except greenlet.GreenletExit:
            raise
        except BaseException as error:  # a bug of ours or of the product: the world reports it
            self.schedule.failures.append((self, error))
        finally:
            self.done = True
        for thread in self.joiners:
            thread.wake()

    def park(self, seconds=None):
        """Stand still until woken (True) or for so many seconds of this host's monotonic clock (False).

        Raises KeyboardInterrupt on the main thread when a signal has come.
        """
        host, deadline = self.process.host, None
        if seconds is not None:
            deadline = self.schedule.now - host.slept + max(0.0, seconds)
        while True:
            if self._woken:
                self._woken = False
                self.raise_interrupt()
                return True
            if deadline is not None and self.schedule.now - host.slept >= deadline - EPSILON:
                self.raise_interrupt()
                return False
            self._token += 1
            token = self._token
            if deadline is not None:
                self.schedule.at(deadline + host.slept, lambda token=token: self._go_on(token))
            self._parked = True
            self.schedule.hub.switch()
            self._parked = False

    def wake(self):
        """Let a parked thread go on, or the next park return at once."""
        if not self._woken and not self.done:
            self._woken = True
            token = self._token
            if self._parked:
                self.schedule.soon(lambda: self._go_on(token))

    def _go_on(self, token):
        if self.done or not self.process.alive or not self._parked or token != self._token:
            return
        if self.process.paused:
            self.process.deferred.append(lambda: self._go_on(token))
            return
        self.schedule.switch_to(self, self._greenlet)

    def interrupt(self):
        """SIGINT for this thread."""
        self.interrupts += 1
        self.wake()

    def raise_interrupt(self):
        if self.interrupts and not self.deferring:
            self.interrupts = 0
            raise KeyboardInterrupt


class Schedule:
    """Runs what is due, in the order of virtual time; among equals as the seed says."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.hub = greenlet.getcurrent()
        self.current = None
        self.failures = []
        self.hosts = []
        self.processes = {}
        self.steps = 0
        self.closed = False
        self._heap = []
        self._number = 0
        self._pid = 100

    def new_pid(self, process):
        self._pid += 1
        self.processes[self._pid] = process
        return self._pid

    def host(self, name, address):
        made = Host(name, address)
        self.hosts.append(made)
        return made

    @property
    def process(self):
        """The one that runs now; None between."""
        return self.current.process if self.current is not None else None

    def at(self, time, call):
        self._number += 1
        heapq.heappush(self._heap, (max(time, self.now), self._number, call))

    def soon(self, call):
        self.at(self.now + self.rng.random() * WAKE_DELAY, call)

    def later(self, seconds, call):
        self.at(self.now + seconds, call)

    def switch_to(self, thread, made):
        before, self.current = self.current, thread
        asyncio._set_running_loop(thread.loop)
        try:
            made.switch()
        finally:
            self.current = before
            asyncio._set_running_loop(None)

    def run(self, until, done=lambda: False):
        """Let everything happen up to the moment ``until``, or until ``done()``."""
        same, last = 0, -1.0
        while self._heap and self._heap[0][0] <= until:
            time, _, call = heapq.heappop(self._heap)
            same = same + 1 if time == last else 0
            if same > 50_000:
                raise WorldStuck(f"50,000 things happened at {time}")
            last = self.now = time
            self.steps += 1
            call()
            if self.failures:
                thread, error = self.failures[0]
                where = f" in {thread.name} of {thread.process}" if thread is not None else ""
                raise AssertionError(f"{error!r}{where}") from error
            if done():
                return True
        self.now = max(self.now, until)
        return done()
