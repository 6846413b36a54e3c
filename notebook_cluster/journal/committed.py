"""The committed rounds of a run, as a report and the panels show them: all of a short run, of a long one the longest
waits."""

from notebook_cluster.journal.records import CommitRecord, Record, VoidRecord
from notebook_cluster.protocol.state import RoundView, RoundWait

MAX_ROUNDS = 2000
SHOWN_WAITS = 8
"""Rounds of each job that panels show."""


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
        """At most MAX_ROUNDS, oldest first; of two neighbours that are long past the one with the longer wait."""
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

    def waits(self, job: str) -> list[RoundWait]:
        """The last rounds of ``job`` for panels: for whom was waited, and how long at most."""
        found = []
        for kept in reversed(self._kept):
            view = kept[1]
            if view.job == job and len(view.waits) > 1:
                node = min(view.waits, key=view.waits.__getitem__)
                found.append(RoundWait(round=view.round, node=node, seconds=_longest(kept)))
            if len(found) == SHOWN_WAITS:
                break
        return found[::-1]


def _view(record: CommitRecord) -> RoundView:
    commit = record.commit
    return RoundView(
        job=record.job, round=commit.round, time=record.time, members=list(commit.members), waits=record.waits,
        bytes_sent=record.bytes_sent, hash_mismatches=record.hash_mismatches, state_hash=commit.state_hash,
    )  # fmt: skip


def _longest(kept: tuple[int, RoundView]) -> float:
    return max(kept[1].waits.values(), default=0.0)
