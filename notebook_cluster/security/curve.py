"""CURVE on a socket, and the ZAP handler (ZeroMQ RFC 27) that decides which public keys come in.

Without a handler libzmq lets every client in, so servers enforce their domain: no :class:`Gate`, no entry.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils import z85

from notebook_cluster.security.identity import Identity, fingerprint

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_log = logging.getLogger(__name__)

Check = Callable[[str], str | None]
"""Public key (Z85) -> the User-Id that its messages carry, or None to refuse it."""


def serve(socket: zmq.Socket[Any], identity: Identity, domain: str) -> None:
    """Make ``socket`` a CURVE server of ``identity``; call before bind.

    Which clients may connect is decided by ``Gate.allow(domain, ...)``. Until that is called, and when no Gate runs in
    the socket's context, every client is refused.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, identity.public_key.encode("ascii"))
    socket.setsockopt(zmq.CURVE_SECRETKEY, identity.secret_key.encode("ascii"))
    socket.setsockopt(zmq.ZAP_DOMAIN, domain.encode("utf-8"))
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def dial(socket: zmq.Socket[Any], identity: Identity, server_key: str) -> None:
    """Make ``socket`` a CURVE client of ``identity`` that only talks to ``server_key``; call before connect."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, identity.public_key.encode("ascii"))
    socket.setsockopt(zmq.CURVE_SECRETKEY, identity.secret_key.encode("ascii"))
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode("ascii"))


def user_id(frame: zmq.Frame) -> str:
    """The User-Id that the Gate gave to the sender of ``frame`` (received with ``copy=False``), or an empty text."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Gate:
    """The ZAP handler of one ``zmq.Context``, in a daemon thread of its own; a context has at most one.

    Attributes:
        refused: number of connections refused so far.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        """Start answering. Raises zmq.ZMQError (EADDRINUSE) when this context has a handler already."""
        # A plain view of the context: a zmq.asyncio.Context would make sockets that need an event loop.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self.refused = 0
        self._checks: dict[str, Check] = {}
        self._reasons: dict[str, Callable[[str], str]] = {}
        self._handler = self._context.socket(zmq.REP)
        self._handler.setsockopt(zmq.LINGER, 0)
        self._handler.bind(_ZAP_ADDRESS)
        self._stop_address = f"inproc://gate-stop-{id(self)}"
        self._stop_receiver = self._context.socket(zmq.PAIR)
        self._stop_receiver.bind(self._stop_address)
        self._stop_sender = self._context.socket(zmq.PAIR)
        self._stop_sender.setsockopt(zmq.LINGER, 0)
        self._stop_sender.connect(self._stop_address)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._thread.start()

    def allow(self, domain: str, check: Check, reason: Callable[[str], str] = lambda key: "") -> None:
        """Let ``check`` decide for ``domain`` (replaces an earlier one). It is called on the Gate's thread, once per
        connection; an exception in it refuses and is logged. ``reason`` says why a key is refused, where that is known
        (``""``: it is a stranger's)."""
        self._checks[domain], self._reasons[domain] = check, reason

    def forbid(self, domain: str) -> None:
        """Refuse every new connection of ``domain``."""
        self._checks.pop(domain, None)
        self._reasons.pop(domain, None)

    def close(self) -> None:
        """End the thread; afterwards every new connection of this context is refused. May be called again."""
        if self._thread.is_alive():
            self._stop_sender.send(b"")
            self._thread.join(5)
        self._stop_sender.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._handler, zmq.POLLIN)
        poller.register(self._stop_receiver, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if self._stop_receiver in ready:
                    return
                self._handler.send_multipart(self._answer(self._handler.recv_multipart()))
        except zmq.ContextTerminated:
            return
        finally:
            # close() alone takes the address back some time later: who connects in between waits for an answer in vain.
            for socket, address in ((self._handler, _ZAP_ADDRESS), (self._stop_receiver, self._stop_address)):
                with contextlib.suppress(zmq.ZMQError):
                    socket.unbind(address)
                socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """A ZAP reply (version, id, code, text, user, metadata) to (version, id, domain, address, routing id,
        mechanism, key)."""
        request_id = request[1] if len(request) > 1 else b""
        refusal = [b"1.0", request_id, b"400", b"not trusted", b"", b""]
        if len(request) != 7 or request[0] != b"1.0" or request[5] != b"CURVE" or len(request[6]) != 32:
            self.refused += 1
            return refusal
        domain, address = request[2].decode("utf-8", "replace"), request[3].decode("utf-8", "replace")
        key = z85.encode(request[6]).decode("ascii")
        check = self._checks.get(domain)
        try:
            name = check(key) if check is not None else None
        except Exception:
            _log.exception("the check of domain %s failed for key %s", domain, fingerprint(key))
            name = None
        if name is None:
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:
                # The first, second, fourth, eighth ...: strangers must not be able to fill the log.
                reason = self._reasons[domain](key) if domain in self._reasons else ""
                _log.log(
                    logging.INFO if reason else logging.WARNING,
                    "refused key %s from %s: %s (%d refused so far)",
                    fingerprint(key), address, reason or f"not trusted for {domain}", self.refused,
                )  # fmt: skip
            return refusal
        return [b"1.0", request_id, b"200", b"", name.encode("utf-8"), b""]
