"""The records of training rounds that a restarted coordinator needs, out of a log that may have hundreds of thousands.

A run writes a SEAL and a COMMIT for each round, and nearly all of them are superseded by those after them. What the
round machine (:mod:`notebook_cluster.rounds.leader.recovery`) makes of the kept ones is what it would make of all.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from notebook_cluster.rounds.leader.commit import KEPT_HASHES

_COMMITS = 2 * KEPT_HASHES
"""Of each job: also when some were taken back, as many hashes are known as the round machine looks at."""


class _Key(msgspec.Struct):
    kind: str
    job: str


class _SealKey(msgspec.Struct):
    attempt: int


class _SealRecord(msgspec.Struct):
    seal: _SealKey


class _Record(msgspec.Struct):
    place: int
    raw: bytes


class _Job:
    """Of one job: its last commits, the last one that counted each process, and two of its seals."""

    def __init__(self) -> None:
        self.commits: deque[_Record] = deque()
        self.counted: dict[tuple[str, int], _Record] = {}
        self.last_seal: _Record | None = None
        self.highest_seal: _Record | None = None
        self.highest_attempt = -1

    def seal(self, record: _Record) -> None:
        attempt = _seal_decoder.decode(record.raw).seal.attempt
        self.last_seal = record
        if attempt > self.highest_attempt:  # attempts are never used twice
            self.highest_attempt, self.highest_seal = attempt, record

    def commit(self, record: _Record, said: dict[str, Any]) -> None:
        self.commits.append(record)
        if len(self.commits) > _COMMITS:
            self.commits.popleft()
        incarnations = {member["name"]: member["incarnation"] for member in said["members"]}
        for name in said["commit"]["members"]:
            self.counted[name, incarnations[name]] = record

    def kept(self) -> list[_Record]:
        seals = [record for record in (self.last_seal, self.highest_seal) if record is not None]
        return [*self.commits, *self.counted.values(), *seals]


_key_decoder = msgspec.json.Decoder(_Key)
_seal_decoder = msgspec.json.Decoder(_SealRecord)


class KeptRounds:
    """:meth:`add` the records of a log in order; :meth:`records` are those that still matter. ``on_round`` gets every
    commit and void."""

    def __init__(self, on_round: Callable[[dict[str, Any]], None]) -> None:
        self._on_round = on_round
        self._jobs: dict[str, _Job] = {}
        self._others: list[_Record] = []
        self._place = 0

    def add(self, raw: msgspec.Raw) -> None:
        """Raises ValueError, KeyError or TypeError for what is no record."""
        self._place += 1
        key, record = _key_decoder.decode(raw), _Record(self._place, bytes(raw))
        if key.kind == "seal":
            self._job(key.job).seal(record)
        elif key.kind == "commit":
            said = msgspec.json.decode(record.raw)
            self._job(key.job).commit(record, said)
            self._on_round(said)
        else:
            self._others.append(record)
            if key.kind == "void":
                self._on_round(msgspec.json.decode(record.raw))

    def _job(self, name: str) -> _Job:
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = _Job()
        return job

    def records(self) -> list[dict[str, Any]]:
        """In the order of the log."""
        kept = {record.place: record for record in self._others}
        for job in self._jobs.values():
            kept.update({record.place: record for record in job.kept()})
        return [msgspec.json.decode(kept[place].raw) for place in sorted(kept)]
