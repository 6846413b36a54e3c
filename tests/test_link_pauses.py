"""A coordinator that did not run for a while: another one may have taken its place meanwhile."""

import time
from typing import Any

import pytest
import zmq

from notebook_cluster import security
from notebook_cluster.link.frames import AnyHeader, Data, Hello, SessionRefusal, Welcome
from notebook_cluster.protocol import PROTOCOL_VERSION, decode, encode
from notebook_cluster.protocol.peer import LogLines, ReadLog
from tests.in_loop import in_loop, until
from tests.link_ends import Agent, Coordinator, closing


class Slept:
    """The clock that goes on while the machine sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr("notebook_cluster.link.dialer.clock_through_sleep", lambda: time.monotonic() + self.seconds)


class ListeningAgent:
    """An agent that answers when the test says so, and remembers what it heard in between."""

    def __init__(self) -> None:
        self.identity = security.new_identity()
        self.trusted: dict[str, str] = {}
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gate = security.Gate(self.context)
        self.gate.allow("listening", lambda key: key)
        self.router = self.context.socket(zmq.ROUTER)
        security.serve(self.router, self.identity, "listening")
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.heard: list[Any] = []
        self.peer = b""

    def take(self) -> list[Any]:
        """All headers that came so far."""
        while self.router.poll(0):
            self.peer, frame, *_ = self.router.recv_multipart()
            self.heard.append(decode(frame, AnyHeader))
        return self.heard

    async def hears(self, kind: type) -> Any:
        """The newest header of this kind, as soon as there is one."""
        await until(lambda: any(isinstance(header, kind) for header in self.take()), kind.__name__)
        return [header for header in self.heard if isinstance(header, kind)][-1]

    def send(self, header: Any) -> None:
        self.router.send_multipart([self.peer, encode(header)])

    async def close(self) -> None:
        self.gate.close()
        self.context.destroy(linger=0)


@in_loop
async def test_after_a_pause_nothing_is_sent_before_the_agent_has_welcomed_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept, agent = Slept(monkeypatch), ListeningAgent()
    coordinator = Coordinator(agent)  # type: ignore[arg-type]
    async with closing(coordinator, agent):  # type: ignore[arg-type]
        said = await agent.hears(Hello)
        agent.send(Welcome(said.cluster, said.epoch, said.session, 0, 0, 1, True))
        await coordinator.connected()
        coordinator.dialer.send(ReadLog(node="n", lines=1))
        assert (await agent.hears(Data)).sequence == 1
        agent.heard.clear()

        slept.seconds = 60.0
        coordinator.dialer.send(ReadLog(node="n", lines=2))
        said = await agent.hears(Hello)
        coordinator.dialer.send(ReadLog(node="n", lines=3))
        assert [type(header) for header in agent.take() if not isinstance(header, Hello)] == []
        agent.send(Welcome(said.cluster, said.epoch, said.session, 1, 1, 1, False))
        await until(lambda: [h.sequence for h in agent.take() if isinstance(h, Data)] == [2, 3], "both messages")

        # and if the agent has another one: nothing at all
        agent.heard.clear()
        slept.seconds = 120.0
        coordinator.dialer.send(ReadLog(node="n", lines=4))
        said = await agent.hears(Hello)
        agent.send(SessionRefusal(said.cluster, said.epoch, said.session, PROTOCOL_VERSION, "another leads", 9))
        await until(lambda: coordinator.dialer.condition == "refused", "the refusal")
        assert coordinator.dialer.newer == 9
        assert not [header for header in agent.take() if isinstance(header, Data)]


@in_loop
async def test_what_both_sides_say_after_a_pause_comes_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    slept, agent = Slept(monkeypatch), Agent()
    agent.start()
    coordinator = await Coordinator(agent).connected()
    async with closing(coordinator, agent):
        for number in range(5):
            slept.seconds += 60.0
            coordinator.dialer.send(ReadLog(node="n", lines=number))
            agent.sessions[0].send(LogLines(node=str(number), lines=[]))
            await until(lambda: len(agent.numbers()) == len(coordinator.numbers()) == number + 1, "both messages")  # noqa: B023
        assert agent.numbers() == coordinator.numbers() == list(range(5))
        assert len(agent.sessions) == 1
        assert "refused" not in coordinator.conditions


@in_loop
async def test_who_was_replaced_is_told_by_whom_also_where_the_other_has_another_id() -> None:
    agent = Agent()
    agent.start()
    newer = await Coordinator(agent, epoch=4, cluster="class-2", cluster_name="class").connected()
    older = Coordinator(agent, epoch=3, identity=newer.identity, cluster="class-1", cluster_name="class")
    async with closing(newer, older, agent):
        await older.connected()
        agent.sessions[1].close()
        agent.sessions[0].has_taken_over = True
        older.dialer.send(ReadLog(node="n", lines=1))
        await until(lambda: older.dialer.condition == "refused", "the refusal")
        assert older.dialer.newer == 4
        assert "start 4 of the coordinator of class has taken over, this is start 3" in older.dialer.reason
        # another cluster of that owner, and one that begins later, are let in
        text = Coordinator(agent, epoch=3, identity=newer.identity, cluster="text")
        latest = Coordinator(agent, epoch=5, identity=newer.identity, cluster="class-3", cluster_name="class")
        async with closing(text, latest):
            await text.connected()
            await latest.connected()
        assert agent.numbers() == []
