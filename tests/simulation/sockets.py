"""libzmq's contexts and sockets, as far as the product uses them, over :mod:`.network`."""

import struct
from collections import deque

import zmq

WORLD = []
"""The network of the world that runs, or nothing."""
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
DEALER, ROUTER, PUB = int(zmq.DEALER), int(zmq.ROUTER), int(zmq.PUB)
"""Numbers: what combines or compares enum members costs more than the rest of a look at a socket."""
_NAMES = {
    "linger": zmq.LINGER, "sndhwm": zmq.SNDHWM, "rcvhwm": zmq.RCVHWM, "maxmsgsize": zmq.MAXMSGSIZE,
    "routing_id": zmq.ROUTING_ID, "reconnect_ivl": zmq.RECONNECT_IVL, "reconnect_ivl_max": zmq.RECONNECT_IVL_MAX,
}  # fmt: skip


class Context:
    """In the place of ``zmq.Context``."""

    def __init__(self, *arguments, **options):
        self.network = WORLD[-1]
        self.process = self.network.schedule.process
        self.process.contexts.append(self)
        self.sockets = []
        self.gate = None
        self.closed = False

    @classmethod
    def shadow(cls, underlying):
        return underlying

    @property
    def underlying(self):
        return self

    def socket(self, kind):
        made = Socket(self, kind)
        self.sockets.append(made)
        return made

    def destroy(self, linger=None):
        for socket in list(self.sockets):
            socket.close(linger)
        self.closed = True

    term = destroy

    def process_ended(self):
        """The system closes what the process had open."""
        for socket in list(self.sockets):
            socket.process_ended()


class Frame:
    """A received part with what is known of its connection."""

    def __init__(self, content, user, descriptor):
        self.bytes, self._user, self._descriptor = content, user, descriptor
        self.more = False

    @property
    def buffer(self):
        return memoryview(self.bytes)

    def __len__(self):
        return len(self.bytes)

    def get(self, option):
        return self._user if option == "User-Id" else self._descriptor


class Monitor:
    """The monitor socket of a socket."""

    def __init__(self, mask):
        self.mask, self.closed, self.on_change = mask, False, None
        self._inbox = deque()

    @property
    def events(self):
        return POLLIN if self._inbox and not self.closed else 0

    def tell(self, event, value):
        if not self.closed and event & self.mask:
            self._inbox.append([struct.pack("=hi", int(event), value), b"tcp://monitored"])
            if self.on_change is not None:
                self.on_change()

    def recv_multipart(self, flags=0, copy=True):
        if not self._inbox:
            raise zmq.Again
        return self._inbox.popleft()

    def getsockopt(self, option):
        return self.events if option == zmq.EVENTS else -1

    def close(self, linger=None):
        self.closed = True


