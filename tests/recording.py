"""A TCP proxy that keeps what a client said, and says it again to a server: a replay."""

import socket
import threading
from typing import Self


class Recorder:
    """Passes connections to its ``port`` on to ``target_port`` of loopback and keeps the bytes.

    Attributes:
        turns: what happened on the first connection, in order: (True, bytes of the client) or (False, of the server).
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.turns: list[tuple[bool, bytes]] = []
        self._sockets: list[socket.socket] = [self._server]
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="recorder", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was not connected any more
            one.close()

    def _accept(self) -> None:
        first = True
        while True:
            try:
                client, _ = self._server.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                return
            self._sockets += [client, server]
            for source, sink, of_client in ((client, server, True), (server, client, False)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, of_client, first), name="recorder", daemon=True
                ).start()
            first = False

    def _pass_on(self, source: socket.socket, sink: socket.socket, of_client: bool, keep: bool) -> None:
        try:
            while data := source.recv(65536):
                if keep:
                    with self._lock:
                        self.turns.append((of_client, data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one of the two ended


def replay(turns: list[tuple[bool, bytes]], port: int, timeout: float = 5.0) -> tuple[int, int]:
    """Say to ``port`` what the client said, waiting at each turn until the server has said as much as it did then.

    Returns (bytes said, bytes answered) until the server closed the connection; it must do so within ``timeout``
    seconds of the last byte, or the OSError of the time-out is raised.
    """
    said = answered = due = 0
    with socket.create_connection(("127.0.0.1", port), timeout) as connection:
        try:
            for of_client, data in turns:
                if of_client:
                    connection.sendall(data)
                    said += len(data)
                    continue
                due += len(data)
                while answered < due:
                    got = len(connection.recv(65536))
                    if not got:
                        return said, answered
                    answered += got
            while got := len(connection.recv(65536)):
                answered += got
        except (ConnectionResetError, BrokenPipeError):
            pass
    return said, answered
