"""Messages for a kernel's subshell: answered while a cell runs, in order, also by a kernel without subshells."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.agent.kernels.subshell import FEATURE, MOST_HELD, Subshell
from tests.agent_client import AgentClient, PrivateAgent
from tests.in_loop import in_loop


@pytest.fixture
def agent(jupyter_dirs: Path, no_processes_left: str) -> Iterator[PrivateAgent]:
    with PrivateAgent(jupyter_dirs / "cluster") as process:
        yield process


def complete(client: AgentClient, code: str) -> str:
    content = {"code": code, "cursor_pos": len(code)}
    return client.to_kernel("shell", "complete_request", content, subshell=True)


async def matches(client: AgentClient, request: str) -> list[str]:
    replies = await client.until(lambda: client.said(request, "complete_reply"), "a complete_reply")
    return list(replies[0]["matches"])


@in_loop
async def test_busy_kernel_answers_on_its_subshell(agent: PrivateAgent) -> None:
    async with AgentClient(agent.ready) as client:
        await client.start_node()
        busy = client.execute("import time\nrecipe = 1\nprint('began')\nwhile True: time.sleep(0.01)")
        await client.printed(busy, "began")
        assert await matches(client, complete(client, "reci")) == ["recipe"]
        assert await matches(client, complete(client, "recipe.numer")) == [".numerator"]
        assert not client.said(busy, "execute_reply")
        assert not client.said(busy, "create_subshell_reply")


@in_loop
async def test_kernel_that_has_only_just_started_makes_its_subshell_when_its_main_shell_runs(
    agent: PrivateAgent,
) -> None:
    async with AgentClient(agent.ready) as client:
        client.request_node()
        early = complete(client, "enumer")
        assert "enumerate" in await matches(client, early)
        listing = client.to_kernel("control", "list_subshell_request", {})
        replies = await client.until(lambda: client.said(listing, "list_subshell_reply"), "the subshells")
        assert len(replies[0]["subshell_id"]) == 1


class FakeKernel:
    """The requests that a subshell makes, and what it delivers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.delivered: list[dict[str, Any]] = []
        self.subshell = Subshell(
            lambda channel, kind, content: self.requests.append((channel, kind)),
            lambda parts: self.delivered.append(json.loads(parts[0])),
        )

    def send(self, identity: str) -> None:
        self.subshell.send([json.dumps({"msg_id": identity}).encode(), b"{}", b"{}", b"{}"])

    def reply(self, channel: Any, kind: str, **content: Any) -> None:
        self.subshell.on_reply(channel, kind, json.dumps(content).encode())


def test_kernel_without_subshells_gets_the_messages_on_its_main_shell() -> None:
    kernel = FakeKernel()
    kernel.send("first")
    kernel.send("second")
    assert kernel.requests == [("control", "kernel_info_request"), ("shell", "kernel_info_request")]
    assert kernel.delivered == []
    kernel.reply("control", "kernel_info_reply", supported_features=[])
    kernel.send("third")
    assert kernel.delivered == [{"msg_id": "first"}, {"msg_id": "second"}, {"msg_id": "third"}]


def test_subshell_is_made_once_and_only_when_the_main_shell_runs() -> None:
    kernel = FakeKernel()
    kernel.send("first")
    kernel.reply("control", "kernel_info_reply", supported_features=[FEATURE])
    assert ("control", "create_subshell_request") not in kernel.requests
    kernel.reply("shell", "kernel_info_reply")
    kernel.subshell.main_runs()
    assert kernel.requests.count(("control", "create_subshell_request")) == 1
    kernel.reply("control", "create_subshell_reply", status="ok", subshell_id="s1")
    kernel.send("second")
    assert kernel.delivered == [{"msg_id": "first", "subshell_id": "s1"}, {"msg_id": "second", "subshell_id": "s1"}]


def test_kernel_that_fails_to_make_a_subshell_or_answers_nonsense_gets_them_on_its_main_shell() -> None:
    kernel = FakeKernel()
    kernel.send("first")
    kernel.subshell.on_reply("control", "kernel_info_reply", b"[not json")
    assert kernel.delivered == [{"msg_id": "first"}]
    kernel = FakeKernel()
    kernel.subshell.main_runs()
    kernel.send("first")
    kernel.reply("control", "kernel_info_reply", supported_features=[FEATURE])
    kernel.reply("control", "create_subshell_reply", status="error", evalue="no")
    assert kernel.delivered == [{"msg_id": "first"}]


def test_what_waits_for_a_kernel_that_never_answers_is_bounded() -> None:
    kernel = FakeKernel()
    for number in range(MOST_HELD + 7):
        kernel.send(str(number))
    assert kernel.subshell.dropped == 7