class Socket:
    """DEALER, ROUTER, PUB or SUB."""

    def __init__(self, context, kind):
        self.kind = int(kind)
        self.context, self.network, self.process = context, context.network, context.process
        self.schedule = self.network.schedule
        self.closed, self.on_change, self.monitor = False, None, None
        self.options = {}
        self.dials = []
        self.peers = {}
        """Routing id -> (connection, our end)."""
        self.inbox, self._unsent, self._parts = deque(), deque(), []
        self._place, self._endpoint = None, ""

    def __setattr__(self, name, value):
        if name in _NAMES:
            self.options[_NAMES[name]] = value
        else:
            self.__dict__[name] = value

    # ---- options

    def setsockopt(self, option, value):
        self.options[option] = value

    set = setsockopt

    def option(self, option, default=0):
        return self.options.get(option, default)

    def subscribe(self, topic):
        pass

    def getsockopt(self, option):
        return self.events if option == zmq.EVENTS else -1

    def getsockopt_string(self, option):
        return self._endpoint

    @property
    def heartbeat_timeout(self):
        return self.option(zmq.HEARTBEAT_TIMEOUT) / 1000 if self.option(zmq.HEARTBEAT_IVL) else None

    def get_monitor_socket(self, events):
        self.monitor = Monitor(int(events))
        return self.monitor

    def disable_monitor(self):
        self.monitor = None

    # ---- where

    def bind(self, endpoint):
        if endpoint.endswith(":0"):
            endpoint = f"{endpoint[:-1]}{self.network.new_number()}"
        place = self.network.place(self.process.host, endpoint)
        if place in self.network.listeners:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self._place, self._endpoint = place, endpoint
        self.network.listeners[place] = self

    def bind_to_random_port(self, address):
        self.bind(f"{address}:0")
        return self._place[1]

    def unbind(self, endpoint):
        self._unbind()

    def connect(self, endpoint):
        self.dials.append(Dial(self, endpoint))

    def disconnect(self, endpoint):
        dials, self.dials = self.dials, []
        self._unsent.clear()
        for dial in dials:
            dial.stop()

    def _unbind(self):
        if self._place is not None:
            self.network.listeners.pop(self._place, None)
            self._place = None

    def close(self, linger=None):
        if self.closed:
            return
        self.closed = True
        self._unbind()
        self.disconnect("")
        for connection, end in list(self.peers.values()):
            connection.close(end)
        self.peers.clear()
        if self in self.context.sockets:
            self.context.sockets.remove(self)

    def process_ended(self):
        told = self.process.host not in self.network.asleep
        self.closed = True
        self._unbind()
        for connection, end in list(self.peers.values()):
            connection.close(end, told=told)
        for dial in self.dials:
            dial.active = False

    def process_call(self, delay, call):
        """Call from libzmq's own thread, which stands still with the process and ends with it."""

        def act():
            if not self.process.alive:
                return
            if self.process.paused or self.process.host in self.network.asleep:
                self.process.deferred.append(act)
            else:
                call()

        self.schedule.later(delay, act)

    # ---- connections

    def tell(self, event, value):
        if self.monitor is not None:
            self.monitor.tell(event, value)

    def admits(self, dialler):
        """("in", User-Id), ("refused", "") by the gate, or ("stranger", "") where this is not whom it dials."""
        wanted = dialler.options.get(zmq.CURVE_SERVERKEY)
        serves = bool(self.option(zmq.CURVE_SERVER))
        if not serves:
            return ("stranger", "") if wanted else ("in", "")
        if wanted != self.options.get(zmq.CURVE_PUBLICKEY):
            return "stranger", ""
        gate = self.context.gate
        key = dialler.options[zmq.CURVE_PUBLICKEY].decode()
        with self.schedule_as():
            user = gate.check(self.options[zmq.ZAP_DOMAIN].decode(), key) if gate is not None else None
        return ("refused", "") if user is None else ("in", user)

    def schedule_as(self):
        return Acting(self.schedule, self.process)

    def accepted(self, connection):
        identity = connection.ends[0].option(zmq.ROUTING_ID, b"") or struct.pack(">BI", 0, connection.descriptor[1])
        before = self.peers.get(identity)
        if before is not None:
            before[0].close(1)
        connection.routing_id = (b"", identity)
        self.peers[identity] = (connection, 1)
        self.tell(zmq.EVENT_ACCEPTED, connection.descriptor[1])
        self.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, connection.descriptor[1])
        self.changed()

    def connected(self, connection):
        if not connection.open[0]:
            return
        self.peers[b""] = (connection, 0)
        # The number that CONNECTED gave is not this one; whoever looks at it finds nothing there.
        self.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, connection.descriptor[0])
        while self._unsent and self._room(connection, 0):
            connection.send(0, self._unsent.popleft())
        self.changed()

    def lost(self, connection, end):
        for identity, (held, _) in list(self.peers.items()):
            if held is connection:
                del self.peers[identity]
        if self.closed:
            return
        self.tell(zmq.EVENT_DISCONNECTED, connection.descriptor[end])
        if end == 0:
            connection.dial.lost()
        self.changed()

    def arrived(self, connection, end, frames):
        identity = [connection.routing_id[1]] if self.kind == ROUTER else []
        self.inbox.append((connection, end, [*identity, *frames]))
        self.changed()

    def changed(self):
        if self.on_change is not None and not self.closed:
            self.on_change()

    # ---- messages

    @property
    def events(self):
        if self.closed:
            return 0
        sends = self.kind == DEALER and self._target() is not None
        return (POLLIN if self.inbox else 0) | (POLLOUT if sends else 0)

    def _room(self, connection, end):
        most = self.option(zmq.SNDHWM, 1000)
        others = connection.ends[1 - end].option(zmq.RCVHWM, 1000)
        return not most or not others or connection.outstanding[end] < most + others

    def _target(self):
        held = self.peers.get(b"")
        return held if held is not None and self._room(*held) else None

    def send(self, data, flags=0, copy=True, track=False):
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        if not self._parts and self.kind == DEALER:
            self._check_room()
        self._parts.append(data)
        if not flags & zmq.SNDMORE:
            parts, self._parts = self._parts, []
            self._send(parts)

    def send_multipart(self, parts, flags=0, copy=True, track=False):
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        if self.kind == DEALER:
            self._check_room()
        self._send(list(parts))

    def _check_room(self):
        if self._target() is None and (self.option(zmq.IMMEDIATE) or b"" in self.peers):
            raise zmq.Again

    def _send(self, parts):
        frames = [bytes(part) for part in parts]
        if self.kind == PUB:
            for connection, end in self.peers.values():
                connection.send(end, frames)
        elif self.kind == ROUTER:
            held = self.peers.get(frames[0])
            if held is not None and self._room(*held):
                held[0].send(held[1], frames[1:])
            elif self.option(zmq.ROUTER_MANDATORY):
                raise zmq.Again if held is not None else zmq.ZMQError(zmq.EHOSTUNREACH)
        else:
            target = self._target()
            if target is None:
                self._unsent.append(frames)
            else:
                target[0].send(target[1], frames)

    def recv_multipart(self, flags=0, copy=True):
        if not self.inbox:
            raise zmq.Again
        connection, end, frames = self.inbox.popleft()
        connection.taken(end)
        if copy:
            return frames
        parts = [Frame(frame, connection.user_id, connection.descriptor[1]) for frame in frames]
        for part in parts[:-1]:
            part.more = True
        return parts

    def recv(self, flags=0, copy=True):
        """One part of a message; here all messages that are read like this have one, or are read to their end."""
        if not self._received:
            self._received.extend(self.recv_multipart(flags, copy))
        return self._received.popleft()

    @property
    def _received(self):
        return self.__dict__.setdefault("_received_parts", deque())

    @property
    def rcvmore(self):
        return bool(self._received)


class Acting:
    """For a moment what happens is done by ``process``, in a thread of libzmq."""

    def __init__(self, schedule, process):
        self._schedule, self._process = schedule, process

    def __enter__(self):
        self._before = self._schedule.current
        self._schedule.current = self._process.main

    def __exit__(self, *error):
        self._schedule.current = self._before


from tests.simulation.network import Dial  # noqa: E402 - the two know each other
