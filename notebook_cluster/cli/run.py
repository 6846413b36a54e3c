"""``notebook-cluster run``: a plain script on every node of a cluster, as torchrun would.

The cluster is the same as a notebook's: panel, report, checkpoints and nodes that come and go. The script runs as one
cell, which starts it as ``python SCRIPT.py`` would; output comes with its node's name before each line.
"""

import argparse
import fcntl
import hashlib
import io
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from notebook_cluster.cli.arguments import UsageError
from notebook_cluster.cli.console import one_line
from notebook_cluster.cli.run_files import FileSender, ScriptFiles
from notebook_cluster.cli.run_output import NodeLines
from notebook_cluster.client import Cluster, ClusterError, running_clusters, was_killed
from notebook_cluster.magics.errors import reason_of
from notebook_cluster.magics.execution.waiting import StopCounter
from notebook_cluster.protocol.launches import LAUNCH_OPTIONS
from notebook_cluster.protocol.names import as_name, is_name
from notebook_cluster.protocol.views import CellChanged, CellEnded, CellOutput, NodeResult
from notebook_cluster.security import cluster_directory
from notebook_cluster.widgets.formatting import plural

if TYPE_CHECKING:
    from notebook_cluster.client import CellStream

INTERRUPTED = 130
_SLICE_S = 0.2
_LOOK_S = 0.3
_COMING_S = 10.0
_GRACE_S = 10.0
"""After the second Ctrl-C in a cluster that goes on."""
_STOP_S = 5.0
"""For the script to end after a signal, before the last round is saved and the cluster ends."""


