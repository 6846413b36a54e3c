"""When a cell has ended on a node: after its reply and its idle status, which follows all of its output."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, get_args

from notebook_cluster.coordinator.cells.executions import IDLE_GRACE, Executions
from notebook_cluster.coordinator.inbox import AgentInbox
from notebook_cluster.journal import events as e
from notebook_cluster.journal.state import Node
from notebook_cluster.protocol.interaction import VALUE_KEY
from notebook_cluster.protocol.node import FromNodeBody
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


class FakeCoordinator:
    """As much of the coordinator as a run asks for: one node, and the output that was kept."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.ended: list[e.CellNodeEnded] = []
        mini = Node("mini", "mini", "cpu", 0, incarnation=1)
        peer = SimpleNamespace(key="key")
        self.recorded: list[e.Event] = []
        cells = {1: SimpleNamespace(replies={})}
        state = SimpleNamespace(nodes={"mini": mini}, peers={"mini": peer}, cells=cells)
        core: Any = SimpleNamespace(state=state, record=self.recorded.append)
        self.dialer: Any = SimpleNamespace(received=1, handling=0)
        link = SimpleNamespace(name="mini", dialer=self.dialer, heard=lambda: None)
        delivery: Any = SimpleNamespace(links={"mini": link})
        fake: Any = self
        executions = Executions(core, delivery, stdin=fake, collected=fake, on_ended=self.ended.append)
        executions.resume(1, "mini")
        others = (
            "links",
            "membership",
            "measurements",
            "relay",
            "deadlocks",
            "decisions",
            "runner",
            "stdin",
            "notices",
        )
        more = ("inspections", "variables", "transfers", "examination", "signs", "comms", "streaming", "taking_over")
        parts: dict[str, Any] = dict.fromkeys((*others, *more), self)
        self.inbox = AgentInbox(core, delivery=delivery, executions=executions, **parts)

    def __getattr__(self, name: str) -> Any:
        """What of a part nothing is asked of here."""
        return lambda *_: None

    def catches(self, *_: Any) -> bool:
        return False

    def take(self, cell: int, node: str, answers: Any) -> dict[str, Any]:
        """As Collected: the value is for views, the rest is returned."""
        return {name: answer for name, answer in (answers or {}).items() if name != VALUE_KEY}

    def on_idle(self, *_: Any) -> None:
        pass

    def add(self, origin: Any, node: str, cell: int, kind: str, content: dict[str, Any]) -> None:
        self.printed.append(content["text"])

    def say(self, channel: KernelChannel, kind: str, **content: Any) -> None:
        """One message of the node's kernel about its run."""
        header, parent = {"msg_type": kind, "msg_id": "x"}, {"msg_type": "execute_request", "msg_id": "1-mini-1"}
        parts = [json.dumps(part).encode() for part in (header, parent, {}, content)]
        self.inbox.receive(self.dialer, "mini", FromKernel(node="mini", incarnation=1, channel=channel), parts)


def on_the_clock(test: Callable[[Clock, FakeCoordinator], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def played() -> None:
        loop = Clock()

        async def with_fake() -> None:
            await test(loop, FakeCoordinator())

        try:
            loop.run_until_complete(with_fake())
        finally:
            loop.close()

    played.__name__ = test.__name__
    return played


@on_the_clock
async def test_output_that_comes_long_after_the_reply_belongs_to_the_cell(loop: Clock, fake: FakeCoordinator) -> None:
    await loop.sleep(600)
    fake.say("shell", "execute_reply", status="ok")
    for number in range(100):
        await loop.sleep(IDLE_GRACE * 0.9)
        assert not fake.ended
        fake.say("iopub", "stream", name="stdout", text=str(number))
    fake.say("iopub", "status", execution_state="idle")
    assert [event.status for event in fake.ended] == ["ok"]
    assert fake.printed == [str(number) for number in range(100)]


@on_the_clock
async def test_a_cell_whose_idle_status_is_lost_ends_once_its_node_is_silent(
    loop: Clock, fake: FakeCoordinator
) -> None:
    await loop.sleep(600)
    fake.say("shell", "execute_reply", status="error", ename="ValueError", evalue="7")
    await loop.sleep(IDLE_GRACE / 2)
    fake.say("iopub", "stream", name="stdout", text="more")
    await loop.sleep(IDLE_GRACE * 0.9)
    assert not fake.ended
    await loop.sleep(IDLE_GRACE * 0.2)
    assert [(event.status, event.error_value) for event in fake.ended] == [("error", "7")]
    fake.say("iopub", "status", execution_state="idle")
    assert len(fake.ended) == 1


@on_the_clock
async def test_a_cell_does_not_end_without_its_reply(loop: Clock, fake: FakeCoordinator) -> None:
    fake.say("iopub", "status", execution_state="idle")
    await loop.sleep(IDLE_GRACE * 10)
    assert not fake.ended
    fake.say("shell", "execute_reply", status="ok")
    assert [event.status for event in fake.ended] == ["ok"]


@on_the_clock
async def test_a_reply_is_written_down_before_the_idle_status_is_waited_for(loop: Clock, fake: FakeCoordinator) -> None:
    """Its agent does not send it again: a coordinator that is started again after a kill takes it from the journal."""
    answers = {"x": {"status": "ok"}, VALUE_KEY: {"status": "ok", "data": {"text/plain": "megabytes"}}}
    fake.say("shell", "execute_reply", status="ok", user_expressions=answers, execution_count=1)
    (replied,) = fake.recorded
    kept = {"status": "ok", "user_expressions": {"x": {"status": "ok"}}}  # not the value, which would fill the disk
    assert replied == e.CellNodeReplied(1, "mini", 1, kept)
    assert fake.ended == []


@on_the_clock
async def test_a_reply_after_the_idle_status_ends_the_cell_without_a_row_of_its_own(
    loop: Clock, fake: FakeCoordinator
) -> None:
    fake.say("iopub", "status", execution_state="idle")
    fake.say("shell", "execute_reply", status="ok", user_expressions={})
    assert fake.recorded == []
    assert [ended.status for ended in fake.ended] == ["ok"]


@on_the_clock
async def test_there_is_somebody_for_every_message_of_a_node(loop: Clock, fake: FakeCoordinator) -> None:
    """One that nobody takes up is dropped without a word: the coordinator waited 20 s for reports that had come."""
    assert set(get_args(FromNodeBody)) - fake.inbox._handlers.keys() == set()
