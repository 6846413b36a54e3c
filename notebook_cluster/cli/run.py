"""``notebook-cluster run``: a plain script on every node of a cluster, as torchrun would.

The cluster is the same as a notebook's: panel, report, checkpoints and nodes that come and go. The script runs as one
cell, which starts it as ``python SCRIPT.py`` would; output comes with its node's name before each line.
"""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from notebook_cluster.cli.arguments import UsageError
from notebook_cluster.cli.run_arguments import LAUNCHING
from notebook_cluster.cli.run_files import ScriptFiles
from notebook_cluster.cli.run_output import NodeLines
from notebook_cluster.client import Cluster, ClusterError, running_clusters
from notebook_cluster.magics.errors import reason_of
from notebook_cluster.magics.execution.waiting import StopCounter
from notebook_cluster.protocol.names import as_name, is_name
from notebook_cluster.protocol.views import CellChanged, CellEnded, CellOutput

if TYPE_CHECKING:
    from notebook_cluster.client import CellStream

INTERRUPTED = 130
_SLICE_S = 0.2
_LOOK_S = 0.3
_GRACE_S = 10.0
"""After the second Ctrl-C in a cluster that goes on."""


def run(options: argparse.Namespace) -> int:
    """Start or join a cluster, run the script on all its nodes, and end the cluster if it was started here.

    Raises:
        UsageError: options that do not go together.
        ClusterError: the cluster did not start, or its nodes cannot be given the script.
    """
    _check(options)
    if options.behind:
        _say(f"read as options of notebook-cluster: {', '.join(options.behind)} (those of the script stand behind --)")
    files = ScriptFiles(options.script, alone=options.script_only)
    if options.peers or options.on or options.code or options.code_file or options.cluster in running_clusters():
        files.find()  # before anything is started: what cannot be sent is said now
    name = options.cluster or _free_name(options.script)
    with _ended_by(signal.SIGTERM, signal.SIGHUP):
        cluster = _start(options, name, files.base)
        keeps = options.keep or cluster.attached
        try:
            with StopCounter() as presses:
                code = _run(cluster, options, files, presses, keeps)
        finally:
            if keeps:
                cluster.close()
            else:
                cluster.stop()
    after = (
        f"notebook-cluster stop {name} ends it" if keeps else f"notebook-cluster report {name} FILE.html shows its run"
    )
    _say(f"cluster {name} {'goes on' if keeps else 'is over'}: {after}")
    return code


def _check(options: argparse.Namespace) -> None:
    typed = [option for option in LAUNCHING[1:] if getattr(options, option)]
    if typed and not options.on:
        needs = f"--{typed[0].replace('_', '-')} is for hosts that an engine starts"
        raise UsageError(f"{needs}: name it with --on slurm, or --on ssh:HOST,HOST")
    if options.cluster and not is_name(options.cluster):
        raise UsageError(f"--cluster {options.cluster!r}: use letters, digits, - and _, as lesson-2")


def _free_name(script: Path) -> str:
    """``run-train``, or with a number behind it where that runs."""
    name, running = as_name(f"run-{script.stem}", fallback="run"), running_clusters()
    return next(one for one in (name, *(f"{name}-{number}" for number in range(2, 10_000))) if one not in running)


def _start(options: argparse.Namespace, name: str, base: Path) -> Cluster:
    from notebook_cluster.cli.values import read_code

    return Cluster.start(
        name, local=options.local, peers=options.peers, nodes=0 if options.on else options.nodes,
        code=read_code(options), **{option: getattr(options, option) for option in LAUNCHING}, directory=str(base),
        kind="cli", on_progress=_say,
    )  # fmt: skip


def _run(
    cluster: Cluster, options: argparse.Namespace, files: ScriptFiles, presses: StopCounter, keeps: bool
) -> int:  # fmt: skip
    if not _wait_for_nodes(cluster, options.nodes or 1, presses):
        return INTERRUPTED
    with files.on_their_way(cluster, _say):
        if presses.count:
            return INTERRUPTED
        line = shlex.join(["notebook-cluster", "run", files.script, *options.of_script])
        stream = cluster.execute(files.source(line, options.of_script), replay=False)
        began = time.monotonic()
        ended = _Watching(cluster, stream, presses, keeps).until_end()
    if ended is None:
        return INTERRUPTED
    took = time.monotonic() - began
    if ended.status == "ok":
        _say(f"the script has ended on {_nodes(len(ended.results))} after {took:.1f} s")
    elif not presses.count:
        for node, result in ended.results.items():
            if result.status != "ok":
                own = result.error_name == "ScriptExit"
                _say(f"{node}: {result.error_value if own else reason_of(result)}")
    return exit_code(ended, stopped=presses.count > 0)


def exit_code(ended: CellEnded, *, stopped: bool) -> int:
    """That of the script, of the first node that ended by itself; 1 after an exception or where no node is left."""
    if ended.status == "ok":
        return 0
    if stopped or ended.status == "interrupted":
        return INTERRUPTED
    codes = [
        int(result.error_value.rpartition(" ")[2])
        for result in ended.results.values()
        if result.error_name == "ScriptExit" and result.error_value.rpartition(" ")[2].isdigit()
    ]
    return codes[0] if codes else 1


def _wait_for_nodes(cluster: Cluster, wanted: int, presses: StopCounter) -> bool:
    """Until so many are there; False when Ctrl-C was pressed meanwhile.

    Raises:
        ClusterError: nobody is to come any more.
    """
    said = ""
    while not presses.count:
        state = cluster.state()
        there = sum(node.rank is not None for node in state.nodes)
        if there >= wanted:
            return True
        coming = [launch.text for launch in state.launches if launch.condition != "ended"]
        starting = any(node.condition == "starting" for node in state.nodes)
        follows = any(peer.condition in ("connecting", "connected") for peer in state.peers)
        if not (coming or starting or follows):
            ended = [launch.text for launch in state.launches] or [
                "no peer came: notebook-cluster share on another machine, or --local 1"
            ]
            raise ClusterError(f"{there} of {_nodes(wanted)} are there, and nobody else is to come: {'; '.join(ended)}")
        waits = f"waiting for {_nodes(wanted - there)}{': ' if coming else ''}{'; '.join(coming)}"
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
        self._lines = NodeLines(sys.stdout, sys.stderr)
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
        before[one] = signal.signal(one, end)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _say(text: str) -> None:
    """On stderr: stdout is the script's."""
    line = "".join(letter for letter in text if letter.isprintable())
    print(f"notebook-cluster: {line}", file=sys.stderr, flush=True)
