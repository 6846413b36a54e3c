"""What the product builds on libzmq's sockets that has a thread or a descriptor of its own: gate, pump, limits."""

import asyncio

import zmq

from tests.simulation.sockets import POLLIN, WORLD


class Gate:
    """In the place of :class:`notebook_cluster.security.Gate`, without a thread."""

    def __init__(self, context):
        if context.gate is not None:
            raise zmq.ZMQError(zmq.EADDRINUSE)
        self._context = context
        context.gate = self
        self.refused = 0
        self._checks = {}

    def allow(self, domain, check, reason=lambda key: ""):
        self._checks[domain] = check

    def forbid(self, domain):
        self._checks.pop(domain, None)

    def check(self, domain, key):
        check = self._checks.get(domain)
        user = check(key) if check is not None else None
        self.refused += user is None
        return user

    def close(self):
        self._context.gate = None


class Pump:
    """In the place of :class:`notebook_cluster.sockets.Pump`: told by the socket instead of by a descriptor."""

    def __init__(self, socket, on_frames, *, copy=True, linger=0):
        self._socket, self._on_frames, self._copy = socket, on_frames, copy
        self._loop = asyncio.get_running_loop()
        self._scheduled = self.closed = False
        socket.on_change = self._look_again
        self._look_again()

    @property
    def socket(self):
        return self._socket

    def hand_to(self, on_frames):
        self._on_frames = on_frames

    def send(self, frames):
        if self.closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        return True

    def close(self):
        if not self.closed:
            self.closed = True
            self._socket.close()

    def read_all(self):
        while self._read_one():
            pass

    def _look_again(self):
        if not self._scheduled and not self.closed:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self):
        self._scheduled = False
        for _ in range(64):
            if not self._read_one():
                return
        self._look_again()

    def _read_one(self):
        if self.closed or not self._socket.events & POLLIN:
            return False
        self._on_frames(self._socket.recv_multipart(zmq.NOBLOCK, copy=self._copy))
        return True


class NoBacklog:
    """In the place of the watch over bytes that the system holds."""

    def __init__(self, drops=None):
        pass

    def opened(self, descriptor):
        pass

    def closed(self, descriptor):
        pass

    def delivered(self, descriptor, parts):
        pass

    def close(self):
        pass


def remote_end(descriptor, at_port=None):
    held = WORLD[-1].descriptors.get(descriptor)
    return held[0].remote(held[1]) if held is not None else None


def cut(descriptor, remote):
    held = WORLD[-1].descriptors.get(descriptor)
    if held is not None and remote is not None and held[0].remote(held[1]) == remote:
        held[0].close(held[1])
