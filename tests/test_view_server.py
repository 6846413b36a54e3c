"""A view whose process stands still, and one whose process is gone."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from typing import Any

import msgspec
import pytest

from notebook_cluster.coordinator import view_server
from notebook_cluster.coordinator.view_server import View, ViewServer
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION
from notebook_cluster.protocol.views import ConnectionFile, SeriesAdded
from tests.in_loop import in_loop, until

VIEW = """
import sys
import msgspec
from notebook_cluster.client import connection
from notebook_cluster.protocol.views import ConnectionFile
connection.PING_PERIOD = 0.05
file = msgspec.json.decode(sys.stdin.readline(), type=ConnectionFile)
view = connection.Connection(file, "client")
view.subscribe(lambda event: print(type(event).__name__, flush=True))
sys.stdin.read()
"""


@in_loop
async def test_a_view_that_stood_still_goes_on_and_one_whose_process_is_gone_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(view_server, "SILENT_AFTER", 2.0)
    left: list[View] = []

    async def answer(view: View, body: Any) -> None:
        return None

    server = ViewServer(answer, lambda view, clean: left.append(view))
    address = server.start()
    keys = (
        server.socket.server.public_key,
        server.socket.view_identity.public_key,
        server.socket.view_identity.secret_key,
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", VIEW, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    said = process.stdout
    file = ConnectionFile("class", address, *keys, process.pid, 1, PROTOCOL_VERSION, VERSION, "")
    process.stdin.write(msgspec.json.encode(file) + b"\n")

    async def sent_and_heard() -> bytes:
        await until(lambda: not view.stands_still, "word of the view")
        server.send_live(SeriesAdded(series=[]))
        return await said.readline()

    try:
        await until(lambda: any(view.live for view in server.views.values()), "view")
        (view,) = server.views.values()
        view.watching.add(7)
        assert await sent_and_heard() == b"SeriesAdded\n"

        process.send_signal(signal.SIGSTOP)
        await until(lambda: view.stands_still, "silence")
        for _ in range(3):
            server.drop_silent()
            view.last_tried -= 2 * view_server.SILENT_AFTER
        assert list(server.views.values()) == [view]
        assert not server.looked_at
        server.send_live(SeriesAdded(series=[]))
        assert not server.wants_state(changed=False)

        process.send_signal(signal.SIGCONT)
        await until(lambda: server.looked_at, "word of the view")
        assert server.wants_state(changed=False)  # it has missed one
        assert await sent_and_heard() == b"SeriesAdded\n"
        assert not server.wants_state(changed=False)
        assert server.watching(7) == [view]
        assert left == []
    finally:
        process.kill()
        await process.wait()

    def forgotten() -> bool:
        server.drop_silent()
        return not server.views

    await until(forgotten, "end of the view")
    assert left == [view]
    await server.close()
