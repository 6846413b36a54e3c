"""Connections between the sockets of a world: delay, cuts, partitions also in one direction, machines that fall silent.

A connection behaves as TCP under libzmq: what is sent arrives in order or not at all; while the way is cut it waits and
is repeated, until one side has heard nothing for its heartbeat timeout and closes.
"""

from collections import deque

import zmq

CONNECT_TIMEOUT = 5.0
HANDSHAKE_TIMEOUT = 5.0


class Network:
    """Which way is open, who listens where, and how long a message takes."""

    def __init__(self, schedule):
        self.schedule = schedule
        self.listeners = {}
        """(host, port or path) -> socket"""
        self.connections = {}  # in the order in which they were made: that of a set is not the seed's
        self.cut_ways = set()
        """(from, to): hosts between which nothing gets through in this direction."""
        self.asleep = set()
        self.delay = (0.0002, 0.002)
        self.slow = {}
        """Host -> seconds more for each message from or to it."""
        self.addresses = {}
        """IP address -> host."""
        self.descriptors = {}
        self._next = 20000

    def new_number(self):
        self._next += 1
        return self._next

    def place(self, host, endpoint):
        """(host, port or path) that ``endpoint`` means on ``host``."""
        if endpoint.startswith("ipc://"):
            return host, endpoint.removeprefix("ipc://")
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        there = host if address in ("127.0.0.1", "*", "0.0.0.0", "localhost") else self.addresses.get(address)
        return there, int(port)

    def blocked(self, source, target):
        if source is target:
            return source in self.asleep
        return (source, target) in self.cut_ways or source in self.asleep or target in self.asleep

    def latency(self, source, target):
        rng = self.schedule.rng
        if source is target:
            return 0.00005 + rng.random() * 0.0002
        low, high = self.delay
        return low + rng.random() * (high - low) + self.slow.get(source, 0.0) + self.slow.get(target, 0.0)

    def changed(self):
        """A way was cut or opened, or a process stands still or goes on."""
        for connection in list(self.connections):
            connection.look()

    def cut(self, source, target, *, both=True):
        self.cut_ways.add((source, target))
        if both:
            self.cut_ways.add((target, source))
        self.changed()

    def heal(self):
        self.cut_ways.clear()
        self.slow.clear()
        self.changed()


class Connection:
    """Between the dialling socket (end 0) and the listening one (end 1), from the handshake on."""

    def __init__(self, network, dialler, listener, dial):
        self.network, self.schedule = network, network.schedule
        self.ends = (dialler, listener)
        self.dial = dial
        self.hosts = (dialler.process.host, listener.process.host)
        self.descriptor = (network.new_number(), network.new_number())
        self.routing_id = (b"", b"")
        self.user_id = ""
        self.open = [True, True]
        """Whether this end's socket still has it."""
        self.outstanding = [0, 0]
        """Messages from this end that the other has not taken yet."""
        self._queues = (deque(), deque())
        self._moving = [False, False]
        self._silent_since = [None, None]
        """Since when nothing comes from this end."""
        network.connections[self] = None
        network.descriptors[self.descriptor[0]] = (self, 0)
        network.descriptors[self.descriptor[1]] = (self, 1)

    def remote(self, end):
        """Address and port at the other end, as ``getpeername`` says."""
        return (self.hosts[1 - end].address, self.descriptor[1 - end])

    def send(self, end, frames):
        self.outstanding[end] += 1
        self._queues[end].append(
            (self.schedule.now + self.network.latency(self.hosts[end], self.hosts[1 - end]), frames)
        )
        self._move(end)

    def taken(self, end):
        """The receiver took a message that came from ``end``."""
        self.outstanding[end] -= 1
        if self.open[end]:
            self.ends[end].changed()

    def _broken(self, end):
        """Whether nothing of this end reaches the other one now."""
        socket = self.ends[end]
        return not self.open[end] or socket.process.paused or self.network.blocked(self.hosts[end], self.hosts[1 - end])

    def _move(self, end):
        if self._moving[end] or not self._queues[end]:
            return
        self._moving[end] = True
        self.schedule.at(self._queues[end][0][0], lambda: self._arrive(end))

    def _arrive(self, end):
        self._moving[end] = False
        if not self.open[1 - end] or not self._queues[end]:
            return
        if self.network.blocked(self.hosts[end], self.hosts[1 - end]):
            return  # repeated when the way is open again: look() moves it
        _, frames = self._queues[end].popleft()
        self.ends[1 - end].arrived(self, end, frames)
        self._move(end)

    def look(self):
        """Something has changed on the way: note who falls silent, let go on what waited."""
        for end in (0, 1):
            if not self.open[1 - end]:
                continue
            if self._broken(end):
                if self._silent_since[end] is None:
                    self._silent_since[end] = self.schedule.now
                self._watch(end)
            else:
                self._silent_since[end] = None
                self._move(end)

    def _watch(self, end):
        timeout = self.ends[1 - end].heartbeat_timeout
        if timeout is None:
            return
        since = self._silent_since[end]

        def check():
            hearer = self.ends[1 - end]
            if self._silent_since[end] != since or not self.open[1 - end] or not hearer.process.alive:
                return
            if hearer.process.paused or hearer.process.host in self.network.asleep:
                hearer.process.deferred.append(check)
                return
            self.close(1 - end)

        self.schedule.later(timeout, check)

    def close(self, end, *, told=True):
        """This end gives it up. ``told`` False: its machine lost power, so nobody tells the other end."""
        if not self.open[end]:
            return
        self.open[end] = False
        self._queues[1 - end].clear()
        if self.ends[end].process.alive:
            self.ends[end].lost(self, end)
        if self.open[1 - end]:
            # What was sent before the end still arrives, unless the way is cut.
            if told and not self.network.blocked(self.hosts[end], self.hosts[1 - end]):
                last = self._queues[end][-1][0] if self._queues[end] else self.schedule.now
                self.schedule.at(last + self.network.latency(*self.hosts), lambda: self._closed_by_other(1 - end))
            self.look()
        else:
            self._forget()

    def _closed_by_other(self, end):
        if self.open[end] and not self.network.blocked(self.hosts[1 - end], self.hosts[end]):
            process = self.ends[end].process
            if process.paused:
                process.deferred.append(lambda: self._closed_by_other(end))
                return
            self.open[end] = False
            if process.alive:
                self.ends[end].lost(self, end)
            self._forget()

    def _forget(self):
        self.network.connections.pop(self, None)
        for descriptor in self.descriptor:
            self.network.descriptors.pop(descriptor, None)


