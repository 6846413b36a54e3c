"""Runs that are over, how one is named, and what a run has measured: as pandas frames and as files."""

import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.curve_rows import MeasuredRun
from notebook_cluster.client.export import Exported, export_run, frame_of
from notebook_cluster.client.requests import RunningCluster
from notebook_cluster.client.settings import with_settings
from notebook_cluster.journal.kept_runs import KeptRun, LastRun, kept_runs, last_run
from notebook_cluster.journal.moments import PastViews, read_moments
from notebook_cluster.protocol.clock import dated
from notebook_cluster.protocol.state import JobView
from notebook_cluster.security import runtime_directory


class Frames(NamedTuple):
    """One run as pandas frames.

    Attributes:
        rounds: a row for each committed round: job, round, time, members, wait (seconds that was waited for the last
            node) and waited_for (that node), bytes_sent (so far), hash_mismatches (so far), state_hash.
        curves: a row for each point: job, run, node (empty: the model that all share), name, step, time, value.
        checkpoints: name, job, round, time, path.
    """

    rounds: Any
    curves: Any
    checkpoints: Any


class Run(NamedTuple):
    """One job of a run that was kept, or of the last one; ``strategy`` is empty where nothing was trained."""

    cluster: str
    started: float
    """Unix time."""
    job: str
    strategy: str
    nodes: int
    rounds: int
    loss: float | None
    """The last one of the model that all share, where it was measured; else the mean of the nodes' last ones."""
    ended: str
    """Why it ended; empty: it runs, or its coordinator was killed."""
    folder: Path

    def frames(self) -> Frames:
        """The run as pandas frames; with a job its own only.

        Raises:
            ClusterError: pandas is not installed, or the journal is damaged.
        """
        return frames_of(self._read(), self.job or None)

    def to_pandas(self) -> Any:
        """As :meth:`Past.to_pandas`; with a job its own curves only."""
        return frame_of(self._read(), self.job or None)

    def export(self, path: str, *, overwrite: bool = False) -> Exported:
        """As :meth:`Past.export`; with a job its own curves only."""
        return export_run(self._read(), path, job=self.job or None, overwrite=overwrite)

    def _read(self) -> LastRun:
        return read_run(self.folder)


class Past(RunningCluster):
    """The part of :class:`.cluster.Cluster` that tells of runs."""

    @staticmethod
    def runs() -> list[Run]:
        """The runs of all clusters of this user on this machine, the newest first, a row for each job."""
        return [row for kept in kept_runs(runtime_directory() / "clusters") for row in _rows(kept)]

    def frames(self, job: str | None = None) -> Frames:
        """Rounds, curves and checkpoints so far as pandas frames, of ``job`` or of all.

        Raises:
            ClusterError: pandas is not installed, or no job has this name.
        """
        return frames_of(self, job)

    def to_pandas(self, job: str | None = None) -> Any:
        """The curves so far, of ``job`` or of all, as one pandas frame in long form: a row for each point, with columns
        cluster, started, job, run, cell, node (empty: the model that all share), metric, step, round, time (seconds
        since 1970), utc, value; :class:`.curve_rows.CurveRow` says what each is.

        Raises:
            ClusterError: pandas is not installed, or no job has this name.
        """
        return frame_of(self, job)

    def export(self, path: str, *, job: str | None = None, overwrite: bool = False) -> Exported:
        """Write the curves so far, of ``job`` or of all, to ``path`` on this machine: a ``.csv`` or ``.parquet`` file
        in the form of :meth:`to_pandas`, or for TensorBoard a folder (``/`` at its end, or there already) of event
        files. It appears whole or not at all.

        Raises:
            ClusterError: it is there already (without ``overwrite``), its folder is not, the disk is full, nothing was
                measured, no job has this name, or a library is missing; one line.
        """
        return export_run(self, path, job=job, overwrite=overwrite)


def frames_of(run: MeasuredRun, job: str | None = None) -> Frames:
    """Of any run; see :meth:`Past.frames`."""
    try:
        from pandas import DataFrame, to_datetime  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ClusterError("frames need pandas, which is not installed here: pip install pandas") from None
    past, series = run.history(), run.series()
    known = sorted({one.job for one in past.rounds} | {one.job for one in series if one.job})
    if job is not None and job not in known:
        raise ClusterError(f"no job {job!r} has measured anything in this run: {', '.join(known) or 'none has'}")

    def frame(columns: str, rows: list[tuple[Any, ...]]) -> Any:
        table = DataFrame(rows, columns=columns.split())
        table["time"] = to_datetime(table["time"], unit="s")
        return table

    rounds = [one for one in past.rounds if job in (None, one.job)]
    points = [
        (one.job, one.run, one.node, one.name, *point)
        for one in series
        if job in (None, one.job)
        for point in zip(one.step, one.time, one.value, strict=True)
    ]
    saved = [(one.name, one.job, one.round, one.time, one.path) for one in past.checkpoints if job in (None, one.job)]
    return Frames(
        frame(
            "job round time members wait waited_for bytes_sent hash_mismatches state_hash",
            [
                (one.job, one.round, one.time, one.members, max(one.waits.values(), default=math.nan),
                 min(one.waits, key=one.waits.__getitem__, default=""), one.bytes_sent, one.hash_mismatches,
                 one.state_hash)
                for one in rounds
            ],
        ),
        frame("job run node name step time value", points),
        frame("name job round time path", saved),
    )  # fmt: skip


