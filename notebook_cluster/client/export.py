"""The curves of a run as a file: CSV, Parquet, TensorBoard's event files; and as a pandas frame."""

import csv
import io
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from notebook_cluster.client.connection import ClusterError
from notebook_cluster.client.curve_rows import (
    CurveRow,
    MeasuredRun,
    curve_rows,
    outside_name,
    place_of_curve,
    spreadsheet_safe,
)
from notebook_cluster.client.event_files import EVENT_FILE, EventFiles
from notebook_cluster.protocol.state import Series
from notebook_cluster.values.handed_out import whole_file

COLUMNS = ("cluster", "started", "job", "run", "cell", "node", "metric", "step", "round", "time", "utc", "value")
AXES = "step is that of the node (or of the global model) in this run of its job, round the rounds complete by then"


class Exported(NamedTuple):
    """What was written: ``rows`` points of ``curves`` curves to ``path``; of ``measured`` points, where a long run's
    curves were thinned by the cluster, ``thinned`` of them."""

    path: Path
    rows: int
    curves: int
    thinned: int
    measured: int
    only_memory: bool

    def lines(self) -> list[str]:
        """For people."""
        unit = "point" if self.path.is_dir() else "row"
        what = f"{self.rows:,} {unit}{'s' if self.rows != 1 else ''} of {self.curves} curve"
        said = [f"{what}{'s' if self.curves != 1 else ''} written to {self.path}"]
        if self.path.is_dir():
            said.append(f"look at them with: tensorboard --logdir {shlex.quote(str(self.path))}")
        else:
            said.append(AXES)
        if self.thinned:
            said.append(
                f"{self.thinned} of the curves are thinned, with their ends and peaks: {self.rows:,} of "
                f"{self.measured:,} measured points are kept of a run this long"
            )
        if self.only_memory:
            said.append("there is no curve but memory: sync.step(loss=...) and nc.report(loss=...) make others")
        return said


def frame_of(run: MeasuredRun, job: str | None = None) -> Any:
    """The curves of ``run`` as a pandas frame in long form, with the columns of the CSV file; see
    :meth:`.past.Past.to_pandas`."""
    try:
        from pandas import DataFrame, to_datetime  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise ClusterError("a frame needs pandas, which is not installed here: pip install pandas") from None
    state, rows = run.state(), list(_rows(run, job)[1])
    table = DataFrame(rows, columns=list(CurveRow._fields))
    for column in ("run", "cell", "round"):
        table[column] = table[column].astype("Int64")
    table.insert(0, "cluster", state.name)
    table.insert(1, "started", to_datetime(state.started, unit="s", utc=True))
    table.insert(10, "utc", to_datetime(table["time"], unit="s", utc=True).dt.round("us"))
    return table


def export_run(run: MeasuredRun, path: str, *, job: str | None = None, overwrite: bool = False) -> Exported:
    """Write the curves of ``run``, or of ``job`` alone, to ``path``: see :meth:`.past.Past.export`."""
    target = Path(os.path.abspath(os.path.expanduser(path)))
    write = _writer_for(path, target)
    _check_place(target, is_folder=write is _write_event_files, overwrite=overwrite)
    series, rows = _rows(run, job)
    if not any(one.step for one in series):
        raise ClusterError(
            f"this run of cluster {run.state().name!r} has measured nothing yet, so there is no curve to write: "
            "sync.step(loss=...) and nc.report(step=..., loss=...) make curves"
        )
    try:
        count = write(target, run, job, rows, overwrite)
    except FileExistsError:
        raise ClusterError(f"{target} exists already: --overwrite (overwrite=True) replaces it") from None
    except OSError as error:
        raise ClusterError(f"{target} cannot be written: {error.strerror or error}") from None
    seen = [max(one.seen, len(one.step)) for one in series]
    thinned = sum(measured > len(one.step) for measured, one in zip(seen, series, strict=True))
    return Exported(target, count, len(series), thinned, sum(seen), all(one.name == "memory" for one in series))


