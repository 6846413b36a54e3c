"""The ipc socket between an agent and the runtimes of its kernels, and the watchdog."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from notebook_cluster.agent.kernels.control_socket import MAX_HELD_BYTES, ControlSocket
from notebook_cluster.agent.kernels.programs import Watchdog
from tests.in_loop import in_loop

Heard = list[tuple[str, int, bytes]]


@asynccontextmanager
async def control(folder: Path) -> AsyncIterator[tuple[ControlSocket, Heard, Callable[[bytes], zmq.asyncio.Socket]]]:
    """The socket, what was heard on it, and a function that dials it."""
    context: zmq.Context[Any] = zmq.Context()
    dialling = zmq.asyncio.Context()
    heard: Heard = []

    def dial(routing_id: bytes) -> zmq.asyncio.Socket:
        runtime = dialling.socket(zmq.DEALER)
        runtime.routing_id = routing_id
        runtime.connect(socket.endpoint)
        return runtime

    socket = ControlSocket(context, folder / "c1", lambda *message: heard.append(message))
    try:
        yield socket, heard, dial
    finally:
        socket.close()
        dialling.destroy(linger=0)
        context.destroy(linger=0)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in libzmq
        await asyncio.sleep(0.01)


@in_loop
async def test_messages_wait_for_the_runtime_to_dial_and_keep_their_order(jupyter_dirs: Path) -> None:
    async with control(jupyter_dirs) as (socket, heard, dial):
        socket.expect("desk", 1)
        socket.send("desk", 1, b"one")
        socket.send("desk", 1, b"two")
        runtime = dial(b"desk/1")
        await runtime.send(b"hello")
        assert [await runtime.recv(), await runtime.recv()] == [b"one", b"two"]
        socket.send("desk", 1, b"three")
        assert await runtime.recv() == b"three"
        assert heard == [("desk", 1, b"hello")]


@in_loop
async def test_runtime_that_no_kernel_was_started_for_is_dropped_and_counted(jupyter_dirs: Path) -> None:
    async with control(jupyter_dirs) as (socket, heard, dial):
        socket.expect("desk", 2)
        for routing_id in (b"mini/1", b"desk/1", b"\xff\xff"):
            await dial(routing_id).send(b"hello")
        await dial(b"desk/2").send_multipart([b"two", b"frames"])
        await until(lambda: socket.dropped == 4)
        assert heard == []


@in_loop
async def test_kernel_that_is_gone_is_sent_nothing(jupyter_dirs: Path) -> None:
    async with control(jupyter_dirs) as (socket, _, _dial):
        socket.expect("desk", 1)
        socket.forget("desk", 1)
        socket.send("desk", 1, b"late")
        assert socket.dropped == 1


@in_loop
async def test_runtime_that_never_dials_does_not_fill_the_memory(jupyter_dirs: Path) -> None:
    async with control(jupyter_dirs) as (socket, _, _dial):
        socket.expect("desk", 1)
        for _ in range(3):
            socket.send("desk", 1, bytes(MAX_HELD_BYTES // 2))
        assert socket.dropped == 1


def test_watchdog_removes_its_folder_when_its_pipe_closes(tmp_path: Path) -> None:
    folder = tmp_path / "sockets with a space"
    folder.mkdir()
    watchdog = Watchdog(folder)
    watchdog.add(2**22 - 1)
    watchdog.drop(2**22 - 1)
    watchdog.close()
    assert not folder.exists()
    assert tmp_path.exists()


@pytest.mark.usefixtures("no_processes_left")
def test_watchdog_kills_the_groups_that_were_not_dropped(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path / "none")
    kept, dropped = (subprocess.Popen(["sleep", "300"], start_new_session=True) for _ in range(2))
    for process in (kept, dropped):
        watchdog.add(process.pid)
    watchdog.drop(kept.pid)
    watchdog.close()
    assert dropped.wait(30) == -signal.SIGKILL
    assert kept.poll() is None
    kept.kill()
    kept.wait(30)
