"""Machines that are not there: agents on this one, with names, of which one may be slow and one may die.

For who prepares a lesson alone: ``--on fake:mini,desk*4,air@60`` is three machines, of which desk takes four times as
long for everything and air dies a minute after it came.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

from notebook_cluster.launchers.children import ChildLauncher
from notebook_cluster.launchers.launcher import HostState, Launch, LaunchError, LaunchOrder
from notebook_cluster.protocol.names import is_name

MOST_SLOW = 20.0
DIED = 99
"""Exit code of a machine that died as was asked."""
_MACHINE = re.compile(r"([^*@]+)(?:\*(\d+(?:\.\d+)?))?(?:@(\d+(?:\.\d+)?))?")
_MACHINE_MODULE = "notebook_cluster.launchers.pretended_machine"


class PretendedMachine(NamedTuple):
    """``slow``: how many times as long it takes; ``dies``: seconds after its kernel started, 0 for never."""

    name: str
    slow: float
    dies: float


class Pretended(ChildLauncher):
    """A :class:`.launcher.Launcher` for machines that are played here."""

    def hosts(self, where: str) -> int:
        return len(machines(where))

    async def start(self, order: LaunchOrder) -> Launch:
        found = machines(order.where)
        for option in ("gpus", "time", "partition", "setup"):
            if getattr(order, option):
                raise LaunchError(f"--on fake: these machines are this one, --{option} is for others")
        if order.hosts != len(found):
            raise LaunchError(f"--on fake:{order.where}: these are {len(found)} machines, leave --hosts out")
        argvs = [
            [
                *(sys.executable, "-m", _MACHINE_MODULE, str(one.slow), str(one.dies)),
                *(*order.argv[1:], "--name", one.name, "--data-dir", str(order.folder / one.name)),
                *("--launch-key", "-", "--place", str(place), "--start", "0"),
            ]
            for place, one in enumerate(found)
        ]
        return await self._start_all(order, [one.name for one in found], argvs)

    def ended(self, name: str, code: int, log: Path) -> HostState:
        if code == DIED:
            return HostState("ended", "it died, as was asked", name)
        return HostState("ended", f"exit code {code}: see {log}", name, failed=True)


def machines(where: str) -> list[PretendedMachine]:
    """The machines that ``NAME*SLOW@DIES,...`` names. LaunchError: it names none, or one twice."""
    found = [_machine(word.strip(), where) for word in where.split(",") if word.strip()]
    names = [one.name for one in found]
    if not found or len(set(names)) != len(names):
        raise LaunchError(f"--on fake:{where}: name each machine once, as --on fake:mini,desk*4,air@60")
    return found


def _machine(word: str, where: str) -> PretendedMachine:
    match = _MACHINE.fullmatch(word)
    if match is None or not is_name(match[1]):
        raise LaunchError(f"--on fake:{where}: {word!r} is no machine, write NAME, NAME*4 (slow) or NAME@60 (dies)")
    slow = float(match[2] or 1)
    if not 1 <= slow <= MOST_SLOW:
        raise LaunchError(f"--on fake:{where}: {word!r} is slow by 1 to {MOST_SLOW:g} times")
    return PretendedMachine(match[1], slow, float(match[3] or 0))
