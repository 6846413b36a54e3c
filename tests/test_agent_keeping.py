"""Before kernels end without being asked to, their training is kept; a machine that slept is not one that is alone."""

import time
from pathlib import Path

import psutil
import pytest

from notebook_cluster.agent import Limits
from notebook_cluster.agent.sharing.presence import SleepWatch
from notebook_cluster.link import LinkSettings
from notebook_cluster.protocol import peer as p
from notebook_cluster.security import new_identity
from tests.agent_client import AgentClient, MadeUpSensors, SharedAgent
from tests.in_loop import in_loop
from tests.relay import Relay

pytestmark = pytest.mark.usefixtures("no_processes_left")

LINK = LinkSettings(heartbeat=0.2, suspect=0.8, lost=1.5)

JOB = """
import pathlib
from notebook_cluster.training.runtime import current_runtime
class Job:
    on_control = on_mesh = on_tick = on_roster = lambda self, *arguments: None
    def keep(self):
        def write():
            {write}
            folder = pathlib.Path.cwd() / 'checkpoints' / 'digits'
            folder.mkdir(parents=True, exist_ok=True)
            (folder / 'state').write_text('kept')
            return folder
        return write
current_runtime().attach_job('digits', Job())
print('training')
"""


KEEP_ONE = """
            import numpy
            from notebook_cluster.checkpoints import Contents, Part, save
            tensors = {'w': numpy.ones(3, numpy.float32)}
            contents = Contents('model', 51, 'ab' * 16, tensors, tensors, [Part('desk', 0, b'')], {})
            save(pathlib.Path.cwd() / 'checkpoints', 'model-kept', contents)
""".strip()


async def train(client: AgentClient, write: str = "pass") -> int:
    """Start a node with a job in it; its process id."""
    started = await client.start_node()
    request = client.execute(JOB.format(write=write))
    await client.printed(request, "training")
    return started.pid


