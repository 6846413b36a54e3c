"""``notebook-cluster share --launch-key``: what engines start on the hosts of a launch; nobody types at it."""

import argparse
import fcntl
import sys
import time
from pathlib import Path
from typing import IO

import msgspec

from notebook_cluster.agent import DEFAULT_LEASE_S, AgentReady, AgentSettings, LaunchedAs, Limits, run_agent
from notebook_cluster.agent.running import log_to_terminal
from notebook_cluster.cli.arguments import UsageError
from notebook_cluster.protocol.launches import ANY_PLACE, MAX_LAUNCH_KEY_BYTES, LaunchKey
from notebook_cluster.security import agent_directory, is_key, private_directory

STANDARD_INPUT = "-"
_MOST_MARGIN_S = 60.0
_MARGIN_SHARE = 0.2
_MOST_AGENTS = 256


def share_launched(options: argparse.Namespace) -> int:
    """Serve the cluster of the launch until it is over, the host's time is, or the engine says so.

    Raises:
        UsageError: options that do not go together.
        OSError, ValueError: the key cannot be read, or the cluster cannot be joined.
    """
    if not options.dial:
        raise UsageError("--launch-key opens the door of a cluster: say where it is with --dial HOST:PORT")
    for option in ("code", "code_file", "code_minutes", "no_code", "join", "confirm", "port"):
        if getattr(options, option):
            raise UsageError(f"--launch-key and --{option.replace('_', '-')} exclude each other: leave one of them out")
    key = _read_key(options.launch_key)
    if options.data_dir:
        directory, lock = options.data_dir.expanduser().resolve(), None
    elif options.place == ANY_PLACE:
        directory, lock = _unused_directory(options.name)
    else:
        directory, lock = agent_directory(options.name), None
    settings = AgentSettings(
        name=options.name,
        directory=private_directory(directory),
        bind="127.0.0.1",  # the cluster is dialled, nobody dials this machine
        lease=options.lease or DEFAULT_LEASE_S,
        pairing=False,
        dial=options.dial,
        launch=LaunchedAs(key, options.place, options.start, lifeline=options.launch_key == STANDARD_INPUT),
        limits=Limits(
            max_nodes=options.max_nodes, devices=options.devices, memory_bytes=options.memory,
            files_bytes=options.files, until=None if options.until is None else leave_at(options.until, time.time()),
        ),
    )  # fmt: skip
    log_to_terminal()

    def ready(said: AgentReady) -> None:
        print(f"{said.name} is in cluster {key.cluster} of {key.owner}", flush=True)

    try:
        reason = run_agent(settings, ready)
    except OSError as error:
        if options.place != ANY_PLACE:
            raise
        # MPI ends all when one of them fails.
        print(f"notebook-cluster: {error}", file=sys.stderr, flush=True)
        return 0
    finally:
        if lock is not None:
            lock.close()
    print(f"not in cluster {key.cluster} any more: {reason}", flush=True)
    return 0


def _unused_directory(name: str) -> tuple[Path, IO[bytes]]:
    """A data folder that no other agent on this host has, as long as its lock is open: an engine may start several."""
    for number in range(1, _MOST_AGENTS + 1):
        directory = agent_directory(name if number == 1 else f"{name[:58]}-{number}")
        lock = (directory / "agent.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return directory, lock
    raise OSError(f"{_MOST_AGENTS} agents run on this host already")


def leave_at(until: float, now: float) -> float:
    """When to begin to leave a host that is lost at ``until``: early enough to write a checkpoint."""
    return until - min(_MOST_MARGIN_S, max(until - now, 0.0) * _MARGIN_SHARE)


def _read_key(where: str) -> LaunchKey:
    if where == STANDARD_INPUT:
        line, place = sys.stdin.buffer.readline(MAX_LAUNCH_KEY_BYTES), "the first line of standard input"
    else:
        place = where
        with Path(where).open("rb") as file:
            line = file.readline(MAX_LAUNCH_KEY_BYTES)
    try:
        key = msgspec.json.decode(line, type=LaunchKey)
    except msgspec.MsgspecError:
        # Without msgspec's words: they may quote what was there.
        raise ValueError(f"{place} is not the key of a launch") from None
    if not all(is_key(part) for part in (key.server_key, key.public_key, key.secret_key)):
        raise ValueError(f"{place} is not the key of a launch")
    return key
