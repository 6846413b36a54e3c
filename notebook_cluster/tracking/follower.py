"""Follows the journal of a run and logs what is new, until the run is over or somebody says stop."""

import contextlib
import copy
import logging
import threading
import time
from collections import deque
from pathlib import Path

from notebook_cluster.client.settings import cluster_settings, job_settings
from notebook_cluster.journal.curves import LastView, read_series, read_view
from notebook_cluster.journal.kept_runs import RUNS, is_locked, kept_runs
from notebook_cluster.journal.store import curves_path
from notebook_cluster.protocol.state import ClusterView
from notebook_cluster.security import runtime_directory
from notebook_cluster.tracking.points import new_points, note_logged
from notebook_cluster.tracking.remembered import (
    TITLES,
    Condition,
    Remembered,
    Target,
    read_remembered,
    write_remembered,
)
from notebook_cluster.tracking.trackers import Settings, Tracker, TrackerRefused, make_tracker, one_line

log = logging.getLogger(__name__)

PERIOD, LONGEST_PERIOD = 1.0, 10.0
"""Seconds between two looks at the journal: a twentieth of the time is spent on looking, where that is long."""
RETRY, LONGEST_RETRY = 2.0, 60.0
"""Seconds after a failure, doubled with each that follows."""
ANEW = 5
"""Failures after which the connection is made anew."""
LAST_TRIES = 3
"""After the run is over, or where it is not found."""
WITHOUT_COORDINATOR = 600.0
"""Seconds in which a coordinator that was killed may come back."""
AT_ONCE = 1000


