"""A launcher as another package may bring it: agents as processes of this machine. docs/engines.md shows it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from notebook_cluster.launchers import HostState, Launch, LaunchError, LaunchOrder, LaunchState


class Processes:
    """``--on processes --hosts N``; ``--time`` is the moment at which they are to be gone."""

    period = 0.3

    def __init__(self) -> None:
        self._started: dict[str, list[asyncio.subprocess.Process]] = {}

    def hosts(self, where: str) -> int:
        if where:
            raise LaunchError(f"--on processes:{where}: it knows no hosts, say --hosts N")
        return 0

    async def start(self, order: LaunchOrder) -> Launch:
        started = self._started[order.name] = []
        for place in range(order.hosts):
            own = ["--launch-key", str(order.secret), "--name", f"p{place}", "--place", str(place)]
            own += ["--until", order.time] if order.time else []
            with (order.folder / f"{place}.log").open("wb") as log:
                started.append(await asyncio.create_subprocess_exec(*order.argv, *own, stdout=log, stderr=log))
        return Launch(order.name, "here", order.hosts, order.folder)

    async def state(self, launch: Launch) -> LaunchState:
        codes = [process.returncode for process in self._started.get(launch.name, [])]
        return LaunchState({place: self._host(code) for place, code in enumerate(codes)})

    def _host(self, code: int | None) -> HostState:
        if code is None:
            return HostState("running")
        return HostState("ended", f"exit code {code}", failed=code != 0)

    async def stop(self, launch: Launch, places: Sequence[int] = ()) -> None:
        started = self._started.get(launch.name, [])
        chosen = [started[place] for place in places] if places else started
        for process in chosen:
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in chosen))


def install(folder: Path) -> None:
    """Make it known below ``folder``, which is on sys.path, as pip does."""
    known = folder / "notebook_cluster_processes-1.0.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: notebook-cluster-processes\nVersion: 1.0\n")
    (known / "entry_points.txt").write_text(
        "[notebook_cluster.launchers]\nprocesses = tests.engines.processes:Processes\n"
    )
