"""ipyparallel's launchers (``mpi``, ``pbs``, ``sge``, ``lsf`` ...): each starts one program so many times.

That program is a script in the launch's folder, which becomes the agent. These launchers know no places and hardly say
how their engines are, so an agent takes a place that is free, and what it writes to its own file in that folder tells
that it has started, and how it has ended. They run in processes of their own, see :mod:`.ipyparallel_call`.
"""

import asyncio
import contextlib
import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from notebook_cluster.launchers.commands import NoAnswer, environment, own_words, run
from notebook_cluster.launchers.ipyparallel_call import Call, Engines, is_there, launchers
from notebook_cluster.launchers.launcher import HostState, Launch, LaunchError, LaunchOrder, LaunchState
from notebook_cluster.protocol.names import did_you_mean, is_name
from notebook_cluster.security import write_private

_START_S, _START_EACH_S = 30.0, 5.0
"""Most take no time; SSH takes some seconds for each."""
_STOP_S = 13.0
_LEAVE_S = 4.0
"""For agents to leave by themselves, as the cluster has told them."""
_LOOK_S = 0.1
_ENGINES_FILE = "engines.json"
_SCRIPT_FILE = "agent.sh"
_TAIL = 4000
_ENDED = re.compile(r"not in cluster \S+ any more: |notebook-cluster: |there is no notebook-cluster ")
"""How the last line of an agent begins that has ended by itself."""
_ASKED = "not in cluster "

_SCRIPT = """#!/bin/bash
# One host of a notebook-cluster: runs an agent, which goes to the cluster that asked for it. What stands behind this
# script's name is for ipyparallel's own engines.
if ! [ -r {secret} ]; then
  echo "the launch's key cannot be read on $(uname -n): {folder} is not on a file system that it shares" >&2
  exit 66
fi
exec >>{folder}/"$(uname -n)-$$.log" 2>&1 </dev/null
{setup}
if command -v {program} >/dev/null; then exec {program} {arguments}; fi
if [ -x {python} ]; then exec {python} -m notebook_cluster {arguments}; fi
echo "there is no notebook-cluster on the PATH of this host: name the line that sets up its environment with --setup"
exit 127
"""


class IpyParallel:
    """A :class:`.launcher.Launcher`. What it has to know of its engines is in the launch's folder."""

    period = 1.0

    def __init__(self) -> None:
        self._ended: dict[Path, str] = {}

    def hosts(self, where: str) -> int:
        _which(where)
        return 0

    async def start(self, order: LaunchOrder) -> Launch:
        launcher, profile = _which(order.where)
        for option in ("gpus", "time", "partition"):
            if getattr(order, option):
                raise LaunchError(
                    f"--on ipp:{launcher}: ipyparallel's launchers cannot be told --{option}: write it into the "
                    f"launcher's settings, as its batch_template, in ipcluster_config.py of IPython's profile {profile}"
                )
        script = order.folder / _SCRIPT_FILE
        write_private(script, _script(order).encode())
        script.chmod(0o700)
        call = Call(
            do="start", launcher=launcher, profile=profile, name=order.name, folder=str(order.folder),
            program=str(script), hosts=order.hosts,
        )  # fmt: skip
        try:
            said = await _call(call, _START_S + _START_EACH_S * order.hosts)
        except NoAnswer as error:
            raise LaunchError(f"{error}: see whether its queue has a job of yours; its hosts are sent away") from None
        write_private(order.folder / _ENGINES_FILE, said.encode())
        return Launch(order.name, msgspec.json.decode(said, type=Engines).title, order.hosts, order.folder)

    async def state(self, launch: Launch) -> LaunchState:
        engines = _engines(launch)
        if engines is None:
            return LaunchState(by_place=False)
        # The files of a thousand hosts, perhaps over a network.
        started = await asyncio.to_thread(self._agents, launch.folder)
        ended = [host for host in started if host.condition == "ended"]
        running = [host for host in started if host.condition == "running"]
        alive = sum(is_there(pid, created) for pid, created in engines.processes.items())
        if engines.processes and not alive:
            reason = _words(launch.folder) or "its processes have ended"
            ended += [HostState("ended", reason, failed=True)] * (launch.hosts - len(ended))
            running = []
        elif engines.each:
            gone = launch.hosts - alive - len(ended)
            ended += [HostState("ended", "its process has ended", failed=True)] * gone
            running = (running + [HostState("running")] * alive)[:alive]
        known = (running + ended)[: launch.hosts]
        waits = "starting" if engines.processes else "the queue is not asked"
        known += [HostState("pending", waits)] * (launch.hosts - len(known))
        return LaunchState(dict(enumerate(known)), by_place=False)

    async def stop(self, launch: Launch, places: Sequence[int] = ()) -> None:
        engines = _engines(launch)
        if places or engines is None:
            return  # these have left by themselves, or cannot come in any more
        waited = 0.0
        while waited < _LEAVE_S and any(is_there(pid, created) for pid, created in engines.processes.items()):
            await asyncio.sleep(_LOOK_S)
            waited += _LOOK_S
        if engines.processes and waited < _LEAVE_S:
            return
        call = Call(
            do="stop", launcher=engines.launcher, profile=engines.profile, name=launch.name, folder=str(launch.folder),
            engines=engines,
        )  # fmt: skip
        await _call(call, _STOP_S)

    def _agents(self, folder: Path) -> list[HostState]:
        """Those that have started, by what they have written last."""
        found = []
        for path in sorted(folder.glob("*.log")):
            host = path.name.rpartition("-")[0]
            if path not in self._ended:
                last = _last_line(path)
                if _ENDED.match(last) is None:
                    found.append(HostState("running", host=host))
                    continue
                self._ended[path] = last
            last = self._ended[path]
            asked = last.startswith(_ASKED)
            reason = last.partition(": ")[2] if asked else last.removeprefix("notebook-cluster: ")
            found.append(HostState("ended", reason, host, failed=not asked))
        return found


