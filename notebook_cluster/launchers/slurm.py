"""Slurm: an array of jobs with one whole host each, so that every host starts, ends and is queued again by itself.

The job is the agent: what Slurm sends to the job, the agent gets. The launch's key is read from a file on the file
system that this machine shares with the compute nodes; argv, script and environment name only its path.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from notebook_cluster.launchers.commands import environment, find_program, run
from notebook_cluster.launchers.launcher import HostState, Launch, LaunchError, LaunchOrder, LaunchState

_SUBMIT_S = 30.0
_ASK_S = 6.0
"""``squeue`` itself waits 9 s for a controller that is gone."""
_NO_KEY = 66
"""Exit code of the script where the launch's key cannot be read: EX_NOINPUT of sysexits.h."""
_NO_PROGRAM = 127
_PENDING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_ELEMENT = re.compile(r"\d+_(\d+)")
_WAY_OUT = "start the notebook where jobs are submitted (a login node), or load the module that has it first"

_SCRIPT = """#!/bin/bash
# One host of a notebook-cluster: runs an agent, which goes to the cluster that asked for it.
if ! [ -r {secret} ]; then
  echo "the launch's key cannot be read here: {folder} is not on a file system that this host shares" >&2
  exit {no_key}
fi
{setup}
export SLURM_TIME_FORMAT=standard
until=$(timeout 10 squeue -h -j "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID" -o %e 2>/dev/null | head -n 1)
case $until in 2*T*) set -- --until "$until" ;; *) set -- ;; esac
set -- {arguments} --name "$SLURMD_NODENAME" --place "$SLURM_ARRAY_TASK_ID" --start "${{SLURM_RESTART_COUNT:-0}}" "$@"
if command -v {program} >/dev/null; then exec {program} "$@"; fi
if [ -x {python} ]; then exec {python} -m notebook_cluster "$@"; fi
echo "there is no {program} on the PATH of this host" >&2
exit {no_program}
"""


_NOT_OURS = re.compile(r"SLURM_(?!CONF$|CLUSTERS$).*|(SQUEUE|SCANCEL|SINFO)_.*")
"""What a notebook that is a job itself was given as one, and how its user likes to see queues."""


class Slurm:
    """A :class:`.launcher.Launcher`."""

    period = 3.0

    def hosts(self, where: str) -> int:
        if where:
            raise LaunchError(f"--on slurm:{where}: slurm finds the hosts itself, say --on slurm --partition {where}")
        return 0

    async def start(self, order: LaunchOrder) -> Launch:
        sbatch = find_program("sbatch", _WAY_OUT)
        argv = [
            sbatch, "--parsable", f"--job-name={order.name}", f"--array=0-{order.hosts - 1}", "--nodes=1",
            "--ntasks-per-node=1", f"--output={order.folder}/%a.log", "--open-mode=append", f"--chdir={order.folder}",
            "--requeue",
        ]  # fmt: skip
        argv += [f"--gpus-per-node={order.gpus}"] if order.gpus else ["--exclusive", "--mem=0"]
        argv += [f"--time={order.time}"] if order.time else []
        argv += [f"--partition={order.partition}"] if order.partition else []
        try:
            said = await _ask(argv, _SUBMIT_S, stdin=_script(order), refused="slurm does not take the job")
        except LaunchError as error:
            raise LaunchError(f"{error}{await _partitions(order.partition)}") from None
        # With several clusters: NUMBER;CLUSTER
        number = said.strip().partition(";")[0]
        if not number.isdigit():
            raise LaunchError(f"sbatch said {said.strip()[:100]!r} in place of a job's number")
        return Launch(order.name, number, order.hosts, order.folder)

    async def state(self, launch: Launch) -> LaunchState:
        squeue = find_program("squeue", _WAY_OUT)
        columns = "%i|%T|%r|%N|%S"
        try:
            told = await _ask([squeue, "-h", "-r", "-t", "all", "-j", launch.handle, "-o", columns], _ASK_S)
        except LaunchError as error:
            if "invalid job id" in str(error).lower():
                return LaunchState()  # forgotten: it ended some minutes ago
            raise
        hosts: dict[int, HostState] = {}
        for line in told.splitlines():
            element, state, reason, host, expected = (line.split("|") + [""] * 5)[:5]
            if (found := _ELEMENT.fullmatch(element.strip())) is not None:
                hosts[int(found[1])] = _host(state, reason, host, expected)
        if any(host.failed for host in hosts.values()):
            hosts |= await _how_they_failed(launch, hosts)
        return LaunchState(hosts)

    async def stop(self, launch: Launch, places: Sequence[int] = ()) -> None:
        scancel = find_program("scancel", _WAY_OUT)
        if not launch.handle:
            await _ask([scancel, f"--name={launch.name}"], _SUBMIT_S)
            return
        elements = [f"{launch.handle}_{place}" for place in places] or [launch.handle]
        try:
            await _ask([scancel, *elements], _SUBMIT_S)
        except LaunchError as error:
            if "invalid job id" not in str(error).lower():
                raise


