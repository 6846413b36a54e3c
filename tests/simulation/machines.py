"""What a machine of a world has and hears: no accelerator, nobody at it, a private agent, and every agent there is."""

import asyncio

from notebook_cluster.agent.sharing.presence import Battery, Sensors
from notebook_cluster.protocol import views as v
from notebook_cluster.protocol.peer import Device


class NoSensors(Sensors):
    """A machine that nobody sits at, on mains."""

    def battery(self) -> Battery | None:
        return None

    def idle_seconds(self) -> float:
        return float("inf")

    def busy_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0


class OneProcessor:
    """A machine without accelerators."""

    def probe(self):
        return [Device(id="cpu", kind="cpu", name="processor", memory_bytes=1 << 33)]

    def sample(self):
        return []

    def environment(self, device):
        return {}

    def process_memory(self):
        return {}


class PrivateProcess:
    """As asyncio's of a process that was started."""

    def __init__(self, process):
        self._process = process
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        process.on_end.append(lambda ended: loop.call_soon(self._ended.set))

    async def wait(self):
        await self._ended.wait()
        return self._process.exit_code


class Finder:
    """In the place of the coordinator's PeerFinder: it hears at once of every agent there is."""

    def __init__(self, world, on_found):
        self._world, self._on_found = world, on_found
        self.typed_names = []
        self._heard = {}

    def heard(self, candidate):
        self._heard[candidate.key] = candidate
        self._on_found([candidate])

    async def start(self):
        for host in self._world.agents:
            self.heard(self._world.candidate(host))

    async def follow_typed(self):
        pass

    def candidates(self):
        return list(self._heard.values())

    async def present(self, enough=lambda found: True):
        return self.candidates()

    def find(self, key):
        return self._heard.get(key)

    def silent_views(self):
        return []

    async def resolve(self, text):
        for _ in range(50):
            for candidate in self._heard.values():
                if candidate.name == text:
                    return candidate, []
            await asyncio.sleep(0.2)
        raise v.RequestError(f"no peer {text!r} is found")

    async def close(self):
        pass
