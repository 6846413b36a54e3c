"""The curves of a run in long form, a row for each point, and how they are named outside: in files and for trackers."""

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from notebook_cluster.protocol.runs import IN_A_CELL, places
from notebook_cluster.protocol.state import ClusterView, RoundView, RunHistory, Series

GLOBAL_MODEL = "global model"
REPORTED = "nc.report"
"""Where curves belong to no job: what ``nc.report`` says outside of a block of the global model, and memory."""


class MeasuredRun(Protocol):
    """A run of a cluster, over or not: what is exported, reported and made into frames."""

    def state(self) -> ClusterView: ...

    def series(self) -> list[Series]: ...

    def history(self) -> RunHistory: ...


class CurveRow(NamedTuple):
    """One point.

    Attributes:
        job: name of the training job; empty: of none (memory, and what ``nc.report`` said outside of a block).
        run: 1, 2, 3 ...: the sync objects that were made under this name, in their order; None without a job.
        cell: in which the run was begun; None without a job.
        node: empty: the model that all share.
        metric: ``loss``, ``memory`` (bytes), or a name that was reported.
        step: with a job the node's step in this run, from 1 (of the global model: that of the node that told it
            first); else what ``nc.report(step=)`` said last.
        round: rounds of the job that were complete when it was measured; None: without a job, or not known.
        time: seconds since 1970, this machine's clock.
        value: may be NaN or infinite.
    """

    job: str
    run: int | None
    cell: int | None
    node: str
    metric: str
    step: int
    round: int | None
    time: float
    value: float


def curve_rows(series: Sequence[Series], rounds: Sequence[RoundView]) -> Iterator[CurveRow]:
    """All points of ``series``, curve by curve."""
    numbers = _run_numbers(series)
    begun: dict[tuple[str, int], float] = {}
    for one in series:
        key = one.job, one.run
        begun[key] = min([begun.get(key, one.time[0]), *one.time[:1]]) if one.time else begun.get(key, float("inf"))
    committed = {job: _Committed([one for one in rounds if one.job == job]) for job in numbers}
    for one in series:
        run, cell = (numbers[one.job][one.run], one.run // IN_A_CELL) if one.job else (None, None)
        for step, time, value in zip(one.step, one.time, one.value, strict=True):
            done = committed[one.job].at(time, begun[one.job, one.run]) if one.job else None
            yield CurveRow(one.job, run, cell, one.node, one.name, step, done, time, value)


def _run_numbers(series: Iterable[Series]) -> dict[str, dict[int, int]]:
    runs: dict[str, set[int]] = {}
    for one in series:
        if one.job:
            runs.setdefault(one.job, set()).add(one.run)
    return {job: places(of_job) for job, of_job in runs.items()}


class _Committed:
    """The rounds of one job in order of time."""

    def __init__(self, rounds: Iterable[RoundView]) -> None:
        ordered = sorted(rounds, key=lambda one: one.time)
        self._times, self._rounds = [one.time for one in ordered], [one.round for one in ordered]

    def at(self, time: float, begun: float) -> int | None:
        """How many were complete at ``time`` in a run that begun at ``begun``; None when nobody knows."""
        place = bisect_right(self._times, time)
        if place and self._times[place - 1] >= begun:
            return self._rounds[place - 1]
        # Before the first round of a run: it goes on from the state before, or with fresh=True begins at 0.
        if place < len(self._times):
            return self._rounds[place] - 1
        return None if place else 0


def run_label(job: str, run: int | None) -> str:
    """``model``, ``model run 2``; of no job ``nc.report``."""
    if not job:
        return REPORTED
    return job if run in (None, 1) else f"{job} run {run}"


_UNUSUAL = re.compile(r"[^\w .-]")
_MOST_NAME = 80


def outside_name(text: str) -> str:
    """``text`` as one part of a path or of a tracker's metric; two different texts stay different."""
    cleaned = _UNUSUAL.sub("_", text)[:_MOST_NAME].strip() or "_"
    if cleaned.strip(".") == "":
        cleaned = "_"
    return cleaned if cleaned == text else f"{cleaned}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:6]}"


def spreadsheet_safe(text: str) -> str:
    """``text`` as a cell of a CSV file. What begins like a formula gets an apostrophe before it: names come from other
    machines, and spreadsheets run formulas (OWASP, "CSV Injection")."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def place_of_curve(job: str, run: int | None, node: str) -> tuple[str, str]:
    """Two names below which the curves of a node, or of the global model, lie: ``model run 2``, ``global model``."""
    return outside_name(run_label(job, run)), outside_name(node) if node else GLOBAL_MODEL
