"""How a coordinator starts: its settings, one process of a cluster at a time, its journal, its own machine's agent, and
what it says until views can dial."""

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from notebook_cluster.coordinator.core import LOCAL, Core
from notebook_cluster.coordinator.view_server import ViewServer
from notebook_cluster.journal import events as e
from notebook_cluster.journal.kept_runs import import_old, let_old_runs_go, set_aside
from notebook_cluster.journal.log import Journal
from notebook_cluster.journal.moving import MOVED, read_moved
from notebook_cluster.journal.reading import RecoveredRun, recover
from notebook_cluster.journal.state import State
from notebook_cluster.journal.store import LOCK_FILE, journal_path
from notebook_cluster.peering.candidates import Trust
from notebook_cluster.protocol import PROTOCOL_VERSION, VERSION
from notebook_cluster.protocol.hand_over import Moved
from notebook_cluster.protocol.views import ConnectionFile, RequestError
from notebook_cluster.security import (
    Identity,
    TrustStore,
    announce,
    data_directory,
    in_words,
    load_identity,
    write_private,
)

log = logging.getLogger(__name__)

LOCK_WAIT = 15.0
"""Seconds for the coordinator before to end: it has taken its connection file away some time earlier."""
START_PATIENCE = 10.0
"""Seconds that the disk may take for the first row."""
_PROGRESS_PERIOD = 0.5


class Settings(msgspec.Struct):
    """``lease``: seconds without any view and without a running cell after which the cluster ends."""

    cluster: str
    directory: str
    """The notebook's working directory: local nodes run there."""
    runtime: Path
    """The cluster's folder: connection file, journal, logs."""
    lease: float = 600.0
    agent_lease: float = 600.0
    resume: bool = False
    known: str = ""
    """PeerLinks that the notebook's environment names (NOTEBOOK_CLUSTER_PEERS): HOST:PORT or names, commas between."""
    head: str = ""
    """The name of this machine as a peer, where another machine's window had it started here: it has a key of its own,
    trusts whom the window names, and the ``local`` peer is the agent of that machine, which dials in."""
    progress: int = -1
    """File descriptor for lines about how far the start is; -1 for none."""


def check_settings(settings: Settings) -> None:
    """Raise ValueError that names the setting."""
    for name in ("lease", "agent_lease"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"--{name} {value}: use a positive number of seconds")


class StartProgress:
    """Lines about how far the start is, to the file ``descriptor``; -1 for nobody. Who does not read costs nothing."""

    def __init__(self, descriptor: int = -1) -> None:
        self._descriptor = descriptor
        self._due = 0.0
        if descriptor >= 0:
            os.set_blocking(descriptor, False)
            os.set_inheritable(descriptor, False)

    def say(self, text: str) -> None:
        """``text`` is one line."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, text.encode() + b"\n")

    def read(self, done: int, size: int) -> None:
        """So many bytes of the journal were read."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _PROGRESS_PERIOD
            self.say(f"reading its journal, {done / 1e6:.0f} of {size / 1e6:.0f} MB")

    def fail(self, text: str) -> None:
        """Why there is no coordinator; also to stderr, whose file may be on a disk that is full."""
        self.say(f"error: {text}")
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """It is over."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def run_alone(folder: Path, cluster: str, progress: StartProgress, run: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """``run`` in this process, while no other one has ``cluster``; returns its exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        held = lock(folder, cluster, progress)
        asyncio.run(run())
    except (RequestError, ValueError, OSError) as error:
        log.exception("this process ends")
        progress.fail(str(in_words(error) if isinstance(error, OSError) else error))
        logging.shutdown()
        os._exit(1)  # nothing to tidy up, and sockets that are open would wait for it
    os.close(held)
    return 0


def lock(folder: Path, cluster: str, progress: StartProgress) -> int:
    """Hold ``folder`` for this process, until it ends; returns the lock's descriptor.

    Raises:
        RequestError: another coordinator holds it, and does not end.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() > deadline:
                os.close(descriptor)
                way_out = "use that one, or end that process"
                line = f"cluster {cluster!r} has a coordinator already (process {holder}): {way_out}"
                raise RequestError(line) from None
            progress.say(f"waiting for process {holder}, its coordinator before, to end")
            time.sleep(0.2)
    with contextlib.suppress(OSError):  # a full disk: the number is only for people
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def open_journal(settings: Settings, progress: StartProgress) -> tuple[Journal, RecoveredRun | None]:
    """The journal of this run, and what it says when the run goes on; one of before is set aside for a new run.

    Raises:
        ValueError: it is damaged; one line.
        OSError: the folder cannot be written.
    """
    recovered = None
    if settings.resume:
        import_old(settings.runtime, progress.read, locked=True)
        recovered = recover(journal_path(settings.runtime), progress.read)
    elif set_aside(settings.runtime) is not None:
        let_old_runs_go(settings.runtime.parent)
    journal = Journal(settings.runtime, recovered)
    return journal, recovered if recovered is not None and recovered.state.cluster_id else None


def write_connection_file(
    settings: Settings, core: Core, views: ViewServer, address: str, key: str, reception: int
) -> None:
    """What a view needs to dial ``views`` at ``address``. Raises OSError."""
    connection = ConnectionFile(
        cluster=settings.cluster, address=address, server_key=views.socket.server.public_key,
        view_public_key=views.socket.view_identity.public_key, view_secret_key=views.socket.view_identity.secret_key,
        pid=os.getpid(), epoch=core.state.epoch, protocol=PROTOCOL_VERSION, version=VERSION,
        run_log=str(core.journal.path), key=key, reception=reception,
    )  # fmt: skip
    write_private(settings.runtime / "connection.json", msgspec.json.encode(connection))


def identify(settings: Settings) -> tuple[Identity, Path]:
    """The identity of this coordinator, and the file that says to this user's agents here that it is one of theirs; a
    head has no such file, for agents let it in by its owner's grant alone."""
    if settings.head:
        return load_identity(settings.runtime), settings.runtime / "not-announced"
    identity = load_identity(data_directory())
    return identity, announce("coordinator", identity.public_key, settings.cluster)


