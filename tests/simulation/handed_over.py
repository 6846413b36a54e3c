"""A world whose cluster is handed over from its owner's machine to a peer and back, while other things happen to it.

Real are also the seat of the owner's machine with its window, and the heads of the agents. A head's process is one of
the world; whether a TCP port answers is what the network says.
"""

import asyncio
import random
from functools import partial

import notebook_cluster.agent.head_process as head_process
import notebook_cluster.coordinator.moves as coordinator_moves
import notebook_cluster.window.departures as departures
import notebook_cluster.window.local_agent as local_agent
import notebook_cluster.window.seat as window_seat
import notebook_cluster.window.service as window_service
from notebook_cluster.coordinator.service import Coordinator
from notebook_cluster.coordinator.startup import Settings, StartProgress
from notebook_cluster.discovery.addresses import NO, reach
from notebook_cluster.journal.reading import has_crashed
from notebook_cluster.journal.store import journal_path
from notebook_cluster.link.session import Session
from notebook_cluster.protocol.hand_over import HandOver
from notebook_cluster.protocol.views import RequestError
from notebook_cluster.window.settings import WindowSettings, read_note
from tests.simulation import replaced, sockets
from tests.simulation.checks import GOES_ON
from tests.simulation.faults import Faults
from tests.simulation.machines import PrivateProcess
from tests.simulation.world import CLUSTER, World

HAND_OVERS = 1, 1, 2, 3
"""There and back, in a world."""
AGAIN_S = 0.5, 2.0
"""Until a head's process has begun, and until the owner looks for the cluster again."""


