"""Every round of a leg computed again from what the nodes noted, and every step looked for in the rounds."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.churn import decoding
from benchmarks.churn.recording import Contribution, Life, hash_of
from benchmarks.churn.steps import Steps
from benchmarks.churn.training import ELEMENTS

Commit = dict[str, Any]
"""A COMMIT record of the journal, as plain data."""


@dataclass
class Findings:
    """What is wrong with a leg, and how much of it was looked at."""

    rounds: int = 0
    checked_rounds: int = 0
    wrong_means: int = 0
    """Rounds whose mean, weights or state are not those of the bytes that were on the wire."""
    wrong_contributions: int = 0
    """Contributions whose bytes are not the work of their node."""
    lost_steps: int = 0
    doubled_steps: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, other: "Findings") -> None:
        """Those of another leg."""
        for name in ("rounds", "checked_rounds", "wrong_means", "wrong_contributions", "lost_steps", "doubled_steps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes += other.notes


class Checker:
    """One leg. ``records``: of the journal, about this job, oldest first; ``lives``: what its processes noted;
    ``ended``: process ids that were ended on purpose."""

    def __init__(
        self, codec: str, number: int, first: Any, records: list[Commit], lives: list[Life], ended: set[int]
    ) -> None:
        self.codec, self.records, self.lives = codec, records, lives
        self.by_name = {(life.node, life.incarnation): life for life in lives}
        self.states: dict[int, tuple[Any, Any, str]] = {}
        """Round -> (theta, momentum, hash) after it."""
        momentum = decoding.first_momentum(codec, first)
        self.states[0] = first, momentum, decoding.digest(first, momentum)
        self.round = 0
        self.seen: Counter[tuple[str, int, int]] = Counter()
        self.steps = Steps(number, ended)
        self.feedback: dict[tuple[str, int], Any] = {}
        self.found = Findings()

    def check(self) -> Findings:
        """All of it."""
        known = True
        for record in self.records:
            if record["kind"] == "commit":
                self.found.rounds += 1
                known = known and self._commit(record)
            elif record["kind"] in ("void", "base") and record["round"] + (record["kind"] == "base") <= self.round:
                known = False
                self._wrong(f"the journal goes back: {record['kind']} {record['round']}")
        if known:
            self._models()
            self.steps.settle(self.lives, self.found)
        return self.found

    def _wrong(self, text: str) -> None:
        self.found.wrong_means += 1
        self.found.notes.append(text)

    # ---- a round ---------------------------------------------------------------------------------------------

    def _commit(self, record: Commit) -> bool:
        """Check one round; whether the state after it is known."""
        commit, (theta, momentum, before) = record["commit"], self.states[self.round]
        number = commit["round"]
        trouble: list[str] = []
        if number != self.round + 1 or record["base_hash"] != before:
            self._wrong(f"round {number} follows on round {self.round}, {before}, as {record['base_hash']}")
            return False
        members = [member for member in record["members"] if member["weight_bits"]]
        counted = [self._contribution(member, number, trouble) for member in members]
        if [member["name"] for member in members] != commit["members"]:
            trouble.append(f"members {commit['members']}")
        if None in counted:
            self._wrong(f"round {number}: {trouble}")
            return False
        work = [contribution for contribution in counted if contribution is not None]
        weights = self._weights(members, work, trouble)
        towards, sent = decoding.mean(self.codec, [one.encoded for one in work], weights, ELEMENTS)
        self._on_the_wire(record, members, work, sent, trouble)
        if [decoding.hash_bytes(sent)] != record["slice_hashes"]:
            trouble.append("the mean is another one")
            towards = self._mean_that_was_sent(record, len(work), towards)
        self._outer(record, len(work), trouble)
        theta, momentum = decoding.outer_step(self.codec, theta, momentum, towards, len(work))
        own = decoding.digest(theta, momentum)
        if own != commit["state_hash"]:
            trouble.append(f"the state is {own}, in the journal {commit['state_hash']}")
        if trouble:
            self._wrong(f"round {number}: {'; '.join(trouble)}")
        self.round, self.states[number] = number, (theta, momentum, own)
        self.found.checked_rounds += 1
        return own == commit["state_hash"]

    def _contribution(self, member: dict[str, Any], number: int, trouble: list[str]) -> Contribution | None:
        """What the member has brought, and its steps."""
        key = member["name"], member["incarnation"], member["contribution"]
        life = self.by_name.get(key[:2])
        mine = life.contributions.get(key[2]) if life is not None else None
        if life is None or mine is None:
            trouble.append(f"nobody noted {key}")
            return None
        if mine.base in self.states:
            work = self.states[mine.base][0] - mine.local
            self.steps.count(life, mine, work, self.found)
            self._fits(key, mine, work)
        else:
            trouble.append(f"{key} is based on round {mine.base}")
        self.seen[key] += 1
        if self.seen[key] > 1:
            self.found.notes.append(f"round {number} counts {key} again")
        return mine

    def _fits(self, key: tuple[str, int, int], mine: Contribution, work: Any) -> None:
        """The bytes are the work since the last counted round, and what earlier bytes did not say."""
        left = self.feedback.get(key[:2])
        if self.seen[key]:
            return
        life = self.by_name[key[:2]]
        refused = [done for done in life.refused if done < mine.done]
        if left is not None and (not refused or refused[-1] <= left[1]):
            beta = decoding.BETA if self.codec == "sparse" else np.float32(1)
            work = work + left[0] * beta
        if not decoding.fits(self.codec, mine.encoded, work):
            self.found.wrong_contributions += 1
            self.found.notes.append(f"the bytes of {key} are not its work")
        if self.codec != "float32":
            self.feedback[key[:2]] = work - decoding.decoded(self.codec, mine.encoded, ELEMENTS), mine.done

    def _weights(self, members: list[dict[str, Any]], work: list[Contribution], trouble: list[str]) -> list[Any]:
        """Shares of the samples, which the journal must say to the bit."""
        total = sum(one.samples for one in work)
        weights = [np.float32(one.samples / total) for one in work]
        noted = [np.array([member["weight_bits"]], np.uint32).view(np.float32)[0] for member in members]
        if weights != noted:
            trouble.append(f"weights {noted} instead of {weights}")
        return weights

    def _outer(self, record: Commit, members: int, trouble: list[str]) -> None:
        bits = [int(rate.view(np.uint32)) for rate in decoding.outer_rates(self.codec, members)]
        if [record["outer"]["lr_bits"], record["outer"]["momentum_bits"]] != bits:
            trouble.append(f"outer settings {record['outer']}")

    # ---- the wire --------------------------------------------------------------------------------------------

    def _on_the_wire(
        self, record: Commit, members: list[dict[str, Any]], work: list[Contribution], sent: bytes, trouble: list[str]
    ) -> None:
        """What went from node to node in this attempt is what was handed over, and what follows from it."""
        (piece,) = record["slices"]
        for member, mine in zip(members, work, strict=True):
            life = self.by_name[member["name"], member["incarnation"]]
            if member["name"] == piece["owner"]:
                continue
            if not covers(self._pieces(life, record, "contribution", piece["owner"]), mine.encoded):
                trouble.append(f"{member['name']} sent other bytes than it had")
        for life in self.lives:
            for one in self._pieces(life, record, "mean"):
                if one.data != sent[one.offset : one.offset + len(one.data)]:
                    trouble.append(f"{life.node} sent {one.to} another mean")
                    break

    def _pieces(self, life: Life, record: Commit, part: str, to: str = "") -> list[Any]:
        place = record["commit"]["round"], record["commit"]["attempt"]
        return [row for row in life.sent_in.get((part, *place), []) if not to or row.to == to]

    def _mean_that_was_sent(self, record: Commit, members: int, otherwise: Any) -> Any:
        """The mean whose hash the journal has, so that the rounds that follow can be checked too."""
        for life in self.lives:
            for one in self._pieces(life, record, "mean"):
                if decoding.hash_bytes(one.data) == record["slice_hashes"][0]:
                    return decoding.mean_of_sent(self.codec, one.data, members, ELEMENTS)
        return otherwise

    # ---- what the nodes hold ---------------------------------------------------------------------------------

    def _models(self) -> None:
        """A node that was in a round holds its state, and at the end that of the last round that it knows of: who was
        out of reach when the others ended brings its work alone."""
        for life in self.lives:
            rows = [row for row in life.received if row["counted"]]
            if life.ends is not None:
                rows.append({**life.ends, "hash": self.states[life.ends["round"]][2]})
            for row in rows:
                theta, _, digest = self.states[row["round"]]
                if row["hash"] != digest or row["model"] != hash_of(theta):
                    self._wrong(f"{life.node} holds another state after round {row['round']}")


def covers(pieces: list[Any], whole: bytes) -> bool:
    """All of ``whole`` was sent in ``pieces``, and nothing else in its place."""
    reached = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.total != len(whole) or piece.data != whole[piece.offset : piece.offset + len(piece.data)]:
            return False
        if piece.offset <= reached:
            reached = max(reached, piece.offset + len(piece.data))
    return reached == len(whole)
