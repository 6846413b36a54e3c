"""Has a launcher of ipyparallel start or stop engines, in a process of its own: these launchers block, and pass on the
whole environment of the process they are in.

:func:`main` is all that such a process does: it reads a :class:`Call` as JSON and writes :class:`Engines` as JSON. What
does not work is one line on stderr, and exit code 1. Engines outlive the process that started them.
"""

import asyncio
import inspect
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import psutil

GROUP = "ipyparallel.engine_launchers"
TERM_S = 4
"""From an MPI's TERM to its KILL: time for agents to leave. One second without."""
KILL_S = 8
"""From our TERM to our KILL, for engines that are processes of this machine."""
_MOST_SAID = 2000
_PROGRAM = re.compile(r"\{program(_and_args)?\}")
_CONDOR = re.compile(r"(?m)^(executable\s*=\s*)ipengine\s*$")
_TRIES = ("OMPI_MCA_", "PRTE_MCA_")
"""How Open MPI's settings are called in its versions up to 4, and from 5 on."""


class Engines(msgspec.Struct):
    """What a launcher has started, for whoever is to stop it."""

    launcher: str
    profile: str
    title: str
    """``mpi 4711``: with what it calls its job."""
    known: dict[str, Any]
    """As the launcher's ``from_dict`` takes it."""
    processes: dict[str, float]
    """Process id -> when it was created, of those on this machine; empty for engines that are asked for elsewhere."""
    each: bool
    """Each process is one engine, in place of one that runs them all."""


class Call(msgspec.Struct):
    """``stop``: what ``engines`` says; ``start``: so many ``hosts`` times ``program``."""

    do: Literal["start", "stop"]
    launcher: str
    profile: str
    name: str
    folder: str
    program: str = ""
    hosts: int = 0
    engines: Engines | None = None


