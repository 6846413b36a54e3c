"""A browser's end of the server extension's stream, for tests."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from typing import Any


class Stream:
    """Reads messages as they come; ``socket`` is what ``jp_ws_fetch`` returns."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.overviews: list[dict[str, Any]] = []
        self.series: list[dict[str, Any]] = []
        self.done: dict[int, dict[str, Any]] = {}
        self._ids = itertools.count(1)

    async def read(self, timeout: float) -> dict[str, Any]:
        """The next message."""
        text = await asyncio.wait_for(self.socket.read_message(), timeout)
        assert text is not None, "the stream was closed"
        message: dict[str, Any] = json.loads(text)
        match message["type"]:
            case "Overview":
                self.overviews.append(message)
            case "CurvePoints":
                self.series.append(message)
            case "Done":
                self.done[message["id"]] = message
        return message

    async def until(self, condition: Callable[[], Any], timeout: float = 60) -> Any:
        """Read until ``condition()`` is true; returns what it returned."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            left = deadline - time.monotonic()
            assert left > 0, f"waited {timeout:g} s; the last overview: {self.overviews[-1:]}"
            try:
                await self.read(left)
            except TimeoutError:
                continue
        return value

    def row(self, cluster: str) -> dict[str, Any] | None:
        """The cluster's row in the newest overview."""
        rows = self.overviews[-1]["clusters"] if self.overviews else []
        return next((row for row in rows if row["name"] == cluster), None)

    def peers(self) -> dict[str, dict[str, Any]]:
        """Name -> row of each peer in the newest overview."""
        return {peer["name"]: peer for peer in self.overviews[-1]["peers"]} if self.overviews else {}

    def nodes(self, cluster: str) -> dict[str, dict[str, Any]]:
        """Name -> row of each node, empty before the cluster has answered."""
        row = self.row(cluster)
        return {} if row is None or row["state"] is None else {node["name"]: node for node in row["state"]["nodes"]}

    async def send(self, action: str, **fields: Any) -> int:
        """Ask for something; the id of the answer."""
        number = next(self._ids)
        await self.socket.write_message(json.dumps({"id": number, "action": action, **fields}))
        return number

    async def ask(self, action: str, **fields: Any) -> Any:
        """Ask for something that works; what it returned."""
        done = await self.answer(await self.send(action, **fields))
        assert done["error"] == "", done
        return done["value"]

    async def refused(self, action: str, **fields: Any) -> str:
        """Ask for something that does not work; what was said."""
        done = await self.answer(await self.send(action, **fields))
        assert done["error"], done
        assert "\n" not in done["error"]
        return str(done["error"])

    async def answer(self, number: int) -> dict[str, Any]:
        """The Done with this id."""
        return await self.until(lambda: self.done.get(number))
