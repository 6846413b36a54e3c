"""How the runs of jobs are told apart in pictures: the newest of each job plainly, those before it faint."""

from collections.abc import Sequence

from notebook_cluster.widgets.curves import LossCurve
from notebook_cluster.widgets.formatting import plain
from notebook_cluster.widgets.picture import Line

DASH_NAMES = ("solid", "dashed", "short dashes", "dashes and dots")


def run_label(one: LossCurve) -> str:
    """``desk``, or ``desk, model run 2`` where there is more than one run or job."""
    return plain(f"{one.node}, {one.of_run}" if one.of_run else one.node, 64)


def run_line(one: LossCurve, colour: str) -> Line:
    """Its line, without points."""
    return Line(run_label(one), colour, [], faint=not one.newest, dash=one.dash)


def run_notes(losses: Sequence[LossCurve]) -> list[str]:
    """Lines of a legend: which job has which kind of line, and which runs are faint."""
    plainly = list(dict.fromkeys((one.of_run, one.dash) for one in losses if one.newest and one.of_run))
    earlier = list(dict.fromkeys(one.of_run for one in losses if not one.newest))
    several = len(plainly) > 1
    names = [
        f"{plain(name, 40)} ({DASH_NAMES[dash % len(DASH_NAMES)]})" if several else plain(name, 40)
        for name, dash in plainly
    ]
    notes = [f"Loss: {', '.join(names)}"] if names else []
    notes += [f"Faint: {', '.join(plain(name, 40) for name in earlier)}"] if earlier else []
    return ["; ".join(notes)] if notes else []