class Follower:
    """Logs the run of cluster ``cluster`` that was started at ``started`` (Unix time) and lies in ``folder``."""

    def __init__(self, folder: Path, cluster: str, started: float, tracker: str, project: str) -> None:
        self._folder, self._cluster, self._started = folder, cluster, started
        self._name, self._project = tracker, project
        self._remembered = read_remembered(folder, tracker) or Remembered()
        self._tracker: Tracker | None = None
        self._view: ClusterView | None = None
        self._alone_since: float | None = None
        self._known: tuple[object, ...] = ()
        self._live = Target()
        """With all that was handed over; what is remembered is behind it where that is not safe yet."""
        self._handed: deque[tuple[float, Target]] = deque()
        self._missing = 0
        self._looked_for = 0.0
        self.stopping = threading.Event()

    def run(self, pid: int) -> int:
        """Returns 0 when everything was logged, 1 when not: the condition that is remembered says why."""
        self._remembered.pid, self._remembered.project = pid, self._project
        self._say("connecting")
        failures = 0
        while True:
            last = self.stopping.is_set()
            over = self._is_over() or last
            try:
                self._log_what_is_new()
                failures = 0
            except TrackerRefused as error:
                return self._failed(str(error))
            except Exception as error:
                failures += 1
                log.exception("attempt %d failed", failures)
                if last or (over and failures >= LAST_TRIES):
                    return self._failed(
                        f"{self._title} did not take all: {one_line(error)}; track again to log the rest"
                    )
                if failures % ANEW == 0:
                    self._connect_anew()
                self._say("retrying", f"{self._title} does not answer: {one_line(error)}; tried again until it does")
            if over and not failures:
                return self._finish()
            wait = min(max(PERIOD, 20 * self._looked_for), LONGEST_PERIOD)
            self.stopping.wait(min(RETRY * 2 ** (failures - 1), LONGEST_RETRY) if failures else wait)

    @property
    def _title(self) -> str:
        return TITLES[self._name]

    def _log_what_is_new(self) -> None:
        tracker = self._tracker or self._connect()
        self._settle(tracker)
        began = time.thread_time()
        pieces = read_series(curves_path(self._folder))
        points = new_points(pieces, self._live, self._remembered.places, memory=tracker.memory)
        self._looked_for = time.thread_time() - began
        self._configure(tracker)
        for begin in range(0, len(points), AT_ONCE):
            logged = points[begin : begin + AT_ONCE]
            tracker.log(logged, self._live)
            note_logged(self._live, logged)
            self._handed.append((time.time(), copy.deepcopy(self._live)))
            self._settle(tracker)
        self._say("logging")

    def _connect_anew(self) -> None:
        """At the next try; what is not safe is logged again then."""
        tracker, self._tracker = self._tracker, None
        self._known = ()
        with contextlib.suppress(Exception):
            if tracker is not None:
                tracker.close()

    def _settle(self, tracker: Tracker) -> None:
        """Remember what is safe."""
        before = len(self._handed)
        while self._handed and tracker.is_safe(self._handed[0][0]):
            _, self._remembered.targets[self._remembered.target] = self._handed.popleft()
        waiting = self._live.points - self._remembered.current.points
        if len(self._handed) != before or waiting != self._remembered.waiting:
            self._remembered.waiting = waiting
            self._keep()

    def _connect(self) -> Tracker:
        tracker = make_tracker(self._name, self._folder)
        self._remembered.target = tracker.where(self._project)
        target = self._remembered.current
        start = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._started))
        tracker.open(target, self._project, f"{self._cluster} {start}")
        self._tracker, self._live = tracker, copy.deepcopy(target)
        self._handed.clear()
        self._keep()
        return tracker

    def _configure(self, tracker: Tracker) -> None:
        """Once more when a job, a run of one, or a node is new."""
        if self._view is None:
            return
        target, places = self._live, self._remembered.places
        known = tuple(node.name for node in self._view.nodes), {job: len(runs) for job, runs in places.items()}
        if known == self._known:
            return
        settings: Settings = cluster_settings(self._view)
        for job, told in job_settings(self._folder).items():
            settings |= {f"{job}.{name}": value for name, value in told.items()}
        changed = {key: value for key, value in settings.items() if target.settings.get(key) != value}
        tracker.configure(changed, target.settings)
        target.settings |= changed
        self._known = known

    # ---- the run

    def _is_over(self) -> bool:
        """True when nothing more comes. Looks where the run lies now: it moves when the next one begins."""
        last = self._read_view()
        if last is None:
            self._missing += 1  # while it is moved it is nowhere for a moment
            return self._missing >= LAST_TRIES
        self._missing = 0
        self._view = last.state
        if self._folder.parent.name == RUNS:
            return True
        if is_locked(self._folder):
            self._alone_since = None
            return False
        if last.ended:
            return True
        self._alone_since = self._alone_since or time.monotonic()
        return time.monotonic() - self._alone_since > WITHOUT_COORDINATOR

    def _read_view(self) -> LastView | None:
        """None when the run is gone from this machine."""
        found = read_view(curves_path(self._folder))
        if found is not None and found.state.started == self._started:
            return found
        for kept in kept_runs(runtime_directory() / "clusters"):
            if kept.cluster == self._cluster and kept.view.started == self._started:
                self._folder = kept.folder
                return read_view(curves_path(kept.folder))
        return None

    # ---- what is told

    def _finish(self) -> int:
        try:
            if self._tracker is not None:
                self._tracker.close()
                self._remembered.targets[self._remembered.target] = self._live
                self._remembered.waiting = 0
        except Exception as error:
            log.exception("the run could not be closed")
            return self._failed(f"{self._title} did not take the end of the run: {one_line(error)}")
        self._say("ended")
        return 0

    def _failed(self, text: str) -> int:
        self._say("failed", text)
        return 1

    def _say(self, condition: Condition, text: str = "") -> None:
        if (self._remembered.condition, self._remembered.text) != (condition, text) or condition == "connecting":
            self._remembered.condition, self._remembered.text = condition, text
            self._keep()

    def _keep(self) -> None:
        try:
            write_remembered(self._folder, self._name, self._remembered)
        except OSError as error:  # what was logged is known in memory; only a kill would make it twice
            log.warning("what was logged could not be remembered: %s", error)