async def _ask(argv: Sequence[str], timeout: float, *, stdin: str = "", refused: str = "") -> str:
    """As :func:`.commands.run`, with times written as they are read here."""
    variables = environment(_NOT_OURS) | {"SLURM_TIME_FORMAT": "standard"}
    return await run(argv, timeout=timeout, variables=variables, stdin=stdin, refused=refused)


def _script(order: LaunchOrder) -> str:
    program, *arguments = order.argv
    arguments += ["--launch-key", str(order.secret)]
    return _SCRIPT.format(
        secret=shlex.quote(str(order.secret)), folder=order.folder, setup=order.setup, no_key=_NO_KEY,
        no_program=_NO_PROGRAM, arguments=shlex.join(arguments), program=shlex.quote(program),
        python=shlex.quote(sys.executable),
    )  # fmt: skip


def _host(state: str, reason: str, host: str, expected: str) -> HostState:
    if state in _PENDING:
        why = reason if reason != "None" else ""
        return HostState("pending", why, expected=expected.replace("T", " ") if expected[:1] == "2" else "")
    if state in _RUNNING:
        return HostState("running", host=host)
    return HostState("ended", state, host, failed=state not in ("COMPLETED", "CANCELLED", "TIMEOUT"))


async def _how_they_failed(launch: Launch, hosts: dict[int, HostState]) -> dict[int, HostState]:
    """Those that failed, with what their exit codes mean."""
    try:
        told = await _ask([find_program("scontrol", _WAY_OUT), "show", "job", "-o", launch.handle], _ASK_S)
    except LaunchError:
        return {}
    after = {}
    for line in told.splitlines():
        words = dict(word.partition("=")[::2] for word in line.split())
        place = words.get("ArrayTaskId", "")
        host = hosts.get(int(place)) if place.isdigit() else None
        if host is not None and host.failed:
            reason = f"{host.reason}, {_meaning(words.get('ExitCode', ''), launch.folder, int(place))}"
            after[int(place)] = HostState("ended", reason, host.host, failed=True)
    return after


def _meaning(code: str, folder: Path, place: int) -> str:
    exit_code, _, number = code.partition(":")
    # 53: Slurm's own sign that the file for the job's output could not be opened.
    if exit_code == str(_NO_KEY) or number == "53":
        return f"{folder} is not there: name a folder that the compute nodes share with --folder DIR"
    if exit_code == str(_NO_PROGRAM):
        return "notebook-cluster is not there: name the line that sets up its environment with --setup"
    return f"exit code {exit_code}: see {folder}/{place}.log"


async def _partitions(wanted: str) -> str:
    """``; partitions here are a, b``, where one was asked for."""
    if not wanted:
        return ""
    try:
        told = await _ask([find_program("sinfo", _WAY_OUT), "-h", "-o", "%R"], _ASK_S)
    except LaunchError:
        return ""
    names = sorted(set(told.split()))
    return f"; partitions here are {', '.join(names)}" if names and wanted not in names else ""
