"""``%cluster export``, ``track``, ``compare`` and ``replay``: the curves of runs into files, into trackers, over each
other, and a run played again."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_cluster.magics.errors import UsageError
from notebook_cluster.magics.parsing import Invocation
from notebook_cluster.magics.session import NotebookSession
from notebook_cluster.protocol.names import did_you_mean

if TYPE_CHECKING:
    from notebook_cluster.client.curve_rows import MeasuredRun


def export(session: NotebookSession, call: Invocation) -> None:
    """Write the curves of the notebook's cluster, of its last run, or of a run that was kept.

    Raises:
        ClusterError: it cannot be written, or there is nothing to write; one line.
        UsageError: there is no cluster.
    """
    from notebook_cluster.client import export_run

    run, what = _run_of(session, call.options.get("run", ""))
    overwrite = call.options.get("overwrite", False)
    written = export_run(run, call.argument, job=call.options.get("job"), overwrite=overwrite)
    first, *more = written.lines()
    print("\n".join([f"{what}: {first}", *more]), flush=True)


def _run_of(session: NotebookSession, named: str) -> "tuple[MeasuredRun, str]":
    from notebook_cluster.client import find_run, read_last_run, read_run, run_name

    cluster = session.cluster
    if named and not (cluster is not None and cluster.connected and named == cluster.name):
        kept = find_run(named)
        return read_run(kept.folder), f"run {run_name(kept)}"
    over = session.name_of_ended()
    if over:
        last = read_last_run(over)
        return last, f"the last run of cluster {over!r} ({last.ended})"
    cluster = session.require()
    return cluster, f"cluster {cluster.name!r}"


def compare(session: NotebookSession, call: Invocation) -> None:
    """Show one number of several runs in one chart, and their settings.

    Raises:
        ClusterError: a run is not there, or none has measured this number; one line.
    """
    from notebook_cluster.client import read_runs
    from notebook_cluster.widgets import compare_runs

    metric, job = call.options.get("metric", "loss"), call.options.get("job")
    shown = compare_runs(read_runs(call.arguments), metric, job=job, log=call.options.get("log", False))
    session.shell.display_pub.publish(data={"text/plain": shown.text, "text/html": shown.html}, metadata={})


def replay(session: NotebookSession, call: Invocation) -> None:
    """Write the page that plays the notebook's cluster, its last run, or a run that was kept.

    Raises:
        ClusterError: what the run has left is damaged, or lies on another machine; one line.
        UsageError: the file cannot be written, or there is no cluster.
    """
    from notebook_cluster.client import named_run
    from notebook_cluster.widgets import write_replay

    folder, name, started = _place_of(session, call.options.get("run", ""))
    try:
        file = write_replay(folder, call.argument, overwrite=call.options.get("overwrite", False))
    except (OSError, ValueError) as error:
        raise UsageError(f"%cluster replay: {error}") from None
    print(f"{named_run(name, started)} is played in {file}: open it in a browser", flush=True)


def track(session: NotebookSession, call: Invocation) -> None:
    """Begin or end to log the run to a tracker, or say how it is.

    Raises:
        ClusterError: the tracker is not installed or does not let us in; one line with the way out.
        UsageError: no such tracker, or there is no cluster.
    """
    from notebook_cluster.journal.kept_runs import EVENT_FILES
    from notebook_cluster.tracking import TITLES, TRACKERS, describe, start_tracking, stop_tracking, trackers_of

    tracker, project = call.argument, call.options.get("project", "")
    if tracker not in ("", "off", *TRACKERS):
        near = did_you_mean(tracker, ("off", *TRACKERS))
        raise UsageError(f"%cluster track {tracker}: there are {', '.join(TRACKERS)}, and off to end it{near}")
    if project and tracker in ("", "off", "tensorboard"):
        raise UsageError(f"--project is for wandb and mlflow: %cluster track wandb --project {project}")
    folder, cluster, started = _place_of(session, call.options.get("run", ""))
    if tracker in TRACKERS:
        said = start_tracking(folder, cluster, started, tracker, project)
        if tracker == "tensorboard":
            said += f"\nlook at it with: tensorboard --logdir {shlex.quote(str(folder / EVENT_FILES))}"
        _tell_of_trouble(session, folder)
        print(said, flush=True)
    elif tracker == "off":
        print(
            "\n".join(stop_tracking(folder, one) for one in trackers_of(folder)) or "nothing logs this run", flush=True
        )
    else:
        known = [line for one in TITLES if (line := describe(folder, one))]
        print("\n".join(known) or f"nothing logs this run: %cluster track {'|'.join(TRACKERS)}", flush=True)


def _place_of(session: NotebookSession, named: str) -> tuple[Path, str, float]:
    """Folder, cluster and start of a run."""
    from notebook_cluster.client import find_run
    from notebook_cluster.security import cluster_directory

    over = "" if named else session.name_of_ended()
    if named or over:
        kept = find_run(named or over)
        return kept.folder, kept.cluster, kept.view.started
    cluster = session.require()
    return cluster_directory(cluster.name), cluster.name, cluster.state().started


def _tell_of_trouble(session: NotebookSession, folder: Path) -> None:
    """From now on a line below a cell when a tracker of the run in ``folder`` begins to have trouble."""
    from notebook_cluster.tracking import TITLES, trouble

    told: dict[str, str] = {}

    def look() -> None:
        for tracker in TITLES:
            try:
                text = trouble(folder, tracker)
            except (OSError, ValueError):
                continue
            if bool(text) and not told.get(tracker):
                print(f"{TITLES[tracker]}: {text} (training goes on; the points stay in the journal)", flush=True)
            told[tracker] = text

    session.after_cells(look)
