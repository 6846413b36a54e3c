"""Which steps a contribution holds, read from its numbers, and which steps are in no round, or in two."""

from collections import Counter
from typing import Any

import numpy as np

from benchmarks.churn.recording import Contribution, Life
from benchmarks.churn.training import ELEMENTS, samples_of, step_of

_BEFORE = 30
"""Steps before those that a contribution should hold, which are looked for in it too."""
_ROUNDING = 1e-3


class Steps:
    """Of leg ``number``. ``ended``: process ids that were ended on purpose."""

    def __init__(self, number: int, ended: set[int]) -> None:
        self._number, self._ended = number, ended
        self._times: dict[tuple[str, int], Counter[int]] = {}
        """How often each step of a process is in a committed round."""
        self._last: dict[tuple[str, int], int] = {}
        """The last step that was due in a contribution that a round counted."""

    def count(self, life: Life, mine: Contribution, work: Any, found: Any) -> None:
        """A round counts ``mine``, which is ``work``."""
        key = life.node, life.incarnation
        times, last = self._times.setdefault(key, Counter()), self._last.get(key, 0)
        refused = [done for done in life.refused if done < mine.done]
        due = range(max([last, *refused]) + 1, mine.done + 1)
        if np.abs(work - self._sum(life, due)).max() < _ROUNDING:
            times.update(due)
        else:
            for step, share in self._shares(life, mine, work, due):
                times[step] += round(share)
                if abs(share - round(share)) > 0.1:
                    found.wrong_contributions += 1
                    found.notes.append(f"{key}, contribution {mine.serial}, holds {share:.2f} of step {step}")
        samples = sum(samples_of(life.node, step) for step in due)
        if due and mine.samples != samples:
            found.wrong_contributions += 1
            found.notes.append(f"{key}, contribution {mine.serial}, counts {mine.samples} samples, not {samples}")
        self._last[key] = max(last, mine.done)

    def _sum(self, life: Life, steps: range) -> Any:
        return sum((self._step(life, step) for step in steps), np.zeros(ELEMENTS, np.float32))

    def _step(self, life: Life, step: int) -> Any:
        return step_of(self._number, life.node, life.incarnation, step)

    def _shares(self, life: Life, mine: Contribution, work: Any, due: range) -> list[tuple[int, float]]:
        """How much of each step is in ``work``: steps are drawn, so each is as good as orthogonal to the others."""
        first = max(1, min(due.start, mine.done) - _BEFORE)
        steps = range(first, mine.done + 1)
        columns = np.stack([self._step(life, step) for step in steps], axis=1).astype(np.float64)
        shares = np.linalg.lstsq(columns, work.astype(np.float64), rcond=None)[0]
        return list(zip(steps, map(float, shares), strict=True))

    def settle(self, lives: list[Life], found: Any) -> None:
        """Count what is missing and what is there twice, now that all rounds are known."""
        for life in lives:
            key = life.node, life.incarnation
            times = self._times.get(key, Counter())
            doubled = [step for step, count in times.items() if count > 1]
            lost = [step for step in self._due(life) if times[step] < 1]
            for what, steps in (("doubled", doubled), ("lost", lost)):
                if steps:
                    found.notes.append(f"{key}: {what} steps {steps[:20]}")
            found.doubled_steps += len(doubled)
            found.lost_steps += len(lost)

    def _due(self, life: Life) -> list[int]:
        """Steps that must be in a round: all of a process that got to the end; of one that was ended on purpose those
        up to the last that a round has counted. Not what the cluster refused because it was told to hold NaN."""
        if life.ends is not None:
            last = life.ends["done"]
        elif life.pid in self._ended:
            last = self._last.get((life.node, life.incarnation), 0)
        else:
            last = max([row.done for row in life.contributions.values()], default=0)
        return [step for step in range(1, last + 1) if not self._is_refused(life, step)]

    def _is_refused(self, life: Life, step: int) -> bool:
        """It was in the work that was thrown away with NaN in it."""
        times = self._times.get((life.node, life.incarnation), Counter())
        later = [done for done in life.refused if done >= step]
        if not later or times[step]:
            return False
        end = later[0]
        begin = max([counted for counted, many in times.items() if many and counted < end], default=0)
        return any(begin < bad <= end for bad in life.poisoned) and step > begin
