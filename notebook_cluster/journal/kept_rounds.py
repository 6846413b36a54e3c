"""Which records of training rounds a restarted coordinator needs, out of a journal that may have a million.

A run writes a SEAL and a COMMIT for each round, and nearly all of them are superseded by those after them. What the
round machine makes of the kept ones is what it would make of all.
"""

from collections import deque

from notebook_cluster.journal.records import (
    CommitRecord,
    Record,
    SealRecord,
)

KEPT_HASHES = 256
"""Committed rounds whose hash is remembered: how far back a node's state is recognised."""
_COMMITS = 2 * KEPT_HASHES
"""Of each job: also when some were taken back, as many hashes are known as the round machine looks at."""


class _Job:
    """Of one job: the rows of its last commits, of the last one that counted each process, and of two seals."""

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
        """In the order of the journal."""
        return sorted({*self._others, *(row for job in self._jobs.values() for row in job.rows())})