class Dial:
    """One ``connect``: tries until there is a connection, and again when that is lost."""

    def __init__(self, socket, endpoint):
        self.socket, self.endpoint = socket, endpoint
        self.network, self.schedule = socket.network, socket.network.schedule
        self.active = True
        self.connection = None
        self._interval = None
        self._attempt = 0
        self.socket.process_call(0.0, self._try)

    def stop(self):
        self.active = False
        self._attempt += 1
        if self.connection is not None:
            self.connection.close(0)
            self.connection = None

    def lost(self):
        self.connection = None
        if self.active:
            self._again()

    def _again(self):
        first = self.socket.option(zmq.RECONNECT_IVL, 100) / 1000
        most = self.socket.option(zmq.RECONNECT_IVL_MAX, 0) / 1000
        self._interval = first if self._interval is None else min(max(most, first), self._interval * 2)
        self.socket.process_call(self._interval * (1 + self.schedule.rng.random() * 0.1), self._try)

    def _try(self):
        if not self.active or self.connection is not None or self.socket.closed:
            return
        self._attempt += 1
        attempt = self._attempt
        here = self.socket.process.host
        there, place = self.network.place(here, self.endpoint)
        self.socket.tell(zmq.EVENT_CONNECT_DELAYED, 0)
        if there is None or self.network.blocked(here, there) or self.network.blocked(there, here):
            timeout = self.socket.option(zmq.CONNECT_TIMEOUT, 0) / 1000 or CONNECT_TIMEOUT
            self.socket.process_call(timeout, lambda: self._failed(attempt))
            return
        latency = self.network.latency(here, there)
        self.socket.process_call(2 * latency, lambda: self._met(attempt, there, place))

    def _failed(self, attempt):
        if self.active and attempt == self._attempt and self.connection is None:
            self.socket.tell(zmq.EVENT_CONNECT_RETRIED, 0)
            self._again()

    def _met(self, attempt, there, place):
        if not self.active or attempt != self._attempt or self.connection is not None:
            return
        listener = self.network.listeners.get((there, place))
        if listener is None or not listener.process.alive:
            self._failed(attempt)
            return
        number = self.network.new_number()
        self.socket.tell(zmq.EVENT_CONNECTED, number)
        latency = self.network.latency(there, self.socket.process.host)
        listener.process_call(latency, lambda: self._greet(attempt, listener))
        self.socket.process_call(HANDSHAKE_TIMEOUT, lambda: self._broke_off(attempt))

    def _broke_off(self, attempt):
        """Whoever is there said nothing."""
        if self.active and attempt == self._attempt and self.connection is None:
            self._attempt += 1
            self.socket.tell(zmq.EVENT_DISCONNECTED, 0)
            self._again()

    def _greet(self, attempt, listener):
        """The listener's side of the handshake."""
        here, there = self.socket.process.host, listener.process.host
        if not self.active or attempt != self._attempt or self.socket.closed or listener.closed:
            return
        if not self.socket.process.alive or self.network.blocked(here, there) or self.network.blocked(there, here):
            return
        verdict, user = listener.admits(self.socket)
        if verdict == "refused":
            self.socket.process_call(self.network.latency(here, there), lambda: self._refused(attempt))
        elif verdict == "stranger":
            self.socket.process_call(self.network.latency(here, there), lambda: self._stranger(attempt))
        else:
            self._attempt += 1
            self._interval = None
            self.connection = made = Connection(self.network, self.socket, listener, self)
            made.user_id = user
            listener.accepted(made)
            self.socket.process_call(self.network.latency(here, there), lambda: self.socket.connected(made))
            made.look()

    def _refused(self, attempt):
        """Not let in by the listener's gate; libzmq does not try again."""
        if self.active and attempt == self._attempt:
            self.active = False
            self.socket.tell(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)

    def _stranger(self, attempt):
        if self.active and attempt == self._attempt:
            self._attempt += 1
            self.socket.tell(zmq.EVENT_DISCONNECTED, 0)
            self._again()
