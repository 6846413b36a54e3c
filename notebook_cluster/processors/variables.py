"""The environment variables by which libraries learn how many threads to take."""

from collections.abc import Mapping

OURS = "NOTEBOOK_CLUSTER_THREADS"
"""``2:OMP_NUM_THREADS,MKL_NUM_THREADS``: what was set by an agent, and to what. A program that a node starts has it
too, so that another agent below it does not take these for the user's."""
_ALL = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Either of them, set by the user, is meant for everything: torch follows both, OpenBLAS the first."""
_OTHERS = ("OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def thread_variables(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """What to put on top of ``environment`` for ``threads`` threads; what the user has set in it stays.

    Empty when the user has set OMP_NUM_THREADS or MKL_NUM_THREADS.
    """
    ours = variables_of_ours(environment)
    if any(name in environment and name not in ours for name in _ALL):
        return {}
    names = [name for name in (*_ALL, *_OTHERS) if name not in environment or name in ours]
    return dict.fromkeys(names, str(threads)) | {OURS: f"{threads}:{','.join(names)}"}


def variables_of_ours(environment: Mapping[str, str]) -> list[str]:
    """The variables in ``environment`` that an agent has set and nobody has changed since."""
    threads, _, names = environment.get(OURS, "").partition(":")
    ours = [name for name in names.split(",") if name in (*_ALL, *_OTHERS) and environment.get(name) == threads]
    # Whoever has set one of these for everything has set it for the others as well.
    changed = any(name in names.split(",") and name not in ours for name in _ALL)
    return [] if changed else ours
