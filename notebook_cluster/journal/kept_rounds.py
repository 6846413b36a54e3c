"""Which records of training rounds are kept, out of a journal that may have a million of them.

A run writes a SEAL and a COMMIT for each round, and nearly all of them are superseded by those after them.
:class:`KeptRounds` finds those that a restarted coordinator needs: what the round machine makes of them is what it
would make of all. :class:`Rounds` has what a report and the panels show: all rounds of a short run, the longest waits
of a long one.
"""

from collections import deque
from sys import intern

from notebook_cluster.journal.records import (
    CommitRecord,
    Record,
    SealRecord,
    VoidRecord,
)
from notebook_cluster.protocol.state import RoundView, RoundWait

KEPT_HASHES = 256
"""Committed rounds whose hash is remembered: how far back a node's state is recognised."""
_COMMITS = 2 * KEPT_HASHES
"""Commits of each job: also when some were taken back, as many hashes are known as the round machine looks at."""


class _Job:
    """The rows of one job that matter: its last commits, the last one that counted each process, and two seals."""

    def __init__(self) -> None:
        self.commits: deque[int] = deque()
        self.counted: dict[tuple[str, int], int] = {}
        self.last_seal = self.highest_seal = 0
        self.highest_attempt = -1

    def seal(self, row: int, record: SealRecord) -> None:
        self.last_seal = row
        if record.seal.attempt > self.highest_attempt:  # attempts are never used twice
            self.highest_attempt, self.highest_seal = record.seal.attempt, row

    def commit(self, row: int, record: CommitRecord) -> None:
        self.commits.append(row)
        if len(self.commits) > _COMMITS:
            self.commits.popleft()
        incarnations = {member.name: member.incarnation for member in record.members}
        for name in record.commit.members:
            self.counted[name, incarnations[name]] = row

    def rows(self) -> set[int]:
        return {*self.commits, *self.counted.values(), self.last_seal, self.highest_seal} - {0}


class KeptRounds:
    """:meth:`add` each record with the number of its row, in order; :meth:`rows` are those that still matter."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}
        self._others: list[int] = []

    def add(self, row: int, record: Record) -> None:
        """Raises KeyError when a commit counts somebody who is no member."""
        job = self._jobs.get(record.job)
        if job is None:
            job = self._jobs[record.job] = _Job()
        match record:
            case SealRecord():
                job.seal(row, record)
                return
            case CommitRecord():
                job.commit(row, record)
                return
        self._others.append(row)

    def rows(self) -> list[int]:
        """The rows that matter, in the order of the journal."""
        return sorted({*self._others, *(row for job in self._jobs.values() for row in job.rows())})


MAX_ROUNDS = 2000
SHOWN_WAITS = 40
"""Rounds of the first job, which panels show."""
OTHER_WAITS = 8
"""Of every other job: a search makes hundreds of them, and each state that views get has them all."""


class Rounds:
    """The committed rounds of all jobs, from their records.

    Attributes:
        seen: how many there were.
    """

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen
        self._kept: list[tuple[int, RoundView]] = []

    @property
    def rounds(self) -> list[RoundView]:
        """At most MAX_ROUNDS, oldest first. Of two neighbours long past, the one with the longer wait is kept."""
        return [view for _, view in self._kept]

    def rows(self) -> list[int]:
        """The rows of the journal that :attr:`rounds` are made of."""
        return [row for row, _ in self._kept]

    def replay(self, record: Record, row: int = 0) -> None:
        """Take over a record, which is row number ``row`` of the journal."""
        if isinstance(record, VoidRecord):
            # The job is back at the round before: what was said about this one is no more.
            self._kept = [
                (row, view) for row, view in self._kept if view.job != record.job or view.round < record.round
            ]
        if not isinstance(record, CommitRecord) or not record.time:
            return
        self.seen += 1
        self._kept.append((row, _view(record)))
        if len(self._kept) > MAX_ROUNDS:
            old, new = self._kept[: MAX_ROUNDS // 2], self._kept[MAX_ROUNDS // 2 :]
            self._kept = [max(pair, key=_longest) for pair in zip(old[::2], old[1::2], strict=False)] + new

    def waits(self, job: str, most: int = SHOWN_WAITS) -> list[RoundWait]:
        """The last rounds of ``job``, at most ``most``: for whom was waited, and how long at most."""
        found = []
        for kept in reversed(self._kept):
            view = kept[1]
            if view.job == job and len(view.waits) > 1:
                node = min(view.waits, key=view.waits.__getitem__)
                found.append(RoundWait(round=view.round, node=node, seconds=_longest(kept), time=view.time))
            if len(found) == most:
                break
        return found[::-1]


def _view(record: CommitRecord) -> RoundView:
    commit = record.commit
    # thousands of them name the same few nodes
    members = [intern(name) for name in commit.members]
    waits = {intern(name): seconds for name, seconds in record.waits.items()}
    return RoundView(
        job=intern(record.job), round=commit.round, time=record.time, members=members, waits=waits,
        bytes_sent=record.bytes_sent, hash_mismatches=record.hash_mismatches, state_hash=commit.state_hash,
    )  # fmt: skip


def _longest(kept: tuple[int, RoundView]) -> float:
    return max(kept[1].waits.values(), default=0.0)