def run(options: argparse.Namespace) -> int:
    """Start or join a cluster, run the script on all its nodes, and end the cluster if it was started here.

    Raises:
        UsageError: options that do not go together.
        ClusterError: the cluster did not start, or its nodes cannot be given the script.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a node's letter that cannot be shown ends nothing
    if options.behind:
        _say(f"read as options of notebook-cluster: {', '.join(options.behind)} (those of the script stand behind --)")
    _check(options)
    files = ScriptFiles(options.script, alone=options.script_only)
    is_there = bool(options.cluster) and (options.cluster in running_clusters() or was_killed(options.cluster))
    away = bool(options.peers or options.on or options.code or options.code_file or is_there)
    with (
        files.look(needed=away),
        _reserved(options.cluster, options.script, files.base) as name,
        _ended_by(signal.SIGTERM, signal.SIGHUP),
    ):
        cluster = _start(options, name, files.base)
        keeps = options.keep or cluster.attached  # it ran, or was killed and went on from its journal
        try:
            with _presses() as presses:
                code = _run(cluster, options, files, presses, keeps)
            if code == INTERRUPTED and not keeps and presses.count == 1:
                _save_trained(cluster)
        except SystemExit:
            if not keeps:
                _save_trained(cluster)
            raise
        finally:
            if keeps:
                cluster.close()
            elif cluster.connected:
                cluster.stop()
    if name in running_clusters():
        again = f"; the same with --cluster {name} goes on with a training that was stopped" if code else ""
        _say(f"cluster {name} goes on: notebook-cluster stop {name} ends it{again}")
    else:
        _say(f"cluster {name} is over: notebook-cluster report {name} FILE.html shows its run")
    return code


def _check(options: argparse.Namespace) -> None:
    behind = "; an option of the script's own stands behind --" if options.behind else ""
    typed = [option for option in LAUNCH_OPTIONS[1:] if getattr(options, option)]
    if typed and not options.on:
        needs = f"--{typed[0].replace('_', '-')} is for hosts that an engine starts"
        raise UsageError(f"{needs}: name it with --on slurm, or --on ssh:HOST,HOST{behind}")
    if options.cluster and not is_name(options.cluster):
        raise UsageError(f"--cluster {options.cluster!r}: use letters, digits, - and _, as lesson-2{behind}")


@contextmanager
def _reserved(asked: str, script: Path, base: Path) -> Iterator[str]:
    """The name of the cluster: the one that was ``asked`` for, else ``run-train-3f2a``: nodes keep their files below
    it, and other folders have scripts of that name too. While one of these runs, the next one has a number behind it.
    """
    if asked:
        yield asked
        return
    place = hashlib.blake2b(os.fsencode(base), digest_size=2).hexdigest()
    name = as_name(f"run-{script.stem[:40]}-{place}", fallback=f"run-{place}")
    for one in (name, *(f"{name}-{number}" for number in range(2, 1000))):
        # Held by this process until it ends, however that is.
        with (cluster_directory(one) / "run.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if one not in running_clusters():
                yield one
                return
    raise ClusterError(f"999 clusters called {name} run: notebook-cluster stop ends one")


@contextmanager
def _presses() -> Iterator[StopCounter]:
    """Counts Ctrl-C, where the shell has not told this program to ignore it (``nohup``, ``&`` in a script)."""
    presses = StopCounter()
    with nullcontext() if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else presses:
        yield presses


def _start(options: argparse.Namespace, name: str, base: Path) -> Cluster:
    from notebook_cluster.cli.values import read_code

    return Cluster.start(
        name, local=options.local, peers=options.peers, nodes=0 if options.on else options.nodes,
        code=read_code(options), head=options.head or "", directory=str(base),
        **{option: getattr(options, option) for option in LAUNCH_OPTIONS},
        # One of this name that was killed is not gone on with: it was another run of the script.
        fresh=not options.cluster, kind="cli", on_progress=_say,
    )  # fmt: skip


def _run(
    cluster: Cluster, options: argparse.Namespace, files: ScriptFiles, presses: StopCounter, keeps: bool
) -> int:  # fmt: skip
    if not _wait_for_nodes(cluster, options.nodes or 1, presses):
        return INTERRUPTED
    sender = FileSender(cluster, files, _say, lambda: presses.count > 0)
    try:
        sender.send_to_all()
        sender.start()
        nodes = sum(node.rank is not None for node in cluster.state().nodes)
        if nodes > 1 and (alone := files.work_alone(nodes)):
            way_out = "nc.DiLoCo(model) trains one model, nc.shard divides the data, nc.rank() == 0 lets one node write"
            _say(f"{alone}; {way_out}")
        line = shlex.join(["notebook-cluster", "run", files.script, *options.of_script])
        stream = cluster.execute(files.source(line, options.of_script), replay=False)
        began = time.monotonic()
        ended = _watch(cluster, stream, presses, keeps)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        sender.close()
    if ended is None:
        return INTERRUPTED
    took = time.monotonic() - began
    if ended.status == "ok":
        _say(f"the script has ended on {plural(len(ended.results), 'node')} after {took:.1f} s")
    elif not presses.count:
        for node, result in ended.results.items():
            if result.status != "ok":
                own = result.error_name == "ScriptExit"
                _say(f"{node}: {result.error_value if own else reason_of(result)}")
    return exit_code(ended, stopped=presses.count > 0)


def _watch(cluster: Cluster, stream: "CellStream", presses: StopCounter, keeps: bool) -> CellEnded | None:
    """The end of the script. Where this program ends before it, the script ends too: in a cluster that does not go on
    within a moment, before what it has trained is saved."""
    try:
        return _Watching(cluster, stream, presses, keeps).until_end()
    except BaseException:
        if cluster.connected:
            with suppress(ClusterError, TimeoutError):
                cluster.interrupt(cell=stream.cell)
                if not keeps:
                    cluster.wait_until(lambda state: state.cell is None or state.cell.status != "running", _STOP_S)
            if keeps:
                _say("the nodes are asked to stop")
        raise


def _save_trained(cluster: Cluster) -> None:
    """Before a cluster ends whose script was stopped: the last round of each training, as a checkpoint."""
    for job in cluster.state().jobs if cluster.connected else ():
        if not job.round:
            continue
        name = f"{job.name}-stopped"
        try:
            folder = cluster.checkpoint(name, job.name)
            said = f"round {job.round} of {job.name!r} is kept in {folder}: resume={name!r} goes on from it"
        except ClusterError as error:
            said = f"what was trained of {job.name!r} could not be kept: {error}"
        with suppress(OSError):  # the terminal has gone
            _say(said)


def exit_code(ended: CellEnded, *, stopped: bool) -> int:
    """That of the script, of the first node that ended by itself; 1 after an exception or where no node is left; of a
    process that died the one that a shell gives."""
    if ended.status == "ok":
        return 0
    if stopped or ended.status == "interrupted":
        return INTERRUPTED
    return next(filter(None, map(_code_of, ended.results.values())), 1)


def _code_of(result: NodeResult) -> int:
    """0: it says none. What a node says of itself may be anything."""
    said = result.error_value if result.error_name == "ScriptExit" else result.reason if result.status == "lost" else ""
    if found := re.search(r"exit code ([0-9]{1,3})(?![0-9])", said):
        return min(int(found[1]), 255)
    if found := re.search(r"killed by (SIG[A-Z]+)", said):
        return 128 + getattr(signal, found[1], 0)
    return 0


def _wait_for_nodes(cluster: Cluster, wanted: int, presses: StopCounter) -> bool:
    """Until so many are there; False when Ctrl-C was pressed meanwhile.

    Raises:
        ClusterError: nobody is to come any more.
    """
    said, expected = "", time.monotonic()
    while not presses.count:
        state = cluster.state()
        there = sum(node.rank is not None for node in state.nodes)
        if there >= wanted:
            return True
        coming = [launch.text for launch in state.launches if launch.condition != "ended"]
        if coming or any(node.condition == "starting" for node in state.nodes):
            expected = time.monotonic()
        others = [peer for peer in state.peers if peer.found_by != "local"]
        follows = any(peer.condition in ("connecting", "connected") for peer in others)
        # A peer that has come in starts its nodes soon, or not at all.
        if time.monotonic() - expected > (_COMING_S if follows else 0.0):
            ended = [launch.text for launch in state.launches] or [
                "no peer came: notebook-cluster share on another machine, or --local 1"
            ]
            raise ClusterError(
                f"{there} of {plural(wanted, 'node')} are there, and nobody else is to come: {'; '.join(ended)}"
            )
        waits = f"waiting for {plural(wanted - there, 'node')}{': ' if coming else ''}{'; '.join(coming)}"
        if waits != said:
            said = waits
            _say(waits)
        time.sleep(_LOOK_S)
    return False


class _Watching:
    """The terminal while the script runs."""

    def __init__(self, cluster: Cluster, stream: "CellStream", presses: StopCounter, keeps: bool) -> None:
        self._cluster = cluster
        self._stream = stream
        self._presses = presses
        self._keeps = keeps
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115 - for a stream that the shell has closed
        self._lines = NodeLines(sys.stdout or self._nowhere, sys.stderr or self._nowhere)
        self._asked = 0
        self._deadline = float("inf")
        presses.on_press = stream.wake

    def until_end(self) -> CellEnded | None:
        """None when the second Ctrl-C ended it."""
        try:
            while True:
                event = self._stream.get(_SLICE_S)
                if isinstance(event, CellOutput):
                    self._lines.add(event.outputs)
                elif isinstance(event, CellChanged):
                    if event.note:
                        _say(event.note)
                elif isinstance(event, CellEnded):
                    return event
                self._lines.show_unfinished(time.monotonic())
                if self._presses.count > self._asked and self._is_over():
                    return None
                if time.monotonic() > self._deadline:
                    return None
        finally:
            self._presses.on_press = None
            self._stream.close()
            self._lines.finish()
            self._nowhere.close()

    def _is_over(self) -> bool:
        """Do what Ctrl-C asks for; True when nothing is waited for any more."""
        self._asked += 1
        if self._asked == 1:
            again = "kills what is still busy" if self._keeps else "ends the cluster at once"
            _say(f"the nodes are asked to stop; Ctrl-C again {again}")
            self._cluster.interrupt(cell=self._stream.cell)
            return False
        if self._keeps:
            self._cluster.interrupt(force=True, cell=self._stream.cell)
            self._deadline = min(self._deadline, time.monotonic() + _GRACE_S)
            return False
        return True


@contextmanager
def _ended_by(*signals: signal.Signals) -> Iterator[None]:
    """Have these end this program as an exception does, so that the cluster is not left behind."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
    for one in signals:
        if signal.getsignal(one) is not signal.SIG_IGN:  # as nohup has it
            before[one] = signal.signal(one, end)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _say(text: str) -> None:
    """On stderr: stdout is the script's."""
    if sys.stderr is not None:
        print(f"notebook-cluster: {one_line(text)}", file=sys.stderr, flush=True)