def trusted_by_head(settings: Settings) -> TrustStore | None:
    """The peers that the owner's window lets this head use; None where it is none."""
    return TrustStore(settings.runtime / "trusted_peers.json", "name") if settings.head else None


def cannot_start(settings: Settings, trouble: str) -> OSError:
    """The error for ``trouble`` with the disk."""
    return OSError(f"cluster {settings.cluster!r} cannot start: {trouble}")


def read_moved_here(settings: Settings) -> Moved | None:
    """What the coordinator before this one, on another machine, knew beside its journal; None: there was none.

    Raises:
        ValueError: it is not readable; names the file.
    """
    try:
        return read_moved(settings.runtime)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"{settings.runtime / MOVED} is not readable ({error}): delete it, and go on without"
        ) from None


def forget_moved(settings: Settings) -> None:
    """It has begun."""
    (settings.runtime / MOVED).unlink(missing_ok=True)


def at_home(state: State, trust: Trust, settings: Settings, moved: Moved | None) -> list[e.Event]:
    """What a coordinator on another machine than before records: where peers are as seen from here."""
    if moved is None or moved.same_machine:
        return []
    addresses = {entry.key: entry.address for entry in trust.store.entries() if entry.address} | moved.addresses
    events: list[e.Event] = [e.DoorOpened(reception=0, pairing=0)]
    own = None if settings.head else read_own_agent(settings.runtime)
    for peer in state.peers.values():
        address, found_by, pid = addresses.get(peer.key, peer.address.removeprefix("tcp://")), peer.found_by, peer.pid
        if peer.name == LOCAL and settings.head:
            found_by, pid = "dialled", None
        elif peer.name == LOCAL and own is not None and own.public_key == peer.key:
            address, found_by, pid = f"127.0.0.1:{own.port}", "local", own.pid
        if not peer.dropped:
            events.append(
                e.PeerAdded(
                    name=peer.name, key=peer.key, address=f"tcp://{address}", found_by=found_by,  # type: ignore[arg-type]
                    pid=pid, pinned=trust.is_pinned(peer.key),
                )
            )  # fmt: skip
    return events


class PrivateAgent(msgspec.Struct):
    """What an agent that was started for this cluster says when it is ready."""

    name: str
    public_key: str
    port: int
    pid: int


_started: set[asyncio.subprocess.Process] = set()
"""asyncio ends a process whose handle is let go of; this one outlives the coordinator that started it."""
AGENT_FILE = "agent.json"
"""In a cluster's folder: the agent of this machine, when a head leads or has led."""


def read_own_agent(runtime: Path) -> PrivateAgent | None:
    """The agent of this machine that a window has noted."""
    try:
        return msgspec.json.decode((runtime / AGENT_FILE).read_bytes(), type=PrivateAgent)
    except (OSError, msgspec.DecodeError):
        return None


async def start_private_agent(
    name: str, directory: Path, lease: float, options: Sequence[str] = ()
) -> tuple[PrivateAgent, asyncio.subprocess.Process]:
    """Start an agent for this machine, with more ``options``. It survives a crash of the coordinator and ends with the
    cluster.

    Raises:
        RequestError: it ended before it was ready; names its log.
    """
    command = [sys.executable, "-m", "notebook_cluster.agent", "--private", "--name", name]
    command += ["--cluster-dir", str(directory), "--lease", str(lease), *options]
    log_path = directory / "agent.log"
    with open(log_path, "ab") as errors:  # noqa: ASYNC230 - a local file, opened once
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    assert process.stdout is not None
    _started.add(process)
    try:
        line = await process.stdout.readline()
    except asyncio.CancelledError:
        # The cluster ends already: nobody would tell this agent.
        process.terminate()
        raise
    try:
        return msgspec.json.decode(line, type=PrivateAgent), process
    except msgspec.DecodeError:
        lines = [line for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
        why = lines[-1].removeprefix("the agent did not start: ")[-300:] if lines else "it said nothing"
        raise RequestError(f"the agent of this machine did not start: {why} (whole log: {log_path})") from None


def cluster_started(settings: Settings, before: State) -> e.ClusterStarted:
    """What a coordinator records first; ``before`` is the state that it begins with."""
    # An id is a name as well: what is put after a long name must not make it too long.
    cluster_id = before.cluster_id or f"{settings.cluster[:40]}-{secrets.token_hex(8)}"
    # Epochs also grow over fresh starts, so an agent never obeys a coordinator that was replaced.
    epoch = max(before.epoch + 1, time.time_ns() // 1_000_000)
    return e.ClusterStarted(
        cluster=settings.cluster, cluster_id=cluster_id, epoch=epoch, directory=settings.directory, time=time.time()
    )