@in_loop
async def test_silent_coordinator_costs_the_kernels_but_not_the_training(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", lease=3, link=LINK) as agent:
        async with AgentClient(agent.where, settings=LINK) as client:
            pid = await train(client)
        folder = jupyter_dirs / "mini" / "work" / "digits" / "checkpoints" / "digits"
        await agent.told("kept", str(folder))
        ended = await agent.told("node-ended", "no coordinator came back within its lease", f"kept in {folder}")
        assert ended.node == "desk"
        assert (folder / "state").read_text() == "kept"
        assert not psutil.pid_exists(pid)
        await agent.told("cluster-ended")
        async with AgentClient(agent.where, identity=client.identity, epoch=2, settings=LINK) as client:
            await client.start_node(incarnation=2)


@in_loop
async def test_coordinator_that_comes_back_while_it_is_kept_finds_its_kernels(
    jupyter_dirs: Path, tmp_path: Path
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go on"
    write = (
        f"import pathlib, time; pathlib.Path({str(begun)!r}).touch()\n"
        f"            while not pathlib.Path({str(go_on)!r}).exists(): time.sleep(0.05)"
    )
    async with (
        SharedAgent(jupyter_dirs / "mini", lease=3, link=LINK) as agent,
        Relay(agent.ready.port) as relay,
        AgentClient(agent.where | {"port": relay.port}, settings=LINK) as client,
    ):
        await train(client, write)
        relay.hold()
        await client.until(begun.exists, "the checkpoint to be begun")
        relay.resume()
        await client.until(lambda: client.dialer.condition == "connected", "the return")
        request = client.execute("print('still here')")
        await client.printed(request, "still here")
        go_on.touch()
        await agent.told("kept")
        request = client.execute("print('and here')")
        await client.printed(request, "and here")
        assert not [event for event in agent.events if event.kind == "node-ended"]


@in_loop
async def test_training_is_kept_soon_after_the_coordinator_is_gone_and_the_kernels_wait_for_it(
    jupyter_dirs: Path,
) -> None:
    async with SharedAgent(jupyter_dirs / "mini", lease=60, keep_after=1.0, link=LINK) as agent:
        async with AgentClient(agent.where, settings=LINK) as client:
            pid = await train(client)
        folder = jupyter_dirs / "mini" / "work" / "digits" / "checkpoints" / "digits"
        await agent.told("kept", str(folder))
        (folder / "state").unlink()
        async with AgentClient(agent.where, identity=client.identity, epoch=2, settings=LINK) as again:
            (node,) = (await again.receive(p.Inventory)).nodes
            assert node.pid == pid
            request = again.execute("print('still here')")
            await again.printed(request, "still here")
        # Once for each time that it is gone.
        await agent.told("kept", count=2)
        assert (folder / "state").read_text() == "kept"
        kinds = [event.kind for event in agent.events]
        assert (kinds.count("kept"), "node-ended" in kinds) == (2, False)


@in_loop
async def test_owners_who_come_after_the_lease_are_told_what_is_kept_and_the_first_one_why(jupyter_dirs: Path) -> None:
    """Also another owner whom this machine trusts: the machine of the first one may be gone for good."""
    other = new_identity()
    async with SharedAgent(jupyter_dirs / "mini", lease=2, link=LINK) as agent:
        async with AgentClient(agent.where, settings=LINK) as client:
            await client.receive(p.Inventory)
            await train(client, KEEP_ONE)
        await agent.told("cluster-ended")
        folder = jupyter_dirs / "mini" / "work" / "digits" / "checkpoints" / "model-kept" / "round-000051"
        async with AgentClient(agent.where, identity=client.identity, epoch=2, settings=LINK) as back:
            assert (await back.receive(p.Inventory)).ended.startswith(
                "no coordinator came back within its lease; checkpoint kept in "
            )
            (kept,) = (await back.receive(p.KeptCheckpoints)).checkpoints
            assert (kept.name, kept.job, kept.round, kept.folder) == ("model-kept", "model", 51, str(folder))
            assert time.time() - kept.time < 600
        await agent.pair(other)
        async with AgentClient(agent.where, cluster="new", identity=other, trusted=False, settings=LINK) as teacher:
            assert (await teacher.receive(p.Inventory)).ended == ""
            assert (await teacher.receive(p.KeptCheckpoints)).checkpoints == [kept]
            started = await teacher.start_node()
            work = psutil.Process(started.pid).environ()["NOTEBOOK_CLUSTER_WORK"]
            assert Path(work) == jupyter_dirs / "mini" / "work"


@in_loop
async def test_node_that_cannot_keep_its_training_is_named_and_ends(jupyter_dirs: Path) -> None:
    async with SharedAgent(jupyter_dirs / "mini", lease=2, link=LINK) as agent:
        async with AgentClient(agent.where, settings=LINK) as client:
            await train(client, "raise OSError('no space left')")
        await agent.told("warning", "node desk of cluster digits kept no checkpoint", "no space left")
        await agent.told("node-ended", "within its lease")


@in_loop
async def test_node_that_does_not_answer_is_not_waited_for_for_ever(
    jupyter_dirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notebook_cluster.agent.keeping.KEEP_S", 0.5)
    async with SharedAgent(jupyter_dirs / "mini", lease=2, link=LINK) as agent:
        async with AgentClient(agent.where, settings=LINK) as client:
            await train(client, "import time; time.sleep(60)")
        await agent.told("warning", "it did not answer within")
        await agent.told("node-ended", "within its lease")


@in_loop
async def test_owner_who_comes_back_finds_the_training_kept(jupyter_dirs: Path) -> None:
    sensors = MadeUpSensors()
    async with (
        SharedAgent(jupyter_dirs / "mini", limits=Limits(idle_only=True), sensors=sensors) as agent,
        AgentClient(agent.where) as client,
    ):
        await train(client)
        sensors.idle = 1
        reason = (await client.receive(p.NodeEnded)).reason
        assert "nobody uses it" in reason
        assert "checkpoint kept in" in reason


class Clocks:
    """A machine that sleeps on command."""

    def __init__(self) -> None:
        self.slept = 0.0

    def through(self) -> float:
        return time.monotonic() + self.slept

    def watch(self) -> SleepWatch:
        return SleepWatch(self.through, time.monotonic)


@in_loop
async def test_every_coordinator_hears_of_the_sleep_also_one_that_was_away(jupyter_dirs: Path) -> None:
    clocks = Clocks()
    async with (
        SharedAgent(jupyter_dirs / "mini", link=LINK, sleep=clocks.watch()) as agent,
        Relay(agent.ready.port) as relay,
        AgentClient(agent.where, cluster="digits", settings=LINK) as here,
        AgentClient(agent.where | {"port": relay.port}, cluster="text", settings=LINK) as away,
    ):
        await here.receive(p.PeerInfo)
        await away.receive(p.PeerInfo)
        relay.hold()
        await away.until(lambda: away.dialer.condition == "lost", "the loss")
        clocks.slept = 3600
        assert (await here.receive(p.Slept)).seconds == pytest.approx(3600, abs=2)
        relay.resume()
        assert (await away.receive(p.Slept)).seconds == pytest.approx(3600, abs=2)
        await agent.told("slept", "3600 s")


def test_sleep_is_told_once_and_short_gaps_are_none() -> None:
    through = awake = 1000.0
    watch = SleepWatch(lambda: through, lambda: awake)
    assert watch.check() == 0
    through, awake = through + 60 + 10, awake + 10
    assert watch.check() == 60
    assert watch.check() == 0
    through += 2
    assert watch.check() == 0


def test_setting_the_time_of_day_is_no_sleep_here() -> None:
    watch = SleepWatch()
    # The clocks of the system itself, in which the wall clock has no part.
    real = time.time
    time.time = lambda: real() + 86400
    try:
        assert watch.check() == 0
    finally:
        time.time = real
