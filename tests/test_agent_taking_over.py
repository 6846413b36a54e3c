"""A new coordinator of an owner asks what the one before it, of the same cluster name, has left on a machine."""

from pathlib import Path

import psutil
import pytest

from notebook_cluster.link import LinkSettings
from notebook_cluster.protocol.kept import QUIET, AskKept, KeptAnswer
from notebook_cluster.security import new_identity
from tests.agent_client import AgentClient, SharedAgent
from tests.in_loop import in_loop

pytestmark = pytest.mark.usefixtures("no_processes_left")

LINK = LinkSettings(heartbeat=0.2, suspect=0.8, lost=1.5)

JOB = """
import pathlib, numpy
from notebook_cluster.checkpoints import Contents, Part, save
from notebook_cluster.training.runtime import current_runtime
class Job:
    on_control = on_mesh = on_tick = on_roster = lambda self, *arguments: None
    def keep(self):
        def write():
            {before}
            tensors = {{'w': numpy.ones(3, numpy.float32)}}
            about = {{'cluster_id': 'digits-1', 'epoch': 7}}
            contents = Contents('model', {round}, 'ab' * 16, tensors, tensors, [Part('desk', 0, b'')], about)
            return save(pathlib.Path.cwd() / 'checkpoints', 'model-kept', contents)[0]
        return write
current_runtime().attach_job('model', Job())
print('training')
"""


async def train(client: AgentClient, round: int = 51, before: str = "pass", incarnation: int = 1) -> int:
    """Start a node whose training keeps the state after ``round``; its process id."""
    started = await client.start_node(incarnation=incarnation)
    request = client.execute(JOB.format(round=round, before=before), incarnation=incarnation)
    await client.printed(request, "training")
    return started.pid


async def ask(client: AgentClient, ticket: int, **options: object) -> KeptAnswer:
    client.send(AskKept(ticket=ticket, **options))  # type: ignore[arg-type]
    return await client.receive(KeptAnswer, lambda answer: answer.ticket == ticket)


async def silent(client: AgentClient) -> None:
    """Return when the agent has not heard the coordinator before for long enough."""
    ticket = 1000
    while ((await ask(client, ticket)).silent or 0.0) < QUIET:
        ticket += 1


