"""What happens to a world.

Each fault is (name, moment, length in seconds, a number that chooses whom), so it can be played alone. The moment is
between 0 and 1: the beginning and the end of the time in which there are faults."""

import random

KINDS = (
    "kill kernel", "kill agent", "kill coordinator", "kill coordinator in an event", "power of the head",
    "replace coordinator", "pause kernel", "pause agent", "pause coordinator", "stop sharing for a moment",
    "cut", "one way", "slow", "sleep", "disk full", "disk slow", "disk unclear", "clock", "nan",
)  # fmt: skip


class Faults:
    def __init__(self, world, given=None):
        self.world, self.given = world, given
        self.planned = []
        self.done = []
        self._spoilt = set()

    def plan(self, start, end):
        """Decide on all faults between these moments, and schedule them."""
        rng = random.Random(f"faults {self.world.seed}")
        count = rng.choice((1, 2, 3, 4, 6))
        kinds = rng.sample(KINDS, rng.randint(1, 5))
        planned = [
            (rng.choice(kinds), rng.random(), rng.choice((0.2, 1.0, 3.0, 8.0)), rng.getrandbits(16))
            for _ in range(count)
        ]
        self.planned = planned if self.given is None else [tuple(fault) for fault in self.given]
        for fault in self.planned:
            moment = start + fault[1] * (end - start)
            self.world.schedule.at(moment, lambda fault=fault: self._happen(fault))

    def _happen(self, fault):
        if self.world.healed:
            return
        kind, _, length, choice = fault
        self.world.say(f"fault: {kind} for {length} s, {choice}")
        self.done.append(fault)
        getattr(self, "_" + kind.replace(" ", "_"))(length, choice)

    def _choose(self, things, choice):
        return things[choice % len(things)] if things else None

    def _later(self, length, call):
        self.world.schedule.later(length, call)

    # ---- processes

    def _kill_kernel(self, length, choice):
        kernel = self._choose(self.world.kernels, choice)
        if kernel is not None:
            kernel.end(-9)

    def _kill_agent(self, length, choice):
        host = self._choose(self.world.peers, choice)
        held = self.world.agents.pop(host, None)
        if held is not None:
            held[0].end(-9)
            self._later(length, lambda: self._share_again(host))

    def _share_again(self, host):
        if host in self.world.network.asleep:  # whoever wants to share it opens the lid first
            self._later(0.5, lambda: self._share_again(host))
        elif host not in self.world.agents:
            self.world.start_agent(host)

    def _kill_coordinator(self, length, choice):
        if self.world.coordinator is not None:
            self.world.coordinator[0].end(-9)

    def _kill_coordinator_in_an_event(self, length, choice):
        self.world.disks[self.world.head].deadly = True

    def _power_of_the_head(self, length, choice):
        """The coordinator's process goes, and what its journal had not synced."""
        if self.world.coordinator is not None:
            self.world.coordinator[0].end("power")

    def _replace_coordinator(self, length, choice):
        """It stands still, another one goes on from a copy of its folder; when all agents have heard of that one, the
        first wakes up. (Before, the cluster's lock keeps the second from beginning.)"""
        if self.world.coordinator is None or self.world.coordinator[0].paused:
            return
        process, _ = self.world.coordinator
        self.world.coordinator = None
        process.replaced = True
        process.pause()
        self.world.network.changed()
        self.world.copy_runtime()
        self._later(0.3, self.world.restart_coordinator)

        def wake():
            there = self.world.coordinator
            links = there[1]._delivery.links.values() if there is not None else ()
            if not links or any(link.condition != "connected" for link in links):
                self._later(0.5, wake)
                return
            process.resume()
            self.world.network.changed()

        self._later(0.5 + length, wake)

    def _pause(self, process, length):
        if process is None or not process.alive or process.paused:
            return
        process.pause()
        self.world.network.changed()

        def go_on():
            process.resume()
            self.world.network.changed()

        self._later(length, go_on)

    def _pause_kernel(self, length, choice):
        self._pause(self._choose(self.world.kernels, choice), length)

    def _pause_agent(self, length, choice):
        host = self._choose(list(self.world.agents), choice)
        self._pause(self.world.agents[host][0] if host is not None else None, length)

    def _pause_coordinator(self, length, choice):
        self._pause(self.world.coordinator[0] if self.world.coordinator else None, length)

    # ---- the network

    def _two(self, choice):
        hosts = self.world.schedule.hosts
        first = hosts[choice % len(hosts)]
        others = [host for host in hosts if host is not first]
        return first, others[choice // 7 % len(others)]

    def _cut(self, length, choice):
        self._cut_way(length, *self._two(choice), both=True)

    def _one_way(self, length, choice):
        self._cut_way(length, *self._two(choice), both=False)

    def _cut_way(self, length, first, second, both):
        network = self.world.network
        network.cut(first, second, both=both)

        def back():
            network.cut_ways -= {(first, second), (second, first)}
            network.changed()

        self._later(length, back)

    def _slow(self, length, choice):
        host = self._choose(self.world.peers, choice)
        self.world.network.slow[host] = 0.3
        self._later(length, lambda: self.world.network.slow.pop(host, None))

    # ---- machines

    def _sleep(self, length, choice):
        """A peer's lid is closed: an hour by the time of day, ``length`` here."""
        host = self._choose(self.world.peers, choice)
        network, schedule = self.world.network, self.world.schedule
        if host in network.asleep:
            return
        network.asleep.add(host)
        for process in list(host.processes):
            process.pause()
        network.changed()
        began = schedule.now

        def wake():
            network.asleep.discard(host)
            host.slept += schedule.now - began
            host.wall += 3600.0
            for process in list(host.processes):
                process.resume()
            network.changed()

        self._later(length, wake)

    def _disk_full(self, length, choice):
        self._disk(length, full=True)

    def _disk_slow(self, length, choice):
        self._disk(length, slow=0.4)

    def _disk_unclear(self, length, choice):
        self._disk(length, unclear=0.3)

    def _disk(self, length, **values):
        disk = self.world.disks[self.world.head]
        vars(disk).update(values)
        self._later(length, disk.mend)

    def _clock(self, length, choice):
        self._choose(self.world.schedule.hosts, choice).wall += (-3600.0, -5.0, 5.0, 86400.0)[choice // 5 % 4]

    # ---- people and numbers

    def _nan(self, length, choice):
        kernel = self._choose([kernel for kernel in self.world.kernels if kernel.runtime is not None], choice)
        if kernel is not None:
            self._spoilt.add(kernel.runtime.name)

    def spoils(self, node):
        if node in self._spoilt:
            self._spoilt.discard(node)
            return True
        return False

    def _stop_sharing_for_a_moment(self, length, choice):
        host = self._choose(list(self.world.agents), choice)
        if host is not None:
            process, agent, _, _ = self.world.agents.pop(host)
            process.main.loop.call_soon(agent.stop, "its owner needs it")
            process.on_end.append(lambda ended: self._later(length, lambda: self._share_again(host)))

    def heal(self):
        """No more faults, and nothing of them lasts."""
        world = self.world
        world.network.heal()
        world.disks[world.head].mend()
        world.disks[world.head].deadly = False
        self._spoilt.clear()
        for host in world.schedule.hosts:
            for process in list(host.processes):
                if process.paused and host not in world.network.asleep and not process.replaced:
                    process.resume()
        world.network.changed()
        world.restart_coordinator()