class HandedOverWorld(World):
    """Its faults are those of the seed; the hand overs, and who is killed in the middle of one, are drawn beside."""

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        self.draw = random.Random(f"hand over {seed}")
        self.seat = None
        """The process on the owner's machine, while it lives."""
        self.leaders = {}
        """(agent's session, epoch) -> the key that it obeyed in that epoch."""
        self.handed_over = self.refused = 0
        self.heads_ended = 0
        self.faults = HandedOverFaults(self, self.faults.given)
        self._finders = []

    # ---- processes

    def start_coordinator(self, resume):
        self._starts += 1
        self.checks.goes_on = GOES_ON
        runtime = self.runtime
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        note = read_note(runtime)

        async def main(process):
            settings = Settings(
                cluster=CLUSTER, directory=str(self.folder / "head"), runtime=runtime, lease=3600.0, agent_lease=3600.0,
                resume=resume and note is None and has_crashed(journal_path(runtime)),
            )  # fmt: skip
            window = window_seat.window_of(settings)
            if note is not None:
                window = WindowSettings(
                    CLUSTER, note.head, settings.directory, runtime, lease=3600.0, head_lease=3600.0,
                    agent_lease=3600.0, only_look=True,
                )  # fmt: skip
            try:
                await window_seat.Seat(settings, window, StartProgress()).run()
            except RequestError as error:
                self.say(f"{process}: {error}")

        process = self.seat = self.start_process(self.head, f"seat {self._starts}", main)
        process.on_end.append(self._seat_ended)
        return process

    def _seat_ended(self, process):
        self.say(f"{process} is gone")
        if self.coordinator is not None and self.coordinator[0] is process:
            self.coordinator = None
        if self.seat is process:
            self.seat = None
        self.disks[self.head].crash(process, power_lost=process.exit_code == "power")
        if not self.checks.over:
            self.schedule.later(self.rng.uniform(*AGAIN_S), self.restart_coordinator)

    def restart_coordinator(self):
        if self.seat is None and not self.checks.over:
            self.say("the owner's notebook looks for the cluster again")
            self.start_coordinator(resume=True)

    def began(self, made, process):
        """A coordinator, here or on a head."""
        self.sizes.of_coordinator(made)
        self.coordinator = (process, made)
        self.checks.coordinator_began(made)

    async def spawn_head(self, *words, **options):
        """In the place of ``asyncio.create_subprocess_exec`` for a head."""
        host = self.schedule.process.host
        values = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
        runtime = self.path(words[words.index("--runtime") + 1])
        await asyncio.sleep(self.draw.uniform(0.05, AGAIN_S[0]))

        async def main(process):
            made = Coordinator(
                Settings(
                    cluster=CLUSTER, directory=values["directory"], runtime=runtime, lease=3600.0, agent_lease=3600.0,
                    resume="--resume" in words, head=values["head"],
                )
            )  # fmt: skip
            self.began(made, process)
            await made.run()

        process = self.start_process(host, f"head on {host.name}", main)
        process.on_end.append(self._head_ended)
        return HeadProcess(process)

    def _head_ended(self, process):
        self.say(f"{process} is gone")
        if self.coordinator is not None and self.coordinator[0] is process:
            self.coordinator = None
        self.disks[process.host].crash(process, power_lost=process.exit_code == "power")
        self.heads_ended += 1
        if self.heads_ended >= len(head_process.AGAIN_S):  # it is started again that late, if no window is opened
            self.checks.goes_on = GOES_ON + head_process.AGAIN_S[-1]

    def start_agent(self, host):
        process = super().start_agent(host)
        process.on_end.append(lambda ended: self._end_heads(host))  # its watchdog
        return process

    def _end_heads(self, host):
        for process in list(host.processes):
            if process.name.startswith("head on"):
                process.end(-9)

    def dialled(self):
        return (self.seat, None) if self.seat is not None else None

    def finder(self, context, trust, typed, on_found):
        made = super().finder(context, trust, typed, on_found)
        self._finders.append((self.schedule.process, made))
        return made

    def _found(self, host):
        """mDNS tells coordinators and windows."""
        self._finders = [(process, finder) for process, finder in self._finders if process.alive]
        candidate = self.candidate(host)
        for process, finder in self._finders:
            self.schedule.later(self.rng.uniform(0.1, 1.5), partial(self._tell, process, finder, candidate))

    def _tell(self, process, finder, candidate):
        if process.paused:
            process.deferred.append(partial(self._tell, process, finder, candidate))
        elif process.alive:
            with sockets.Acting(self.schedule, process):
                process.main.loop.call_soon(finder.heard, candidate)

    # ---- what is asked for, and what must hold

    def plan_hand_overs(self, start, end):
        for _ in range(self.draw.choice(HAND_OVERS)):
            there, back = sorted(self.draw.uniform(start, end) for _ in range(2))
            peer = self.draw.choice(self.peers).name
            self.schedule.at(there, lambda peer=peer: self._hand_over(peer))
            self.schedule.at(back, lambda: self._hand_over("local"))

    def _hand_over(self, to):
        if self.healed or self.view is None or self.view.process.main is None:
            return
        self.say(f"the owner hands the cluster over to {to}")

        async def ask():
            value = await self.view.ask(HandOver(to=to), patience=120.0)
            if value is None:
                self.refused += 1
            else:
                self.handed_over += 1
                self.say(f"it is led from {value or 'here'} now")

        self.view.process.main.loop.call_soon(lambda: asyncio.ensure_future(ask()))
        if (whom := self.draw.choice(("nobody", "nobody", "seat", "leader"))) != "nobody":
            self.schedule.later(self.draw.uniform(0.0, 3.0), lambda: self._kill(whom))

    def _kill(self, whom):
        process = self.seat if whom == "seat" else (self.coordinator[0] if self.coordinator is not None else None)
        if not self.healed and process is not None and process.alive:
            self.say(f"{process} is killed")
            process.end(-9)

    def obeyed(self, session):
        """An agent's session has gone on with a coordinator: of one epoch there is one key, and epochs grow."""
        place = id(session)
        key, epoch = session.key, session.epoch
        if self.leaders.setdefault((place, epoch), key) != key:
            self.checks.broken(f"an agent obeys two coordinators in epoch {epoch} of {session.cluster_name}")
        if epoch < self.leaders.get(place, 0):
            self.checks.broken(f"an agent obeys epoch {epoch} after {self.leaders[place]} of {session.cluster_name}")
        self.leaders[place] = epoch
        self.leaders[place, "itself"] = session

    def patches(self):
        patches = replaced.patches_for(self)
        world, resume = self, Session.resume

        def watched(session, *words, **options):
            resume(session, *words, **options)
            world.obeyed(session)

        class Noted(Coordinator):
            def __init__(self, *words, **options):
                super().__init__(*words, **options)
                world.began(self, world.schedule.process)

        async def reached(targets):
            answers = {}
            for label, pairs in targets.items():
                host, port = pairs[0]
                there = world.network.addresses.get(host, world.schedule.process.host)
                await asyncio.sleep(0.01)
                blocked = world.network.blocked(world.schedule.process.host, there)
                answers[label] = f"{NO}{host}:{port} is silent" if blocked else f"{host}:{port}"
            return answers

        patches.everywhere(reach, reached)
        patches.attribute(Session, "resume", watched)
        for module in (window_seat, departures):
            patches.attribute(module, "Coordinator", Noted)
        patches.attribute(window_service, "PeerFinder", self.finder)
        patches.attribute(coordinator_moves, "end_process", lambda: self.schedule.process.end(0))
        patches.attribute(head_process.asyncio, "create_subprocess_exec", self.spawn_head)
        patches.attribute(local_agent, "command_of", lambda pid: Words() if self.schedule.processes[pid].alive else [])
        return patches


class HandedOverFaults(Faults):
    """Without those that mean the one folder of a coordinator that never moves, and the end of a head's sharing, with
    which the cluster ends."""

    def _happen(self, fault):
        if fault[0] not in ("replace coordinator", "power of the head", "kill coordinator in an event"):
            super()._happen(fault)

    def _stop_sharing_for_a_moment(self, length, choice):
        host = self._choose(list(self.world.agents), choice)
        if host is not None and not any(process.name.startswith("head on") for process in host.processes):
            super()._stop_sharing_for_a_moment(length, choice)


class Words:
    """The command line of a private agent of this world: it has every word."""

    def __contains__(self, word):
        return True


class HeadProcess(PrivateProcess):
    """As asyncio's, of a head."""

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        return None if self._process.alive else -9

    def send_signal(self, number):
        self._process.end(-int(number))

    def kill(self):
        self._process.end(-9)