@in_loop
async def test_what_the_coordinator_before_has_left_is_kept_ended_and_told(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", lease=60, link=LINK) as agent:
        async with AgentClient(agent.where, cluster="digits-1", cluster_name="digits", settings=LINK) as client:
            pid = await train(client)
            async with AgentClient(
                agent.where, cluster="digits-2", cluster_name="digits", identity=client.identity, epoch=2, settings=LINK
            ) as early:
                # who is heard keeps its kernels, whatever is asked
                answer = await ask(early, 1, end=True)
                assert (answer.nodes, answer.states) == (1, [])
                assert answer.silent is not None
                assert answer.silent < QUIET
        assert psutil.pid_exists(pid)
        async with AgentClient(
            agent.where, cluster="digits-3", cluster_name="digits", identity=client.identity, epoch=3, settings=LINK
        ) as new:
            await silent(new)
            answer = await ask(new, 1)
            assert (answer.nodes, answer.states) == (1, [])
            assert psutil.pid_exists(pid)
            answer = await ask(new, 2, end=True)
            (state,) = answer.states
            assert (answer.nodes, answer.silent, answer.damaged) == (1, None, [])
            assert (state.name, state.job, state.round, state.state_hash) == ("model-kept", "model", 51, "ab" * 16)
            assert (state.cluster_id, state.epoch) == ("digits-1", 7)
            assert state.bytes > 0
            assert not psutil.pid_exists(pid)
            # the next one of the same name works in the same folder, and is not mixed up with the one before
            await train(new, incarnation=2)
        ended = await agent.told("node-ended", "a new cluster digits of ")
        assert "has taken over" in ended.text


@in_loop
async def test_others_hear_nothing_and_end_nothing(jupyter_dirs: Path) -> None:
    """Neither another owner with the same name of a cluster, nor another cluster of the same owner."""
    other = new_identity()
    async with SharedAgent(jupyter_dirs / "mini", lease=60, link=LINK) as agent:
        async with AgentClient(agent.where, cluster="digits-1", cluster_name="digits", settings=LINK) as client:
            pid = await train(client)
        await agent.pair(other)
        async with (
            AgentClient(
                agent.where, cluster="digits-2", cluster_name="digits", identity=other, trusted=False, settings=LINK
            ) as stranger,
            AgentClient(
                agent.where, cluster="text-1", cluster_name="text", identity=client.identity, settings=LINK
            ) as same,
            AgentClient(
                agent.where, cluster="digits-3", cluster_name="digits", identity=client.identity, settings=LINK
            ) as owner,
        ):
            await silent(owner)
            where = str(jupyter_dirs / "mini" / "work" / "digits")
            for client in (stranger, same):
                answer = await ask(client, 1, end=True)
                assert (answer.nodes, answer.silent, answer.states) == (0, None, [])
            assert psutil.pid_exists(pid)
            assert [state.round for state in (await ask(owner, 1, end=True)).states] == [51]
            assert (await ask(stranger, 2, end=True, directory=where)).states == []


@pytest.mark.proof
@in_loop
async def test_damaged_files_are_named_and_the_one_before_is_told(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", lease=60, link=LINK) as agent:
        async with AgentClient(agent.where, cluster="digits-1", cluster_name="digits", settings=LINK) as client:
            identity = client.identity
            await train(client)
        for number, round in ((2, 52), (3, 53)):
            async with AgentClient(
                agent.where, cluster=f"digits-{number}", cluster_name="digits", identity=identity, epoch=number,
                settings=LINK,
            ) as new:  # fmt: skip
                await silent(new)
                answer = await ask(new, 1, end=True)
                assert [state.round for state in answer.states] == [round - 1]
                await train(new, round)
        home = jupyter_dirs / "mini" / "work" / "digits" / "checkpoints" / "model-kept"
        async with AgentClient(
            agent.where, cluster="digits-4", cluster_name="digits", identity=identity, epoch=4, settings=LINK
        ) as new:
            await silent(new)
            assert [state.round for state in (await ask(new, 1, end=True)).states] == [53]
            torn = home / "round-000053" / "global.safetensors"
            torn.write_bytes(torn.read_bytes()[:-3])
            answer = await ask(new, 2, end=True)
            assert [state.round for state in answer.states] == [52]
            assert [str(torn) in line for line in answer.damaged] == [True]


@in_loop
async def test_node_that_cannot_keep_its_training_is_named(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", lease=60, link=LINK) as agent:
        async with AgentClient(agent.where, cluster="digits-1", cluster_name="digits", settings=LINK) as client:
            await train(client, before="raise OSError('no space left')")
        async with AgentClient(
            agent.where, cluster="digits-2", cluster_name="digits", identity=client.identity, epoch=2, settings=LINK
        ) as new:
            await silent(new)
            answer = await ask(new, 1, end=True)
            assert answer.states == []
            assert answer.damaged == ["node desk of cluster digits kept no checkpoint: no space left"]


@in_loop
async def test_checkpoint_that_is_being_written_is_waited_for(jupyter_dirs: Path, tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    before = (
        f"import time; pathlib.Path({str(begun)!r}).touch()\n"
        f"            while not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.05)"
    )
    async with SharedAgent(jupyter_dirs / "mini", lease=60, keep_after=1.0, link=LINK) as agent:
        async with AgentClient(agent.where, cluster="digits-1", cluster_name="digits", settings=LINK) as client:
            await train(client, before=before)
        async with AgentClient(
            agent.where, cluster="digits-2", cluster_name="digits", identity=client.identity, epoch=2, settings=LINK
        ) as new:
            await new.until(begun.exists, "the checkpoint to be begun")
            await silent(new)
            new.send(AskKept(ticket=1, end=True))
            # what is asked after it is answered before it: nothing is read, and nobody ended, while a node writes
            assert (await ask(new, 2)).nodes == 1
            assert not [message for message in new.messages if isinstance(message, KeptAnswer) and message.ticket == 1]
            go_on.touch()
            answer = await new.receive(KeptAnswer, lambda answer: answer.ticket == 1)
            assert [state.round for state in answer.states] == [51]
            assert not [event for event in agent.events if event.kind == "warning"]