def _rows(run: MeasuredRun, job: str | None) -> tuple[list[Series], Iterator[CurveRow]]:
    every = run.series()
    known = sorted({one.job for one in every if one.job})
    if job is not None and job not in known:
        raise ClusterError(f"no job {job!r} has measured anything in this run: {', '.join(known) or 'none has'}")
    chosen = [one for one in every if job in (None, one.job) and one.step]
    chosen.sort(key=lambda one: (not one.job, one.job, one.run, one.node))
    return chosen, curve_rows(chosen, run.history().rounds)


Write = Callable[[Path, MeasuredRun, str | None, Iterator[CurveRow], bool], int]


def _writer_for(typed: str, target: Path) -> Write:
    if typed.endswith(("/", os.sep)) or target.is_dir():
        return _write_event_files
    kinds: dict[str, Write] = {".csv": _write_csv, ".parquet": _write_parquet}
    write = kinds.get(target.suffix.lower())
    if write is None:
        raise ClusterError(
            f"{typed!r} says no format: name a file that ends in .csv or .parquet, or, for TensorBoard, a folder with "
            "/ at its end"
        )
    return write


def _check_place(target: Path, *, is_folder: bool, overwrite: bool) -> None:
    if not target.parent.is_dir():
        raise ClusterError(f"folder {target.parent} does not exist: make it first, or name another place")
    if not is_folder:
        if target.exists() and not overwrite:
            raise ClusterError(f"{target} exists already: --overwrite (overwrite=True) replaces it")
        return
    if target.exists() and not target.is_dir():
        raise ClusterError(f"{target} is a file: name a folder for TensorBoard's event files")
    files = [path for path in target.rglob("*") if not path.is_dir()] if target.exists() else []
    other = next((path for path in files if not path.name.startswith(EVENT_FILE)), None)
    if other is not None:
        raise ClusterError(
            f"{target} holds other files ({other.name}): name a new folder for TensorBoard's event files"
        )
    if files and not overwrite:
        raise ClusterError(f"{target} holds event files already: --overwrite (overwrite=True) replaces them")


def _write_csv(target: Path, run: MeasuredRun, job: str | None, rows: Iterator[CurveRow], overwrite: bool) -> int:
    state, count = run.state(), 0
    started = _utc(state.started)
    with whole_file(target, overwrite=overwrite) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in rows:
            safe = row._replace(
                job=spreadsheet_safe(row.job), node=spreadsheet_safe(row.node), metric=spreadsheet_safe(row.metric)
            )
            table.writerow((state.name, started, *safe[:8], _utc(row.time), row.value))
            count += 1
        text.flush()
        text.detach()
    return count


def _write_parquet(target: Path, run: MeasuredRun, job: str | None, rows: Iterator[CurveRow], overwrite: bool) -> int:
    try:
        import pandas  # type: ignore[import-not-found, import-untyped, unused-ignore] # noqa: F401
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore] # noqa: F401
    except ImportError as error:
        raise ClusterError(
            f"a .parquet file needs pandas and pyarrow ({error.name} is not installed here): pip install pandas "
            "pyarrow, or write a .csv file"
        ) from None
    frame = frame_of(run, job)
    with whole_file(target, overwrite=overwrite) as file:
        frame.to_parquet(file, engine="pyarrow", index=False)
    return len(frame)


def _write_event_files(
    target: Path, run: MeasuredRun, job: str | None, rows: Iterator[CurveRow], overwrite: bool
) -> int:
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        count, last = 0, None
        files = EventFiles(partial)
        for row in rows:
            place = place_of_curve(row.job, row.run, row.node)
            if place != last:
                files.close()
                last = place
            files.add(place, outside_name(row.metric), row.step, row.time, row.value)
            count += 1
        files.close()
        partial.chmod(0o755)
        _put_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return count


def _put_folder(made: Path, target: Path) -> None:
    """Put folder ``made`` in the place of ``target``, which holds event files, or nothing."""
    if not target.exists():
        os.rename(made, target)
        return
    before = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    os.rename(target, before)
    try:
        os.rename(made, target)
    except OSError:
        os.rename(before, target)
        raise
    shutil.rmtree(before, ignore_errors=True)


def _utc(time: float) -> str:
    """``2026-11-26T01:04:28.512345+00:00``, which pandas, R and spreadsheets read."""
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="microseconds")
