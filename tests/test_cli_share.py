"""``notebook-cluster share`` as a person at a terminal sees it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from notebook_cluster.agent import AgentReady, AgentSettings, SharingEvent
from notebook_cluster.cli.terminal import Terminal
from notebook_cluster.pairing import pair
from notebook_cluster.protocol import peer as p
from notebook_cluster.security import Trusted, agent_directory, new_identity, trusted_coordinators
from tests.agent_client import AgentClient
from tests.command import COMMAND
from tests.conftest import Agents, wait_until
from tests.inviting_cluster import InvitingCluster
from tests.terminal import TerminalProcess

DOWN = "\x1b[B"

Share = Callable[..., TerminalProcess]


@pytest.fixture
def share(jupyter_dirs: Path, no_processes_left: str) -> Iterator[Share]:
    """``share("--name", "mini")`` runs the command on a terminal; it is ended with the test."""
    with ExitStack() as stack:

        def start(*options: str, **terminal: int) -> TerminalProcess:
            made = TerminalProcess([COMMAND, "share", "--name", "mini", *options], **terminal)
            stack.callback(lambda: made.process.poll() is None and made.close())
            return made

        yield start


def shown(terminal: TerminalProcess, pattern: str) -> str:
    match = re.search(pattern, terminal.output)
    assert match is not None, terminal.output
    return match[1]


def run_beside(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 90))


async def until(terminal: TerminalProcess, text: str) -> None:
    await asyncio.to_thread(terminal.until, text)


def unique(name: str) -> str:
    """Others on this network may run the same test."""
    return f"{name}-{uuid.uuid4().hex[:6]}"


def choose(terminal: TerminalProcess, wanted: str) -> None:
    """Pick the choice that begins with ``wanted``, between those of other clusters on this network."""
    place = 0
    for _ in range(5):
        place = terminal.until("(Use arrow keys)", after=place)
        end = terminal.until("join none", after=place)
        lines = [line.strip(" »") for line in terminal.output[place:end].splitlines()]
        choices = [line for line in lines if line and not line.startswith("- ")]
        index = next((index for index, line in enumerate(choices) if line.startswith(wanted)), None)
        terminal.type(DOWN * (len(choices) - 2 if index is None else index) + "\r")
        if index is not None:
            return
        place = end
    pytest.fail(f"{wanted!r} was never offered:\n{terminal.output}")


async def pair_with(place: str, code: str, name: str = "lesson", owner: str = "anna@laptop") -> None:
    """Be a coordinator that was told ``code``."""
    import zmq

    context: zmq.Context[Any] = zmq.Context()
    try:
        await pair(context, place, code, identity_key=new_identity().public_key, role="cluster", name=name, owner=owner)
    finally:
        context.destroy(linger=0)


# ---- what is said ------------------------------------------------------------------------------------------------


def test_sharing_says_how_to_add_it_who_may_run_code_and_how_it_ends(share: Share) -> None:
    trusted_coordinators(agent_directory("mini")).add(
        Trusted("lesson", new_identity().public_key, "teacher@laptop", since=1.7e9)
    )
    mini = share("--max-nodes", "2", "--memory", "8GB", "--on-power")
    mini.until("Logs:")
    code = shown(mini, r"code +(\S+)\n")
    address = shown(mini, r"address +(\S+:\d+)\n")
    said = mini.output
    assert f"%cluster add mini --code {code}" in said
    assert f"%cluster add {address} --code {code}" in said
    assert "good for one person, once" in said
    assert "teacher@laptop, paired on 2023-11-1" in said
    assert "can read, change and delete every file" in said
    assert "One owner at a time: while somebody has nodes here, nobody else gets any" in said
    assert "Limits: at most 2 nodes; 8 GB of memory for all nodes together; on battery only above 30 %." in said
    assert "notebook-cluster trust remove" in said
    assert mini.close(signal.SIGINT) == 0
    assert "not shared any more: stopped by SIGINT" in mini.output


def test_the_code_is_drawn_where_the_terminal_has_room(share: Share) -> None:
    wide = share()
    wide.until("Logs:")
    assert "█" in wide.output
    wide.close()
    for options, columns in (((), 25), (("--no-qr",), 160)):
        other = share(*options, columns=columns)
        other.until("Logs:")
        assert "█" not in other.output
        other.close()


def test_the_picture_holds_the_line_to_type() -> None:
    import segno

    from notebook_cluster.cli.terminal import add_line

    line = add_line("192.168.1.20", 40124, "tiger-lamp-42")
    assert line == "%cluster add 192.168.1.20:40124 --code tiger-lamp-42"
    assert segno.make(line, error="l", micro=False).symbol_size(border=2)[0] < 45


def test_a_class_code_and_no_code(share: Share) -> None:
    given = share("--code", "Maple River 7", "--code-minutes", "45")
    given.until("Logs:")
    assert "code     maple-river-7\n" in given.output
    assert "any number of people" in given.output
    assert "(45 minutes)" in given.output
    given.close()
    several = share("--owners", "2")
    several.until("Logs:")
    assert "Up to 2 owners at a time" in several.output
    assert "run code in each other's kernels" in several.output
    several.close()
    none = share("--no-code")
    none.until("Logs:")
    assert "No code is open" in none.output
    assert "--code" not in none.output.split("Limits")[0]


def test_pairing_and_wrong_codes_are_one_line_each_and_a_new_code_follows(share: Share) -> None:
    from notebook_cluster.pairing import PairingError

    mini = share()
    mini.until("Logs:")
    code, port = shown(mini, r"code +(\S+)\n"), shown(mini, r"address +\S+:(\d+)\n")

    async def main() -> None:
        place = f"127.0.0.1:{port}"
        with pytest.raises(PairingError, match="19 tries left"):
            await pair_with(place, "wrong-code-99")
        await until(mini, "19 tries left")
        await pair_with(place, code)
        await until(mini, "paired with anna@laptop at 127.0.0.1")
        await until(mini, "new code: ")

    run_beside(main)
    lines = [line for line in mini.output.splitlines() if "tries left" in line]
    assert len(lines) == 1
    assert re.match(r"\d\d:\d\d:\d\d  .*127\.0\.0\.1", lines[0])
    second = shown(mini, r"new code: ([a-z0-9-]+)")
    assert second != code
    assert f"--code {second}" in mini.output
    mini.type("new\n")
    wait_until(lambda: len(re.findall("new code: ", mini.output)) == 2, 60, "a third code")
    mini.type("what\n")
    mini.until("'what' means nothing here")


def test_what_others_are_called_cannot_steer_the_terminal(share: Share) -> None:
    """An owner with control characters does not even get into the pairing."""
    from notebook_cluster.cli.console import one_line

    assert one_line("a\x1b[2Jb\nc\u202ed") == "a[2Jbcd"


# ---- --confirm ---------------------------------------------------------------------------------------------------


def test_confirm_asks_before_each_start(share: Share) -> None:
    mini = share("--confirm")
    mini.until("Logs:")
    key = json.loads((agent_directory("mini") / "identity.json").read_text())["public_key"]
    ready = {"port": int(shown(mini, r"port (\d+),")), "public_key": key}

    async def main() -> None:
        async with AgentClient(ready) as client:
            client.request_node("first")
            await until(mini, "wants to start node first of cluster digits here")
            await until(mini, "start node first for ")
            mini.type("perhaps\n")
            mini.type("n\n")
            refused = await client.receive(p.NodeRefused)
            assert "did not allow it" in refused.reason
            client.request_node("second")
            await until(mini, "start node second for ")
            mini.type("y\n")
            await client.receive(p.NodeStarted, lambda message: message.node == "second")

    run_beside(main)


# ---- joining a cluster -------------------------------------------------------------------------------------------


def test_the_picker_joins_the_cluster_that_is_chosen(share: Share) -> None:
    async def main() -> None:
        name = unique("biology")
        async with InvitingCluster("algebra", "maple-river-7"), InvitingCluster(name, "copper-owl-310") as cluster:
            mini = share("--join")
            await asyncio.to_thread(choose, mini, f"{name}, of anna@laptop, at 127.0.0.1")
            await until(mini, f"Code of {name}")
            mini.type("copper-owl-31\r")
            await until(mini, "19 tries left")
            await until(mini, f"code of {name} (its owner sees it in the notebook")
            mini.type("cat\n")
            await until(mini, "code 'cat' has 3 letters")
            mini.type("Copper Owl 310\n")
            await until(mini, f"paired with cluster {name} of anna@laptop")
            await until(mini, "connected")
            assert [partner.name for partner in cluster.paired] == ["mini"]
            await asyncio.to_thread(mini.close)

    run_beside(main)


def test_the_picker_can_be_left_without_joining(share: Share) -> None:
    async def main() -> None:
        async with InvitingCluster("algebra", "maple-river-7") as cluster:
            mini = share("--join")
            await asyncio.to_thread(choose, mini, "join none")
            await until(mini, "Logs:")
            assert cluster.paired == []

    run_beside(main)


def test_ctrl_c_in_the_picker_ends_the_command(share: Share) -> None:
    async def main() -> None:
        async with InvitingCluster("algebra", "maple-river-7"):
            mini = share("--join")
            await until(mini, "join none")
            mini.type("\x03")
            assert await asyncio.to_thread(mini.process.wait, 20) == 130

    run_beside(main)


def test_clusters_that_appear_later_are_listed_and_joined_by_their_number(share: Share) -> None:
    async def main() -> None:
        name = unique("algebra")
        mini = share()
        await until(mini, "Logs:")
        async with InvitingCluster(name, "maple-river-7") as cluster:
            await until(mini, f"{name}, of anna@laptop, at 127.0.0.1: type ")
            number = shown(mini, rf"{name}, of anna@laptop, at 127\.0\.0\.1: type (\d+) to join it")
            mini.type(f"{number}\n")
            await until(mini, f"code of {name}")
            mini.type("\n")
            await until(mini, f"{name} is not joined")
            mini.type(f"{number}\nmaple-river-7\n")
            await until(mini, f"paired with cluster {name} of anna@laptop")
            await until(mini, "connected")
            # the machine may hear of it first
            await asyncio.to_thread(wait_until, lambda: cluster.arrived, 60, "the cluster to hear of it")
            assert len(cluster.arrived) == 1
            await asyncio.to_thread(mini.close)

    run_beside(main)


def test_dial_goes_to_an_address(share: Share) -> None:
    async def main() -> None:
        async with InvitingCluster("algebra", "maple-river-7") as cluster:
            place = f"127.0.0.1:{cluster.pairing_port}"
            mini = share("--dial", place, "--code", "maple-river-7")
            await until(mini, f"It goes to the cluster at {place} by itself")
            await until(mini, "connected")
            assert "█" not in mini.output
            await asyncio.to_thread(mini.close)
            wrong = share("--dial", place, "--code", "maple-river-8")
            assert await asyncio.to_thread(wrong.process.wait, 20) == 1
            assert "'maple-river-8' is wrong" in wrong.output

    run_beside(main)


# ---- the terminal itself -----------------------------------------------------------------------------------------


def test_in_the_background_the_keyboard_belongs_to_the_shell(jupyter_dirs: Path, no_processes_left: str) -> None:
    """``share &``: what is typed at the shell must neither stop the agent nor reach it."""
    shell = TerminalProcess(["/bin/bash", "--norc", "--noprofile", "-i"])
    try:
        shell.type(f"{COMMAND} share --name mini --no-qr &\n")
        place = shell.until("Logs:")
        shell.type("echo typed-$((40 + 2))\n")
        shell.until("typed-42", after=place)
        shell.type("jobs\n")
        shell.until("Running", after=place)
        assert "means nothing here" not in shell.output
        shell.type("kill %1\n")
        shell.until("not shared any more: stopped by SIGTERM")
        shell.type("exit\n")
        shell.process.wait(30)
    finally:
        shell.close(signal.SIGKILL)


def test_without_a_terminal_nothing_is_asked_and_the_log_says_what_happens(agents: Agents) -> None:
    agents("mini")
    wait_until(lambda: "Logs:" in agents.output("mini"), 60, "introduction")
    output = agents.output("mini")
    code = re.search(r"code +(\S+)\n", output)
    port = re.search(r"address +\S+:(\d+)\n", output)
    assert code is not None
    assert port is not None
    assert "█" not in output
    assert "\x1b" not in output
    asyncio.run(pair_with(f"127.0.0.1:{port[1]}", code[1]))
    wait_until(lambda: "paired with anna@laptop" in agents.output("mini"), 60, "line about the pairing")
    wait_until(lambda: "new code: " in agents.output("mini"), 60, "next code")


def test_an_interrupt_while_it_starts_up_is_no_traceback(jupyter_dirs: Path, no_processes_left: str) -> None:
    process = subprocess.Popen(
        [COMMAND, "share", "--name", "mini"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ.copy(),
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("now", "shown"), [("10.9.8.7", "10.9.8.7:41 --code b"), ("127.0.0.1", "b (this machine is on no network yet)")]
)
def test_a_new_code_has_the_address_that_the_machine_has_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], now: str, shown: str
) -> None:
    terminal = Terminal(AgentSettings(name="mini", directory=tmp_path), interactive=False, picture=False)
    terminal.ready(AgentReady(public_key="k" * 40, port=40, pid=1, name="mini", code="a", hosts=["10.0.0.2"]))
    monkeypatch.setattr("notebook_cluster.cli.terminal.host_addresses", lambda: [now])
    terminal.happened(SharingEvent("code-opened", "", code="b", port=41))
    said = capsys.readouterr().out
    assert "10.0.0.2:0\n" in said
    assert said.endswith(f"{shown}\n")
