"""SSH: one connection a host, which lives as long as its agent.

Without a terminal and without a shared connection, so that the end of this side is the end of the agent's standard
input: the launch's key is its first line, its end the sign to leave.
"""

import contextlib
import re
import shlex
from pathlib import Path

from notebook_cluster.launchers.children import ChildLauncher
from notebook_cluster.launchers.commands import find_program, own_words
from notebook_cluster.launchers.launcher import HostState, Launch, LaunchError, LaunchOrder

_OPTIONS = (
    "BatchMode=yes", "ControlMaster=no", "ControlPath=none", "ConnectTimeout=10", "ServerAliveInterval=5",
    "ServerAliveCountMax=3", "ForwardX11=no", "ForwardAgent=no", "ClearAllForwardings=yes",
)  # fmt: skip
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%-]{0,250}")
"""A name of ~/.ssh/config, or USER@HOST; never an option."""
_TAIL = 4000


class Ssh(ChildLauncher):
    """A :class:`.launcher.Launcher` for hosts that SSH reaches."""

    def hosts(self, where: str) -> int:
        return len(_names(where))

    async def start(self, order: LaunchOrder) -> Launch:
        ssh, names = find_program("ssh", "install OpenSSH's client"), _names(order.where)
        for option in ("gpus", "time", "partition"):
            if getattr(order, option):
                raise LaunchError(f"--on ssh: it does not know --{option}, which is for engines that schedule")
        if order.hosts != len(names):
            raise LaunchError(f"--on ssh:{order.where}: these are {len(names)} hosts, leave --hosts out")
        words = [ssh, "-T", *(word for option in _OPTIONS for word in ("-o", option)), "--"]
        argvs = [[*words, name, _line(order, place)] for place, name in enumerate(names)]
        return await self._start_all(order, names, argvs)

    def ended(self, name: str, code: int, log: Path) -> HostState:
        return HostState("ended", _why(name, code, log), name, failed=True)


def _names(where: str) -> list[str]:
    names = [name.strip() for name in where.split(",") if name.strip()]
    wrong = [name for name in names if _HOST.fullmatch(name) is None]
    if not names or wrong:
        raise LaunchError(f"--on ssh:{where}: name hosts of ~/.ssh/config with commas between, as --on ssh:gpu1,gpu2")
    return names


def _line(order: LaunchOrder, place: int) -> str:
    """What the shell of the host is to run."""
    words = [*order.argv, "--launch-key", "-", "--place", str(place), "--start", "0"]
    setup = f"{order.setup} && " if order.setup else ""
    return f"{setup}exec {shlex.join(words)}"


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
