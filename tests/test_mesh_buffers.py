"""The send buffers of connections over ipc."""

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from notebook_cluster.mesh.connection import enlarge
from tests.conftest import wait_until
from tests.mesh_nodes import MeshNode, mesh_nodes
from tests.test_mesh import frame

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the test finds its sockets in /proc")


def send_buffers(path: str) -> list[int]:
    """Of this process's connections to the socket at ``path``, in bytes."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=int(number))
        except OSError:  # no socket, or closed since then
            continue
        try:
            if one.family == socket.AF_UNIX and one.getpeername() == path:
                found.append(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        except OSError:  # not connected
            continue
        finally:
            one.detach()
    return found


def usual() -> int:
    """The send buffer that the system gives by itself."""
    with socket.socket(socket.AF_UNIX) as one:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def arrived(sender: MeshNode, receiver: MeshNode, number: int) -> None:
    sender.mesh.send(receiver.name, frame(number))
    wait_until(lambda: frame(number) in [header for _, header, _ in receiver.frames])


def test_a_connection_over_ipc_holds_more_than_the_system_gives_by_itself() -> None:
    with mesh_nodes("mini", "desk", peers=["one", "one"]) as (mini, desk):
        path = desk.mesh.ipc.removeprefix("ipc://")
        arrived(mini, desk, 1)
        wait_until(lambda: [size > usual() for size in send_buffers(path)] == [True])
        mini.loop.call(lambda: mini.mesh.start_over("desk"))
        arrived(mini, desk, 2)
        wait_until(lambda: [size > usual() for size in send_buffers(path)] == [True])


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, str]]:
    """A connection to the socket at a path, and that path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = str(Path(directory) / "s")
        with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as dialling:
            listening.bind(path)
            listening.listen()
            dialling.connect(path)
            yield dialling, path


def test_a_larger_buffer_stays(connection: tuple[socket.socket, str]) -> None:
    dialling, path = connection
    before = dialling.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert enlarge(dialling.fileno(), path, before // 2)
    assert dialling.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def test_a_descriptor_that_is_something_else_by_now_is_left_alone(connection: tuple[socket.socket, str]) -> None:
    dialling, path = connection
    before = dialling.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert not enlarge(dialling.fileno(), path + "-other", 2 * before)
    assert dialling.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before
    reading, writing = os.pipe()
    assert not enlarge(reading, path, 2 * before)
    os.close(reading)
    os.close(writing)
    assert not enlarge(reading, path, 2 * before)
