"""What befalls the cluster. A fault is a generator: it does something, yields as often as it has to wait, and ends when
all is as it was and whoever it befell is in a committed round again.
"""

import concurrent.futures
import os
import random
import signal
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.churn.hosts import LOCAL, Hosts
from benchmarks.churn.recording import Progress

Course = Generator[None, None, None]
RECOVERY = 90.0
"""Seconds after which something that was healed must be in a round again, on a machine that does a lot else."""
DESK = "desk"


class Stuck(RuntimeError):
    """Something that was healed does not go on; says what."""


@dataclass
class Fault:
    """One of them; times are those of ``time.monotonic``."""

    kind: str
    victim: str
    began: float = 0.0
    healed: float = 0.0
    over: float = 0.0
    detail: str = ""


@dataclass
class World:
    """The hosts, what is known of them, and what was done to them."""

    hosts: Hosts
    draw: random.Random
    state: dict[str, Any] = field(default_factory=dict)
    """As the desk has told last."""
    ended: set[int] = field(default_factory=set)
    """Process ids of kernels that were ended on purpose."""
    over: bool = False
    """The nodes are told to finish: there may be no further round."""
    pool: concurrent.futures.ThreadPoolExecutor = field(
        default_factory=lambda: concurrent.futures.ThreadPoolExecutor(8)
    )

    def condition(self, node: str) -> str:
        """As the panel says it; empty: there is no such node."""
        return str(self.state.get("nodes", {}).get(node, [""])[0])

    def last_commit(self) -> float:
        """When a node heard of one last."""
        return max(self.hosts.progress(node).heard for node in self.hosts.nodes)

    def last_round(self) -> int:
        """The newest one of which a node has heard."""
        return max(self.hosts.progress(node).round for node in self.hosts.nodes)

    # ---- waiting ---------------------------------------------------------------------------------------------

    def until(self, true: Callable[[], Any], what: str, seconds: float = RECOVERY) -> Course:
        """Stuck: it does not become true."""
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise Stuck(f"waited {seconds:g} s for {what}")
            yield

    def pause(self, least: float, most: float) -> Course:
        """As long as is drawn."""
        end = time.monotonic() + self.draw.uniform(least, most)
        while time.monotonic() < end:
            yield

    def done(self, future: "concurrent.futures.Future[Any]") -> Generator[None, None, Any]:
        """What came of it."""
        while not future.done():
            yield
        return future.result()

    def ask(self, what: str, *arguments: Any, enough: Callable[[], bool] = lambda: False) -> Course:
        """Ask the desk until it is done, as a person would who is told that the coordinator was just gone; ``enough``:
        it is as it should be."""
        deadline, error = time.monotonic() + RECOVERY, ""
        while time.monotonic() < deadline:
            try:
                yield from self.done(self.hosts.desk.ask(what, *arguments))
                return
            except RuntimeError as caught:
                error = str(caught)
            yield from self.pause(0.5, 1.0)
            if enough():
                return
        raise Stuck(f"{what} {arguments} failed for {RECOVERY:g} s: {error}")

    def back(self, node: str, since: float | None = None) -> Course:
        """Until the work of ``node`` is in a round that was committed later, or it is well and there are no rounds."""
        since = time.monotonic() if since is None else since

        def is_back() -> bool:
            return self.hosts.progress(node).counted_at > since or (self.over and self.condition(node) == "ok")

        yield from self.until(is_back, f"{node} in a round: {self.condition(node)}")

    def goes_on(self, fault: Fault) -> Course:
        """Until a round was committed after ``fault`` was healed, or there are no rounds."""
        what = f"a round after {fault.kind} {fault.victim}"
        yield from self.until(lambda: self.over or self.last_commit() > fault.healed, what)

    # ---- what is done ----------------------------------------------------------------------------------------

    def kernel(self, node: str) -> Progress:
        """Of the kernel that the node has now."""
        return self.hosts.progress(node)

    def gone(self, node: str) -> None:
        """The kernel of the node is, or will be, ended by what is done."""
        self.ended.add(self.kernel(node).pid)


def send(pid: int, number: signal.Signals) -> None:
    """A signal to one process, if it is there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# ---- the kinds -----------------------------------------------------------------------------------------------


def kernel(world: World, fault: Fault) -> Course:
    """SIGKILL of a kernel, which is then restarted."""
    world.gone(fault.victim)
    send(world.kernel(fault.victim).pid, signal.SIGKILL)
    yield from restarted(world, fault)


def restarted(world: World, fault: Fault) -> Course:
    """The kernel of the victim is known as dead, and another one in a round."""
    node, pid = fault.victim, world.kernel(fault.victim).pid
    yield from world.until(lambda: world.condition(node) == "dead", f"the end of {node}: {world.condition(node)}")
    yield from world.ask("restart", node, enough=lambda: world.kernel(node).pid != pid)
    fault.healed = time.monotonic()
    yield from world.back(node)


def agent(world: World, fault: Fault) -> Course:
    """SIGKILL of an agent, which ends its kernels. A peer is shared again, the desk's own agent starts by itself."""
    world.gone(fault.victim)
    send(world.hosts.agent(fault.victim), signal.SIGKILL)
    yield from (restarted if fault.victim == LOCAL else _shared_again)(world, fault)


def peer_leaves(world: World, fault: Fault) -> Course:
    """Sharing is ended by its owner, and begun again later."""
    world.gone(fault.victim)
    send(world.hosts.shares[fault.victim].process.pid, signal.SIGTERM)
    yield from _shared_again(world, fault)


