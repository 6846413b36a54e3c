"""Runs of a training job: each sync object that is made under a name begins one, also when the state goes on.

A run is numbered by the cell in which its sync object was made, and by how many of that name the cell had made before.
So all nodes count alike, whoever joins or is restarted, and a larger number was begun later.
"""

from collections.abc import Iterable

IN_A_CELL = 1000
"""Runs of one job that one cell can tell apart; what comes after them is one."""

KEPT_RUNS = 8
"""Of each job, the newest: the curves of those before are dropped."""


def run_number(cell: int, before: int) -> int:
    """Of the sync object that cell ``cell`` makes after ``before`` others of the same name."""
    return cell * IN_A_CELL + min(before, IN_A_CELL - 2) + 1


def places(runs: Iterable[int]) -> dict[int, int]:
    """Run -> 1, 2, 3 ... in the order in which they were begun."""
    return {run: place for place, run in enumerate(sorted(set(runs)), 1)}


def forgotten(keys: Iterable[tuple[str, str, int, str]]) -> list[tuple[str, str, int, str]]:
    """Of curves (node, job, run, name) those whose run is not one of its job's newest."""
    found, runs = list(keys), dict[str, set[int]]()
    for _, job, run, _ in found:
        runs.setdefault(job, set()).add(run)
    kept = {job: set(sorted(numbers)[-KEPT_RUNS:]) for job, numbers in runs.items()}
    return [key for key in found if key[2] not in kept[key[1]]]
