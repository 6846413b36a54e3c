"""A TCP relay that can hold, cut and refuse: Wi-Fi that fails on command."""

import asyncio
from typing import Self


class Relay:
    """Passes bytes from ``port`` (of its own, on loopback) to ``target_port`` and back.

    ``hold()`` keeps what arrives, as radio silence does; ``resume()`` lets it pass, in order. ``cut()`` breaks all
    connections; while ``refusing`` is true new ones are broken at once.

    Attributes:
        rate: bytes a second that pass each way of each connection; None: as fast as it goes.
        cut_after: all connections are broken once, when so many bytes have passed; None: never.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.refusing = False
        self.accepted = 0
        self.rate: float | None = None
        self.cut_after: int | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cut()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self) -> None:
        self._passing.clear()

    def resume(self) -> None:
        self._passing.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        self.accepted += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536 if self.rate is None else 16384):
                await self._passing.wait()
                if self.rate is not None:
                    await asyncio.sleep(len(data) / self.rate)
                if self.cut_after is not None:
                    self.cut_after -= len(data)
                    if self.cut_after < 0:
                        self.cut_after = None
                        self.cut()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        sink.transport.abort()