_STARTED = "%Y-%m-%dT%H:%M:%S"


def run_name(run: KeptRun | Run) -> str:
    """``lesson@2026-11-19T14:03:10``: how people name a run that was kept."""
    return named_run(run.cluster, run.started if isinstance(run, Run) else run.view.started)


def named_run(cluster: str, started: float) -> str:
    """The same of the run of ``cluster`` that began at ``started`` (Unix time)."""
    return f"{cluster}@{time.strftime(_STARTED, time.localtime(started))}"


def find_run(text: str) -> KeptRun:
    """The run that ``text`` names: ``lesson`` (the newest of this cluster), or ``lesson@2026-11-19T14:03`` with as much
    of its start, local time, as tells it from others.

    Raises:
        ClusterError: there is none, or several; names those that there are.
    """
    cluster, _, started = text.strip().partition("@")
    started = started.strip().replace(" ", "T")
    every = kept_runs(runtime_directory() / "clusters")
    of_cluster = [run for run in every if run.cluster == cluster]
    found = [run for run in of_cluster if run_name(run).startswith(f"{cluster}@{started}")]
    if not of_cluster:
        known = ", ".join(dict.fromkeys(run.cluster for run in every))
        raise ClusterError(f"no run of a cluster {cluster!r} was kept here: {known or 'there is none of any'}")
    if not found or (started and len(found) > 1):
        names = [run_name(run) for run in found or of_cluster]
        more = f" and {len(names) - 6} more: %cluster runs" if len(names) > 6 else ""
        what = "names several runs" if found else "names no run"
        raise ClusterError(f"{text!r} {what}; there are {', '.join(names[:6])}{more}")
    return found[0]


def read_run(folder: Path) -> LastRun:
    """All that the run in ``folder`` has left. ClusterError: it is damaged, or gone."""
    try:
        found = last_run(folder)
    except (ValueError, OSError) as error:
        raise ClusterError(str(error)) from None
    if found is None:
        raise ClusterError(f"the run in {folder} is gone")
    return with_settings(found, folder)


def read_past_views(folder: Path, run: LastRun) -> PastViews:
    """What the panel has shown during ``run``, which :func:`read_run` read from ``folder``. ClusterError: its journal
    is damaged, or gone."""
    try:
        return read_moments(folder, run)
    except (ValueError, OSError) as error:
        raise ClusterError(str(error)) from None


def read_runs(texts: Iterable[str]) -> list[tuple[str, LastRun]]:
    """Name and run of each that ``texts`` name as :func:`find_run` reads them, each run once.

    Raises:
        ClusterError: one is not there, or damaged.
    """
    found = {run.folder: run_name(run) for run in map(find_run, texts)}
    return [(name, read_run(folder)) for folder, name in found.items()]


def runs_table(runs: list[Run]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and rows for people."""
    heads = ("cluster", "started", "job", "strategy", "nodes", "rounds", "final loss", "end")
    return heads, [
        (
            run.cluster, dated(run.started), run.job or "-",
            run.strategy or "-", str(run.nodes), str(run.rounds), "-" if run.loss is None else f"{run.loss:.4g}",
            run.ended or "-",
        )
        for run in runs
    ]  # fmt: skip


def _rows(kept: KeptRun) -> list[Run]:
    view = kept.view
    jobs: list[JobView | None] = list(view.jobs) or [None]
    losses = _job_losses(kept)
    return [
        Run(
            kept.cluster, view.started, job.name if job else "", job.strategy if job else "", len(view.nodes),
            job.round if job else 0, losses.get(job.name) if job else None, kept.ended, kept.folder,
        )
        for job in jobs
    ]  # fmt: skip


def _job_losses(kept: KeptRun) -> dict[str, float]:
    """Job -> its last loss. What nodes show is that of the job that they trained last, so where there are several the
    curves are read."""
    jobs = kept.view.jobs
    found = {job.name: job.loss for job in jobs if job.loss is not None}
    if len(jobs) == len(found):
        return found
    if len(jobs) == 1:
        told = {jobs[0].name: [node.loss for node in kept.view.nodes if node.loss is not None]}
    else:
        told = _last_losses(kept.folder)
    finite = {job: [loss for loss in losses if math.isfinite(loss)] for job, losses in told.items()}
    return {job: sum(losses) / len(losses) for job, losses in finite.items() if losses} | found


def _last_losses(folder: Path) -> dict[str, list[float]]:
    """Job -> the last loss of each node in the newest run of it. A run that is damaged or gone is listed without."""
    try:
        series = [one for one in read_run(folder).series() if one.job and one.node and one.name == "loss" and one.value]
    except ClusterError:
        return {}
    newest = {one.job: max(other.run for other in series if other.job == one.job) for one in series}
    told: dict[str, list[float]] = {}
    for one in series:
        if one.run == newest[one.job]:
            told.setdefault(one.job, []).append(one.value[-1])
    return told
