"""SSH: one connection a host, which lives as long as its agent.

Without a terminal and without a shared connection, so that the end of this side is the end of the agent's standard
input: the launch's key is its first line, its end the sign to leave.
"""

import asyncio
import contextlib
import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from notebook_cluster.launchers.commands import environment, find_program, own_words
from notebook_cluster.launchers.launcher import HostState, Launch, LaunchError, LaunchOrder, LaunchState

_OPTIONS = (
    "BatchMode=yes", "ControlMaster=no", "ControlPath=none", "ConnectTimeout=10", "ServerAliveInterval=5",
    "ServerAliveCountMax=3", "ForwardX11=no", "ForwardAgent=no", "ClearAllForwardings=yes",
)  # fmt: skip
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]{0,250}")
"""A name of ~/.ssh/config, or USER@HOST; never an option."""
_LEAVE_S = 30.0
"""For an agent to leave: it keeps a checkpoint."""
_TAIL = 4000


class Ssh:
    """A :class:`.launcher.Launcher`; the connections are this process's children."""

    period = 0.5

    def __init__(self) -> None:
        self._running: dict[str, dict[int, tuple[str, asyncio.subprocess.Process]]] = {}
        self._stopped: set[tuple[str, int]] = set()

    def hosts(self, where: str) -> int:
        return len(_names(where))

    async def start(self, order: LaunchOrder) -> Launch:
        ssh, names = find_program("ssh", "install OpenSSH's client"), _names(order.where)
        for option in ("gpus", "time", "partition"):
            if getattr(order, option):
                raise LaunchError(f"--on ssh: it does not know --{option}, which is for engines that schedule")
        if order.hosts != len(names):
            raise LaunchError(f"--on ssh:{order.where}: these are {len(names)} hosts, leave --hosts out")
        secret = order.secret.read_bytes().strip() + b"\n"
        self._running[order.name] = {}
        for place, name in enumerate(names):
            argv = [
                ssh,
                "-T",
                *(word for option in _OPTIONS for word in ("-o", option)),
                "--",
                name,
                _line(order, place),
            ]
            self._running[order.name][place] = (name, await _connect(argv, _log(order.folder, place), secret))
        return Launch(order.name, order.where, len(names), order.folder)

    async def state(self, launch: Launch) -> LaunchState:
        hosts: dict[int, HostState] = {}
        for place, (name, process) in self._running.get(launch.name, {}).items():
            if process.returncode is None:
                hosts[place] = HostState("running", host=name)
            else:
                asked = (launch.name, place) in self._stopped
                reason = "stopped" if asked else _why(name, process.returncode, _log(launch.folder, place))
                hosts[place] = HostState("ended", reason, name, failed=not asked)
        return LaunchState(hosts)

    async def stop(self, launch: Launch, places: Sequence[int] = ()) -> None:
        running = self._running.get(launch.name, {})
        chosen = [place for place in (places or running) if place in running]
        self._stopped |= {(launch.name, place) for place in chosen}
        await asyncio.gather(*(_hang_up(running[place][1]) for place in chosen))


def _names(where: str) -> list[str]:
    names = [name.strip() for name in where.split(",") if name.strip()]
    wrong = [name for name in names if _HOST.fullmatch(name) is None]
    if not names or wrong:
        raise LaunchError(f"--on ssh:{where}: name hosts of ~/.ssh/config with commas between, as --on ssh:gpu1,gpu2")
    return names


def _log(folder: Path, place: int) -> Path:
    return folder / f"{place}.log"


def _line(order: LaunchOrder, place: int) -> str:
    """What the shell of the host is to run."""
    words = [*order.argv, "--launch-key", "-", "--place", str(place), "--start", "0"]
    setup = f"{order.setup} && " if order.setup else ""
    return f"{setup}exec {shlex.join(words)}"


async def _connect(argv: Sequence[str], log: Path, secret: bytes) -> asyncio.subprocess.Process:
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


def _why(name: str, code: int, log: Path) -> str:
    with contextlib.suppress(OSError):
        said = own_words(log.read_bytes()[-_TAIL:].decode(errors="replace"), "ssh").split("; ")[-1]
        if code == 255:
            way_out = ""
            if "Permission denied" in said:
                way_out = f": ssh {name} must work without a password (ssh-keygen, then ssh-copy-id {name})"
            elif "Host key verification failed" in said:
                way_out = f": its key is not known here, run ssh {name} once by hand and compare it"
            return f"{said or 'the connection ended'}{way_out}"
        if code == 127:
            return (
                f"no notebook-cluster on its PATH ({said}): ssh {name} pip install notebook-cluster, or name the line "
                "that sets up its environment with --setup"
            )
        if code >= 0:
            return f"exit code {code}{f', {said}' if said else ''}: see {log}"
    return f"ended by signal {-code}"
