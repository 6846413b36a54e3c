"""Everything that crosses a bridge, as bytes in a file."""

import ctypes
import os
import socket
import struct
import threading
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 0x0003
_SO_RCVBUFFORCE = 33
_SOL_PACKET, _PACKET_STATISTICS, _PACKET_OUTGOING = 263, 6, 4
_BUFFER = 64 << 20
_LARGEST_FRAME = 1 << 18


def socket_in(namespace: str) -> socket.socket:
    """A packet socket that hears every interface of ``namespace``, made by a thread that goes there and ends: only
    the calling thread changes its namespace."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            library = ctypes.CDLL(None, use_errno=True)
            descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            try:
                if library.setns(descriptor, _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
            finally:
                os.close(descriptor)
            made.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, OSError):
        raise result
    return result


class Capture:
    """Writes each frame that enters the bridge in ``namespace`` from a host (``p-...``), whole, to ``path``.

    Attributes:
        frames, size: how many were written, and their bytes.
        lost: frames that the kernel could not keep for us (known after ``close``).
    """

    def __init__(self, namespace: str, path: Path) -> None:
        self.path = path
        self.frames = self.size = self.lost = 0
        self._socket = socket_in(namespace)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER)
        self._socket.settimeout(0.2)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take what is still in the buffer and end. May be called again."""
        self._closing = True
        self._thread.join(20)

    def _run(self) -> None:
        buffer = bytearray(_LARGEST_FRAME)
        view = memoryview(buffer)
        with self._socket, self.path.open("wb") as file:
            while True:
                try:
                    length, place = self._socket.recvfrom_into(buffer)
                except TimeoutError:
                    if self._closing:
                        break
                    continue
                # A frame from host to host is heard at both of the bridge's ends: once is enough.
                if place[0].startswith("p-") and place[2] != _PACKET_OUTGOING:
                    file.write(view[:length])
                    self.frames += 1
                    self.size += length
            statistics = self._socket.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
            self.lost = struct.unpack("II", statistics)[1]

    def contains(self, marker: bytes) -> bool:
        """Whether ``marker`` is in what was written. Close first."""
        with self.path.open("rb") as file:
            tail = b""
            while block := file.read(1 << 20):
                if marker in tail + block:
                    return True
                tail = block[-len(marker) :]
        return False
