"""When a cell has ended on a node: after its reply and its idle status, which follows all of its output."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from notebook_cluster.coordinator.cells.executions import IDLE_GRACE, Executions
from notebook_cluster.journal import events as e
from notebook_cluster.protocol.peer import FromKernel, KernelChannel


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time passes only in :meth:`sleep`."""

    now = 0.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(4):
            await asyncio.sleep(0)


class Hub:
    """As much of the coordinator as a run asks for: one node, and the output that was kept."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.ended: list[e.CellNodeEnded] = []
        self.state = self.cells = self.collected = self.comms = self.streaming = self
        self.nodes = {"mini": self}
        self.incarnation = 1
        self.runs = Executions(self, self.ended.append)  # type: ignore[arg-type]
        self.runs.resume(1, "mini")

    def catches(self, *_: Any) -> bool:
        return False

    def take(self, *_: Any) -> dict[str, Any]:
        return {}

    def on_idle(self, *_: Any) -> None:
        pass

    def add(self, key: str, sequence: int, node: str, cell: int, kind: str, content: dict[str, Any]) -> None:
        self.printed.append(content["text"])

    def say(self, channel: KernelChannel, kind: str, **content: Any) -> None:
        """One message of the node's kernel about its run."""
        header, parent = {"msg_type": kind, "msg_id": "x"}, {"msg_type": "execute_request", "msg_id": "1-mini-1"}
        parts = [json.dumps(part).encode() for part in (header, parent, {}, content)]
        self.runs.on_kernel("key", 1, FromKernel(node="mini", incarnation=1, channel=channel), parts)


def on_the_clock(test: Callable[[Clock, Hub], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def played() -> None:
        loop = Clock()

        async def with_hub() -> None:
            await test(loop, Hub())

        try:
            loop.run_until_complete(with_hub())
        finally:
            loop.close()

    played.__name__ = test.__name__
    return played


@on_the_clock
async def test_output_that_comes_long_after_the_reply_belongs_to_the_cell(loop: Clock, hub: Hub) -> None:
    await loop.sleep(600)
    hub.say("shell", "execute_reply", status="ok")
    for number in range(100):
        await loop.sleep(IDLE_GRACE * 0.9)
        assert not hub.ended
        hub.say("iopub", "stream", name="stdout", text=str(number))
    hub.say("iopub", "status", execution_state="idle")
    assert [event.status for event in hub.ended] == ["ok"]
    assert hub.printed == [str(number) for number in range(100)]


@on_the_clock
async def test_a_cell_whose_idle_status_is_lost_ends_once_its_node_is_silent(loop: Clock, hub: Hub) -> None:
    await loop.sleep(600)
    hub.say("shell", "execute_reply", status="error", ename="ValueError", evalue="7")
    await loop.sleep(IDLE_GRACE / 2)
    hub.say("iopub", "stream", name="stdout", text="more")
    await loop.sleep(IDLE_GRACE * 0.9)
    assert not hub.ended
    await loop.sleep(IDLE_GRACE * 0.2)
    assert [(event.status, event.error_value) for event in hub.ended] == [("error", "7")]
    hub.say("iopub", "status", execution_state="idle")
    assert len(hub.ended) == 1


@on_the_clock
async def test_a_cell_does_not_end_without_its_reply(loop: Clock, hub: Hub) -> None:
    hub.say("iopub", "status", execution_state="idle")
    await loop.sleep(IDLE_GRACE * 10)
    assert not hub.ended
    hub.say("shell", "execute_reply", status="ok")
    assert [event.status for event in hub.ended] == ["ok"]