def _shared_again(world: World, fault: Fault) -> Course:
    process = world.hosts.shares[fault.victim].process
    yield from world.until(lambda: process.poll() is not None, f"the end of the agent of {fault.victim}")
    yield from world.pause(0.0, 3.0)
    yield from world.done(world.pool.submit(world.hosts.share, fault.victim))
    yield from restarted(world, fault)


def node_leaves(world: World, fault: Fault) -> Course:
    """A node is removed, and its peer added again later."""
    node = fault.victim
    world.gone(node)
    yield from world.ask("remove", node, enough=lambda: not world.condition(node))
    yield from world.until(lambda: not world.condition(node), f"{node} to be gone")
    yield from world.pause(0.0, 3.0)
    yield from world.ask("add", node, enough=lambda: bool(world.condition(node)))
    fault.healed = time.monotonic()
    yield from world.back(node)


def coordinator(world: World, fault: Fault) -> Course:
    """SIGKILL of the coordinator; the desk starts it again."""
    pid = world.hosts.coordinator()
    send(pid, signal.SIGKILL)
    yield from world.until(lambda: _other_coordinator(world, pid), "another coordinator")
    fault.healed = time.monotonic()
    yield from world.goes_on(fault)


def _other_coordinator(world: World, pid: int) -> bool:
    try:
        return world.hosts.coordinator() != pid
    except (OSError, ValueError, KeyError):
        return False


def _stopped(world: World, fault: Fault, pid: int, most: float) -> Course:
    send(pid, signal.SIGSTOP)
    try:
        yield from world.pause(0.5, most)
    finally:
        send(pid, signal.SIGCONT)
    fault.healed = time.monotonic()
    yield from world.back(fault.victim)


def pause_kernel(world: World, fault: Fault) -> Course:
    """SIGSTOP of a kernel, for less or more than others wait for it."""
    yield from _stopped(world, fault, world.kernel(fault.victim).pid, 9.0)


def pause_agent(world: World, fault: Fault) -> Course:
    """SIGSTOP of an agent, until its peer is suspect, or lost."""
    yield from _stopped(world, fault, world.hosts.agent(fault.victim), 12.0)


def cable(world: World, fault: Fault) -> Course:
    """The cable of a host is pulled, and put in again."""
    host = world.hosts.network[fault.victim]
    host.link_down()
    try:
        yield from world.pause(0.5, 12.0)
    finally:
        host.link_up()
    fault.healed = time.monotonic()
    yield from world.back(fault.victim)


def nan(world: World, fault: Fault) -> Course:
    """NaN in the parameters of a node: its next contribution is refused."""
    flag = world.hosts.folder / f"nan-{fault.victim}"
    flag.touch()
    yield from world.until(lambda: world.over or not flag.exists(), f"{fault.victim} to take the NaN")
    flag.unlink(missing_ok=True)
    fault.healed = time.monotonic()
    yield from world.back(fault.victim)


def disk(world: World, fault: Fault) -> Course:
    """The disk of the journal is full for a while; rounds wait."""
    world.hosts.disk.fill()
    try:
        yield from world.pause(1.0, 4.0)
    finally:
        world.hosts.disk.make_room()
    fault.healed = time.monotonic()
    yield from world.goes_on(fault)


def clock(world: World, fault: Fault) -> Course:
    """The clock on the wall of a host is moved, and stays so until it is moved again."""
    seconds = world.draw.choice([-86400.0, -3600.0, -30.0, 30.0, 3600.0, 86400.0])
    fault.detail = f"{seconds:g} s"
    world.hosts.move_clock(DESK if fault.victim == LOCAL else fault.victim, seconds)
    fault.healed = time.monotonic()
    yield from world.goes_on(fault)


def hand_over(world: World, fault: Fault) -> Course:
    """The cluster is led from a peer for a while, and from the desk again; on each way somebody may be killed."""
    peer = world.draw.choice(world.hosts.peers)
    for to in (peer, LOCAL):
        killed = world.draw.choice(["nobody", "nobody", "desk", "head"])
        fault.detail += f"to {to}, {killed} killed; "
        asked = world.hosts.desk.ask("hand_over", to)
        if killed != "nobody":
            yield from world.pause(0.0, 2.0)
            with suppress(OSError, ValueError, KeyError):
                send(world.hosts.coordinator() if killed == "desk" else world.hosts.head(peer), signal.SIGKILL)
        with suppress(RuntimeError):
            yield from world.done(asked)
        yield from world.ask("hand_over", to, enough=partial(_led_from, world, to))
        yield from world.until(partial(_led_from, world, to), f"it to be led from {to}")
        fault.healed = time.monotonic()
        yield from world.goes_on(fault)


def _led_from(world: World, place: str) -> bool:
    return str(world.state.get("head", "?") or LOCAL) == place


@dataclass(frozen=True)
class Kind:
    """How often it comes, compared with others, and whom it may befall."""

    course: Callable[[World, Fault], Course]
    weight: int
    victims: str
    """``nodes``, ``peers`` or ``desk``."""
    disturbs: bool = True
    """Its victim is out of the rounds for a while."""


KINDS = {
    "kernel": Kind(kernel, 6, "nodes"),
    "agent": Kind(agent, 3, "nodes"),
    "coordinator": Kind(coordinator, 4, "desk"),
    "pause kernel": Kind(pause_kernel, 5, "nodes"),
    "pause agent": Kind(pause_agent, 4, "nodes"),
    "cable": Kind(cable, 5, "peers"),
    "nan": Kind(nan, 4, "nodes", disturbs=False),
    "disk": Kind(disk, 2, "desk"),
    "clock": Kind(clock, 3, "nodes", disturbs=False),
    "node leaves": Kind(node_leaves, 2, "peers"),
    "peer leaves": Kind(peer_leaves, 2, "peers"),
    "hand over": Kind(hand_over, 3, "desk"),
}