def _which(where: str) -> tuple[str, str]:
    """Launcher and IPython profile of ``mpi`` or ``mpi@PROFILE``."""
    if find_spec("ipyparallel") is None:
        raise LaunchError(
            "--on ipp: its launchers are those of ipyparallel, which is not here: pip install ipyparallel"
        )
    launcher, _, profile = where.partition("@")
    known = sorted(launchers())
    if launcher not in known:
        what = f"{launcher}: no such launcher{did_you_mean(launcher, known)}" if launcher else " name a launcher"
        raise LaunchError(f"--on ipp:{what}. ipyparallel has: {', '.join(known)}")
    if profile and not is_name(profile):
        raise LaunchError(f"--on ipp:{where}: {profile!r} is not the name of an IPython profile")
    return launcher, profile or "default"


async def _call(call: Call, timeout: float) -> str:
    argv = [sys.executable, "-c", "from notebook_cluster.launchers.ipyparallel_call import main; main()"]
    what = f"ipyparallel's {call.launcher} launcher"
    refused = f"{what} does not {call.do} them"
    stdin = msgspec.json.encode(call).decode()
    return await run(argv, timeout=timeout, variables=environment(), stdin=stdin, name=what, refused=refused)


def _engines(launch: Launch) -> Engines | None:
    """None where nothing has been started."""
    with contextlib.suppress(OSError):
        return msgspec.json.decode((launch.folder / _ENGINES_FILE).read_bytes(), type=Engines)
    return None


def _script(order: LaunchOrder) -> str:
    program, arguments = order.argv[0], [*order.argv[1:], "--launch-key", str(order.secret), "--place", "any"]
    return _SCRIPT.format(
        secret=shlex.quote(str(order.secret)), folder=shlex.quote(str(order.folder)), setup=order.setup,
        program=shlex.quote(program), arguments=shlex.join(arguments), python=shlex.quote(sys.executable),
    )  # fmt: skip


def _last_line(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL, 0))
        lines = file.read().decode(errors="replace").split("\n")
        # A line that is not whole yet may be the beginning of any.
        return next((line.strip() for line in reversed(lines[:-1]) if line.strip()), "")
    return ""


def _words(folder: Path) -> str:
    """What the engine's own program has written."""
    text = ""
    for path in (folder / "log").glob("*.log"):
        with contextlib.suppress(OSError):
            text += path.read_text(errors="replace")[-_TAIL:]
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    return own_words(" ".join(lines), "mpiexec")[:300]
