"""Weights & Biases, MLflow and TensorBoard, each behind the same four calls. Imported in the tracker's process only."""

import os
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from notebook_cluster.client import ClusterError
from notebook_cluster.client.event_files import EventFiles
from notebook_cluster.journal.kept_runs import EVENT_FILES
from notebook_cluster.tracking.points import NewPoint
from notebook_cluster.tracking.remembered import Target

Settings = dict[str, str]
"""``model.codec`` -> ``int8``."""


class TrackerRefused(Exception):
    """It will not work by trying again: no login, not installed. The text is one line with the way out."""


class Tracker(Protocol):
    """One run of a tracker. Any call may raise whatever the library does; what was logged is then tried again."""

    memory: bool
    """Whether the memory that nodes use is logged too."""

    def where(self, project: str) -> str:
        """Which project on which server, without a key: what is logged to another one begins anew."""

    def open(self, target: Target, project: str, name: str) -> None:
        """Begin a run called ``name``, or go on with the one that ``target`` names; fills in its id and address."""

    def configure(self, settings: Settings, before: Settings) -> None:
        """Show ``settings`` as the run's configuration; ``before`` are those that were shown last."""

    def log(self, points: Sequence[NewPoint], target: Target) -> None:
        """Return when they are handed over."""

    def is_safe(self, handed: float) -> bool:
        """Whether what was handed over at ``handed`` (Unix time) stays when this process is killed now."""

    def close(self) -> None:
        """The run is over."""


class WandbTracker:
    """Weights & Biases. Each row has a ``step`` of our own as its axis: the steps of two curves need not be alike, and
    those of wandb itself only ever increase."""

    memory = False
    _ON_THE_WAY, _SURELY = 0.5, 60.0
    """Seconds."""

    def where(self, project: str) -> str:
        return f"{project}@{without_key(os.environ.get('WANDB_BASE_URL', ''))}"

    def open(self, target: Target, project: str, name: str) -> None:
        import wandb

        target.run_id = target.run_id or secrets.token_hex(4)
        quiet = wandb.Settings(console="off", silent=True, init_timeout=30, disable_git=True, disable_code=True)
        try:
            self._run = wandb.init(
                project=project,
                id=target.run_id,
                name=name,
                resume="allow",
                settings=quiet,
                job_type="notebook-cluster",
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise TrackerRefused(
                f"Weights & Biases does not let us in ({one_line(error)}): wandb.login(), or set WANDB_API_KEY or "
                "WANDB_MODE=offline, then track again"
            ) from None
        target.address = self._run.url or os.path.dirname(self._run.dir)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def configure(self, settings: Settings, before: Settings) -> None:
        nested: dict[str, Any] = {}
        for key, value in settings.items():
            *above, name = key.split(".")
            within = nested
            for part in above:
                within = within.setdefault(part, {})
            within[name] = value
        self._run.config.update(nested, allow_val_change=True)

    def log(self, points: Sequence[NewPoint], target: Target) -> None:
        for row in _rows(points):
            self._run.log(row, step=target.rows, commit=True)  # else the last row waits for the next
            target.rows += 1

    def is_safe(self, handed: float) -> bool:
        # Its own process writes its file every 15 seconds, and writes no more when this one is killed.
        try:
            written = os.stat(self._run.settings.sync_file).st_mtime
        except OSError:
            return time.time() > handed + self._SURELY
        return written > handed + self._ON_THE_WAY

    def close(self) -> None:
        self._run.finish()


def _rows(points: Iterable[NewPoint]) -> list[dict[str, float]]:
    """Points of the same step in one row; a curve has one value in each."""
    rows: list[dict[str, float]] = []
    of_step: dict[int, dict[str, float]] = {}
    for point in points:
        key, row = metric_name(point), of_step.get(point.step)
        if row is None or key in row:
            row = of_step[point.step] = {"step": point.step, "_timestamp": point.time}
            rows.append(row)
        row[key] = point.value
    return rows


class MlflowTracker:
    """MLflow, through its client: nothing in this process, nor in the notebook, becomes the active run."""

    memory = False
    _AT_ONCE = 500

    def __init__(self) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()

    def where(self, project: str) -> str:
        return f"{project}@{without_key(self._client.tracking_uri)}"

    def open(self, target: Target, project: str, name: str) -> None:
        uri = without_key(self._client.tracking_uri)
        if target.run_id:
            self._client.update_run(target.run_id, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(project)
            experiment = self._client.create_experiment(project) if found is None else found.experiment_id
            run = self._client.create_run(experiment, run_name=name, tags={"mlflow.source.name": "notebook-cluster"})
            target.run_id = run.info.run_id
            target.address = f"{uri}/#/experiments/{experiment}/runs/{target.run_id}" if uri.startswith("http") else uri
        self._run_id = target.run_id

    def configure(self, settings: Settings, before: Settings) -> None:
        for key, value in settings.items():
            if key not in before:
                self._client.log_param(self._run_id, key, value[:500])
            elif before[key] != value:
                self._client.set_tag(self._run_id, key, value)  # a parameter of MLflow never changes

    def log(self, points: Sequence[NewPoint], target: Target) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(metric_name(one), one.value, int(one.time * 1000), one.step) for one in points]
        for begin in range(0, len(metrics), self._AT_ONCE):
            self._client.log_batch(self._run_id, metrics[begin : begin + self._AT_ONCE])

    def is_safe(self, handed: float) -> bool:
        return True

    def close(self) -> None:
        self._client.set_terminated(self._run_id, "FINISHED", int(time.time() * 1000))


class TensorBoardTracker:
    """Event files in the folder of the run, a folder for each node and for the global model."""

    memory = True

    def __init__(self, folder: Path) -> None:
        self._files = EventFiles(folder / EVENT_FILES)
        self._folder = folder / EVENT_FILES

    def where(self, project: str) -> str:
        return ""

    def open(self, target: Target, project: str, name: str) -> None:
        target.run_id, target.address = name, str(self._folder)
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def configure(self, settings: Settings, before: Settings) -> None:
        """TensorBoard has no place for it that it shows beside scalars."""

    def log(self, points: Sequence[NewPoint], target: Target) -> None:
        for point in points:
            self._files.add(point.place, point.metric, point.step, point.time, point.value)
        self._files.flush()

    def is_safe(self, handed: float) -> bool:
        return True

    def close(self) -> None:
        self._files.close()


def make_tracker(name: str, folder: Path) -> Tracker:
    """Raises TrackerRefused when its library is not installed."""
    try:
        if name == "wandb":
            import wandb  # noqa: F401

            return WandbTracker()
        return MlflowTracker() if name == "mlflow" else TensorBoardTracker(folder)
    except ImportError as error:
        raise TrackerRefused(f"{name} cannot be imported ({one_line(error)}): pip install -U {name}") from None
    except ClusterError as error:
        raise TrackerRefused(str(error)) from None


def metric_name(point: NewPoint) -> str:
    """``model/global model/loss``, ``model run 2/local/loss``, ``nc.report/local/accuracy``."""
    return "/".join((*point.place, point.metric))


def without_key(address: str) -> str:
    """A URL without the name and password that may stand in it."""
    host = urlsplit(address).netloc
    return address.replace(host, host.rpartition("@")[2], 1) if "@" in host else address


_KEY_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")


def one_line(error: BaseException, most: int = 200) -> str:
    """The first line of what a library says, without a password."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "") or type(error).__name__
    text = _KEY_IN_URL.sub("", text)
    return text if len(text) <= most else f"{text[: most - 3]}..."
