"""A class of stand-in agents in one process, without kernels: each comes in with the code, gets a node, and gives the
files of a folder of its own, through the code of a real agent. ``python -m tests.stand_in_class FOLDER HOST:PORT CODE
NUMBER``; SIGTERM ends it."""

import asyncio
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

from benchmarks.joiners_agents import Host
from notebook_cluster.agent.settings import Limits
from notebook_cluster.agent.transfers import FileTransfers
from notebook_cluster.pairing import pair
from notebook_cluster.protocol.transfers import FilesRequest
from notebook_cluster.protocol.wire import Message
from notebook_cluster.security import Gate


class Pupil(Host):
    """One machine of the class; it may have another machine's id, so that no two share a folder."""

    def __init__(self, context: "zmq.Context[Any]", gate: Gate, place: int, folder: Path) -> None:
        self._cluster = SimpleNamespace(owner="teacher", server_key="")
        super().__init__(context, gate, self._cluster, place, f"stand-in-{place}")  # type: ignore[arg-type]
        self._name = f"pupil-{place:02d}"
        folder.mkdir(parents=True)
        (folder / "answer.txt").write_text(f"{self._name} says {place}")
        self._files = FileTransfers(Limits(), lambda node: folder, self._send)

    async def join(self, address: str, code: str) -> None:
        """Take the code, and dial."""
        self._listener.start()
        partner = await pair(
            self._context, address, code, identity_key=self._identity.public_key, role="peer", name=self._name,
            owner=f"{self._name}@{self._name}", timeout=60.0,
        )  # fmt: skip
        self._cluster.server_key = partner.key
        self._listener.dial_out(f"{partner.host}:{partner.port}", partner.key)

    def _on_message(self, message: Message, buffers: list[bytes]) -> None:
        if isinstance(message, FilesRequest):
            self._files.handle(message, buffers)
        else:
            super()._on_message(message, buffers)

    async def close(self) -> None:
        self._files.close()
        await super().close()


async def play(root: Path, address: str, code: str, number: int) -> None:
    """They come in a few at a time, for they share one processor; then until SIGTERM."""
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    ended, gate = asyncio.Event(), Gate(context)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    pupils = [Pupil(context, gate, place, root / f"pupil-{place:02d}") for place in range(1, number + 1)]
    turn = asyncio.Semaphore(3)

    async def join(pupil: Pupil) -> None:
        async with turn:
            await pupil.join(address, code)

    await asyncio.gather(*(join(pupil) for pupil in pupils))
    while not ended.is_set():
        for pupil in pupils:
            pupil.speak()
        await asyncio.wait({asyncio.ensure_future(ended.wait())}, timeout=1.0)
    await asyncio.gather(*(pupil.close() for pupil in pupils))
    gate.close()
    context.destroy(linger=0)


if __name__ == "__main__":
    asyncio.run(play(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