def launchers() -> dict[str, EntryPoint]:
    """Those that are installed, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def is_there(pid: str, created: float) -> bool:
    """That process, and not another one that has its number now, still runs."""
    try:
        process = psutil.Process(int(pid))
        return bool(abs(process.create_time() - created) < 1 and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def main() -> NoReturn:
    """Do what standard input says, and end this process, without its threads that wait for engines."""
    call = msgspec.json.decode(sys.stdin.buffer.read(), type=Call)
    with tempfile.TemporaryFile() as said, os.fdopen(os.dup(1), "wb") as output, os.fdopen(os.dup(2), "w") as errors:
        # What is started here may outlive this process: nobody has to wait for it to close what is read.
        for descriptor in (1, 2):
            os.dup2(said.fileno(), descriptor)
        trouble, engines = _do(call)
        if trouble:
            said.seek(0)
            errors.write(f"{trouble}\n{said.read()[-_MOST_SAID:].decode(errors='replace')}\n")
        elif engines is not None:
            output.write(msgspec.json.encode(engines))
    os._exit(1 if trouble else 0)


def _do(call: Call) -> tuple[str, Engines | None]:
    """What did not work, or what was started."""
    try:
        return "", asyncio.run(_start(call) if call.do == "start" else _stop(call))
    except subprocess.CalledProcessError as error:
        command = error.cmd if isinstance(error.cmd, str) else str(error.cmd[0])
        return f"{command} failed with exit code {error.returncode}", None
    except Exception as error:
        text = " ".join(str(error).split())
        return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}", None


async def _start(call: Call) -> Engines:
    launcher, folder = _make(call, _config(call.profile)), Path(call.folder)
    (folder / "log").mkdir(mode=0o700, exist_ok=True)
    launcher.engine_cmd, launcher.engine_args = [call.program], []
    launcher.environment = {
        **launcher.environment,
        **{f"{way}odls_base_sigkill_timeout": str(TERM_S) for way in _TRIES},
    }
    _check_program(launcher, call)
    # It removes what an engine wrote, when it sees its end.
    launcher.on_stop(lambda data: (folder / "log" / "last.log").write_text(launcher.get_output()))
    await _wait(launcher.start(call.hosts))
    if launcher.n < call.hosts:
        await _wait(launcher.stop())
        raise ValueError(
            f"it has {launcher.n} engines in its configuration, not {call.hosts}: say --hosts {launcher.n}"
        )
    known = launcher.to_dict()
    engines = [row["pid"] for row in known.get("engines", {}).values()]
    pids = [] if launcher.has_trait("ssh_cmd") else [pid for pid in engines or [known.get("pid", -1)] if pid > 0]
    job = known.get("job_id") or (pids[0] if len(pids) == 1 and not engines else "")
    return Engines(
        launcher=call.launcher, profile=call.profile, title=f"{call.launcher} {job}".strip(), known=known,
        processes={str(pid): _created(pid) for pid in pids}, each=bool(engines and pids),
    )  # fmt: skip


async def _stop(call: Call) -> None:
    from ipyparallel.cluster.launcher import NotRunning

    engines = call.engines
    assert engines is not None
    if engines.processes:
        there = {pid for pid, created in engines.processes.items() if is_there(pid, created)}
        rows = engines.known.get("engines", {})
        engines.known["engines"] = {name: row for name, row in rows.items() if str(row["pid"]) in there}
        if not there:
            return
    config = _config(engines.profile)
    config.LocalProcessLauncher.stop_seconds_until_kill = KILL_S
    try:
        await _wait(_make(call, config, engines.known).stop())
    except NotRunning:
        pass


def _make(call: Call, config: Any, known: dict[str, Any] | None = None) -> Any:
    """The launcher; ``known``: one that has started."""
    kind = launchers()[call.launcher].load()
    if not kind.class_traits().keys() >= {"engine_cmd", "engine_args", "n"}:
        raise ValueError("it starts ipyparallel's own engines, and no other program")
    if kind.class_traits().keys() >= {"ssh_cmd"}:
        config[kind.launcher_class.__name__ if hasattr(kind, "launcher_class") else kind.__name__].to_send = []
    where = {"work_dir": call.folder, "profile_dir": call.folder, "cluster_id": call.name, "config": config}
    return kind(**where) if known is None else kind.from_dict(known, **where)


def _config(profile: str) -> Any:
    """What ``ipcluster`` reads: ``ipcluster_config.py`` of the profile and of the system."""
    from ipyparallel import Cluster
    from IPython.paths import get_ipython_dir

    folder = Path(get_ipython_dir(), f"profile_{profile}")
    if profile != "default" and not folder.is_dir():  # which would be made
        raise ValueError(f"there is no IPython profile {profile!r}, no {folder}")
    cluster = Cluster(profile=profile, parent=None)
    config = cluster.profile_config.copy()
    for section in [name for name in config if "batch_template_file" in dict(config[name])]:
        config[section].batch_template_file = str(Path(cluster.profile_dir, config[section].batch_template_file))
    return config


def _check_program(launcher: Any, call: Call) -> None:
    """ValueError where it would start something else than it was told."""
    if not launcher.has_trait("batch_template"):
        program = getattr(launcher, "program", None)
        if program and program[0] != call.program:
            raise ValueError("it starts ipyparallel's own engines, and no other program")
        return
    template, where = launcher.batch_template, "batch_template"
    if not template and launcher.batch_template_file:
        template, where = Path(launcher.batch_template_file).read_text(), launcher.batch_template_file
    if not template:
        launcher.default_template = _CONDOR.sub(r"\1{program}", launcher.default_template)
        template, where = launcher.default_template, "default_template"
    if not _PROGRAM.search(template):
        raise ValueError(f"its {where} does not run {{program_and_args}}: write that in the place of ipengine")


def _created(pid: int) -> float:
    """0 where it has ended already."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


async def _wait(done: Any) -> None:
    if inspect.isawaitable(done):
        await done
