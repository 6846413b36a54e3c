"""What SSH and the machines that are played have in common: a process for each place, which lives as long as its agent.

The launch's key is the first line of its standard input, the end of that input the sign to leave.
"""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from notebook_cluster.launchers.commands import environment
from notebook_cluster.launchers.launcher import HostState, Launch, LaunchOrder, LaunchState

_LEAVE_S = 30.0
"""For an agent to leave: it keeps a checkpoint."""


class ChildLauncher:
    """What :class:`.launcher.Launcher` asks for but ``hosts`` and ``start``; the processes are this one's children."""

    period = 0.5

    def __init__(self) -> None:
        self._running: dict[str, dict[int, tuple[str, asyncio.subprocess.Process]]] = {}
        self._stopped: set[tuple[str, int]] = set()

    def ended(self, name: str, code: int, log: Path) -> HostState:
        """What is told of a host whose process has ended with ``code``, and nobody had asked for that."""
        raise NotImplementedError

    async def state(self, launch: Launch) -> LaunchState:
        hosts: dict[int, HostState] = {}
        for place, (name, process) in self._running.get(launch.name, {}).items():
            if process.returncode is None:
                hosts[place] = HostState("running", host=name)
            elif (launch.name, place) in self._stopped:
                hosts[place] = HostState("ended", "stopped", name)
            else:
                hosts[place] = self.ended(name, process.returncode, _log_of(launch.folder, place))
        return LaunchState(hosts)

    async def stop(self, launch: Launch, places: Sequence[int] = ()) -> None:
        running = self._running.get(launch.name, {})
        chosen = [place for place in (places or running) if place in running]
        self._stopped |= {(launch.name, place) for place in chosen}
        await asyncio.gather(*(_hang_up(running[place][1]) for place in chosen))

    async def _start_all(self, order: LaunchOrder, names: Sequence[str], argvs: Sequence[Sequence[str]]) -> Launch:
        """A process for each of ``names``, in the order of their places, with the key of ``order``."""
        running = self._running[order.name] = {}
        line = order.secret.read_bytes().strip() + b"\n"
        for place, (name, argv) in enumerate(zip(names, argvs, strict=True)):
            running[place] = name, await _start_with(argv, _log_of(order.folder, place), line)
        return Launch(order.name, order.where, len(names), order.folder)


def _log_of(folder: Path, place: int) -> Path:
    return folder / f"{place}.log"


async def _start_with(argv: Sequence[str], log: Path, secret: bytes) -> asyncio.subprocess.Process:
    """``argv`` with ``secret`` as the first line of its standard input, which stays open; what it writes goes to
    ``log``."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        # In a session of its own: Ctrl-C in a terminal is not for it.
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.PIPE, stdout=descriptor, stderr=descriptor, env=environment(), cwd="/",
            start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(descriptor)
    assert process.stdin is not None
    process.stdin.write(secret)
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
    return process


async def _hang_up(process: asyncio.subprocess.Process) -> None:
    """End the agent's standard input, and wait for it to leave."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), _LEAVE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
