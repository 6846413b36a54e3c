"""What there is before a cluster is: finding, starting and reviving its coordinator."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from notebook_cluster.client.connection import ClusterError, is_alive
from notebook_cluster.client.led_elsewhere import led_from, same_head, window_options
from notebook_cluster.protocol.heads import CODE_VARIABLE
from notebook_cluster.protocol.names import check_name
from notebook_cluster.protocol.views import ConnectionFile
from notebook_cluster.protocol.wire import PROTOCOL_VERSION, VERSION
from notebook_cluster.security import cluster_directory, runtime_directory

if TYPE_CHECKING:
    from notebook_cluster.journal.kept_runs import LastRun

START_TIMEOUT = 20.0
"""Seconds without a sign of a coordinator that starts, after which it is ended."""
SLOW_START = 3.0
"""Seconds between two lines about a start that takes long."""
DEFAULT_LEASE = 600.0
"""Seconds without any view and without a running cell after which a cluster ends; one with a head takes a day."""
NEWS_S = 86_400.0
"""After so long that a coordinator was killed is no news any more."""
PEERS_VARIABLE = "NOTEBOOK_CLUSTER_PEERS"
"""Names or HOST:PORT of peers to know of without mDNS, commas between; ``all`` adds them too."""


def read_connection(name: str) -> ConnectionFile | None:
    """The connection file of a running cluster, or None when none of this name runs."""
    path = runtime_directory() / "clusters" / name / "connection.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=ConnectionFile)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ClusterError(f"{path} is not readable ({error}): delete it and start the cluster again") from None
    if not is_alive(file.pid):
        return None
    if file.protocol != PROTOCOL_VERSION:
        raise ClusterError(
            f"cluster {name!r} was started by notebook-cluster {file.version} (protocol {file.protocol}), this is "
            f"{VERSION} (protocol {PROTOCOL_VERSION}): end process {file.pid} or use the other version"
        )
    return file


def list_clusters() -> list[ConnectionFile]:
    """Every running cluster of this user on this machine."""
    return [found for found in find_clusters().values() if isinstance(found, ConnectionFile)]


def running_clusters() -> list[str]:
    """Names of :func:`list_clusters`."""
    return [file.cluster for file in list_clusters()]


def find_clusters() -> dict[str, ConnectionFile | ClusterError]:
    """Name -> connection file of every running cluster of this user on this machine, or why it cannot be used (it was
    started by another version)."""
    folder = runtime_directory() / "clusters"
    found: dict[str, ConnectionFile | ClusterError] = {}
    for path in sorted(folder.glob("*/connection.json")):
        name = path.parent.name
        try:
            file = read_connection(name)
        except ClusterError as error:
            found[name] = error
        else:
            if file is not None:
                found[name] = file
    return found


@contextlib.contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Two notebooks that start the same cluster at once: the second waits and attaches."""
    with open(directory / "start.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def was_killed(name: str) -> bool:
    """True when cluster ``name`` does not run, and its last coordinator ended without saying so."""
    folder = runtime_directory() / "clusters" / name
    return folder.is_dir() and read_connection(name) is None and _crashed(folder)


@contextlib.contextmanager
def killed_journal(name: str) -> Iterator[None]:
    """The journal of cluster ``name``, if its coordinator was killed here, is set aside; it is back, and the error says
    so, when what follows fails."""
    from notebook_cluster.journal.kept_runs import let_old_runs_go, put_back, set_aside

    folder, kept = runtime_directory() / "clusters" / name, None
    with contextlib.suppress(ClusterError):  # one that cannot be read cannot be gone on with
        if was_killed(name):
            with _only_one(folder), _led_by_nobody(folder):
                kept = set_aside(folder)
    try:
        yield
    except BaseException as error:
        if kept is None:
            raise
        with _only_one(folder), _led_by_nobody(folder):
            put_back(folder, kept)
        if isinstance(error, ClusterError):
            way_out = f"The journal of the cluster before is as it was: %cluster start {name} goes on with it"
            raise ClusterError(f"{error}. {way_out}") from None
        raise
    if kept is not None:
        let_old_runs_go(folder.parent)


@contextlib.contextmanager
def _led_by_nobody(folder: Path) -> Iterator[None]:
    """Hold the lock of a coordinator there, as soon as one that ends has let it go. ClusterError: it does not."""
    from notebook_cluster.journal.store import LOCK_FILE

    deadline = time.monotonic() + START_TIMEOUT
    with open(folder / LOCK_FILE, "ab") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ClusterError(f"cluster {folder.name!r} has a coordinator again: use that one") from None
                time.sleep(0.05)
        yield


def killed_clusters() -> list[str]:
    """Names of the clusters of which :func:`was_killed` is true and that ran within the last day, but for those whose
    journal cannot be read: a laptop that is switched off kills its coordinators, and in time there are many."""
    from notebook_cluster.journal.store import journal_path

    found = []
    for folder in sorted((runtime_directory() / "clusters").glob("*/")):
        with contextlib.suppress(ClusterError, OSError):
            path = journal_path(folder)
            written = [one.stat().st_mtime for one in (path, path.with_name(f"{path.name}-wal")) if one.exists()]
            is_old = max(written, default=0.0) < time.time() - NEWS_S
            if not (is_old or led_from(folder)) and was_killed(folder.name):
                found.append(folder.name)
    return found


def _crashed(directory: Path) -> bool:
    """True when the last coordinator here ended without saying so."""
    from notebook_cluster.journal.kept_runs import import_old
    from notebook_cluster.journal.reading import has_crashed
    from notebook_cluster.journal.store import journal_path

    try:
        import_old(directory)
        return has_crashed(journal_path(directory))
    except (ValueError, OSError) as error:
        raise ClusterError(f"cluster {directory.name!r} cannot go on from its journal: {error}") from None


def read_last_run(name: str) -> "LastRun":
    """What the last run of cluster ``name``, which is over, left on disk; the next start under this name ends it.

    Raises:
        ClusterError: none of this name has run here, or what it left is damaged.
    """
    from notebook_cluster.client.settings import with_settings
    from notebook_cluster.journal.kept_runs import last_run

    try:
        check_name(name, "cluster")
        folder = runtime_directory() / "clusters" / name
        if folder.is_dir():
            with _only_one(folder):
                run = last_run(folder)
            if run is not None:
                return with_settings(run, folder)
    except ValueError as error:
        raise ClusterError(str(error)) from None
    raise ClusterError(f"no cluster {name!r} runs on this machine, and none that ended has left a run: %cluster start")


def ensure_coordinator(
    name: str,
    directory: str,
    *,
    fresh: bool = False,
    lease: float = DEFAULT_LEASE,
    agent_lease: float = 600.0,
    known: str | None = None,
    head: str = "",
    code: str = "",
    only_look: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[ConnectionFile, bool]:
    """(connection file, whether it ran already) of cluster ``name``; a coordinator that was killed is started
    again from its journal, unless ``fresh``. ``known``: peers to know of without mDNS (HOST:PORT or names, commas
    between), instead of what NOTEBOOK_CLUSTER_PEERS says. ``head``: the peer from where it is led, paired with ``code``
    where that is needed; empty: from here, or from where it is led already. ``only_look``: with a head, start no
    coordinator there.

    Raises:
        ClusterError: the coordinator did not start; the text names its log.
    """
    try:
        check_name(name, "cluster")
    except ValueError as error:
        raise ClusterError(str(error)) from None
    runtime = cluster_directory(name)
    known = os.environ.get(PEERS_VARIABLE, "") if known is None else known
    with _only_one(runtime):
        file = read_connection(name)
        if file is not None:
            if head and not same_head(file.head, head):
                led = f"led from {file.head}" if file.head else "led from this machine"
                raise ClusterError(f"cluster {name!r} runs already, {led}: %cluster stop {name} first")
            return file, True
        if head and not fresh and not led_from(runtime) and _crashed(runtime):
            raise ClusterError(
                f"the coordinator of cluster {name!r} was killed on this machine: %cluster start {name} goes on with "
                "it from here, with --fresh it is begun anew"
            )
        if head or led_from(runtime):
            options = window_options(runtime, head) | {
                "--directory": directory, "--agent-lease": str(agent_lease), "--known": known,
            }  # fmt: skip
            if lease != DEFAULT_LEASE:
                options["--head-lease"] = str(lease)
            flags = [*(["--fresh"] if fresh else []), *(["--only-look"] if only_look or not head else [])]
            environment = {CODE_VARIABLE: code} if code else {}
            file = _spawn(name, runtime, flags, options, on_progress, "notebook_cluster.window", environment)
            return file, file.ran
        resume = not fresh and _crashed(runtime)
        if resume:
            on_progress(f"the coordinator of cluster {name!r} was killed: starting it again from its journal")
        options = {
            "--directory": directory, "--lease": str(lease), "--agent-lease": str(agent_lease),
            "--known": known,
        }  # fmt: skip
        return _spawn(name, runtime, ["--resume"] if resume else [], options, on_progress), resume


def reopen_window(name: str, head: str = "") -> ConnectionFile | None:
    """The connection file of a new window to the cluster ``name``, which is led from ``head`` or, where that is empty,
    from where it was before; None: it is not led from elsewhere.

    Raises:
        ClusterError: the head cannot be reached, or the cluster runs there no more.
    """
    try:
        check_name(name, "cluster")
    except ValueError as error:
        raise ClusterError(str(error)) from None
    if not head and not led_from(runtime_directory() / "clusters" / name):
        return None
    return ensure_coordinator(name, os.getcwd(), head=head, only_look=True)[0]


def _spawn(
    name: str,
    runtime: Path,
    flags: list[str],
    options: dict[str, str],
    on_progress: Callable[[str], None],
    module: str = "notebook_cluster.coordinator",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ConnectionFile:
    """Start the coordinator's process, with what ``environment`` adds, and return when it answers. One that does not is
    ended: there is never a second beside it."""
    (runtime / "connection.json").unlink(missing_ok=True)
    log_path = runtime / "coordinator.log"
    said, says = os.pipe()
    command = [
        sys.executable, "-m", module, "--cluster", name, "--runtime", str(runtime),
        *(f"{option}={value}" for option, value in options.items()), *flags,
        f"--progress={says}",
    ]  # fmt: skip
    try:
        with open(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True, cwd="/",
                pass_fds=[says], env={**os.environ, **environment},
            )  # fmt: skip
    except BaseException:
        os.close(said)
        raise
    finally:
        os.close(says)
    try:
        file, how = _wait_for_answer(name, process, said, on_progress)
    except BaseException:
        _end(process)
        raise
    finally:
        os.close(said)
    if file is not None:
        return file
    raise ClusterError(f"the coordinator of cluster {name!r} {how or _last_line(log_path)} (whole log: {log_path})")


def _last_line(path: Path) -> str:
    last = [line for line in path.read_text(errors="replace").splitlines() if line.strip()][-1:]
    return f"did not start: {''.join(last)}"


def _wait_for_answer(
    name: str, process: "subprocess.Popen[bytes]", said: int, on_progress: Callable[[str], None]
) -> tuple[ConnectionFile | None, str]:
    """The connection file of ``process``, or None and what became of it, if it said that. While it says how far it is,
    it is waited for."""
    os.set_blocking(said, False)
    path = runtime_directory() / "clusters" / name / "connection.json"
    deadline, tell_at = time.monotonic() + START_TIMEOUT, time.monotonic() + SLOW_START
    told = ""
    while time.monotonic() < deadline:
        if path.exists():
            file = read_connection(name)
            if file is not None and file.pid == process.pid:
                return file, ""
        ended = process.poll() is not None  # before what it said last is read
        with contextlib.suppress(BlockingIOError):
            lines = os.read(said, 65536).decode(errors="replace").splitlines()
            if lines and lines[-1].startswith("error: "):
                process.wait()
                return None, f"did not start: {lines[-1].removeprefix('error: ')}"
            if lines:
                deadline = time.monotonic() + START_TIMEOUT
                if time.monotonic() >= tell_at and lines[-1] != told:
                    told, tell_at = lines[-1], time.monotonic() + SLOW_START
                    who = "the coordinator of cluster" if lines[-1].startswith("reading") else "cluster"
                    on_progress(f"{who} {name!r} is {lines[-1]}")
        if ended:
            code = process.returncode
            return None, f"was ended by {signal.Signals(-code).name}" if code < 0 else ""
        time.sleep(0.005)
    _end(process)
    return None, f"said nothing for {START_TIMEOUT:g} s and was ended"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a coordinator that nobody has seen yet, and wait for that."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
