"""Named points of a round at which a process of a real cluster ends itself with SIGKILL.

:mod:`tests.fault_nodes` and :mod:`tests.fault_coordinator` put them into a kernel and into the coordinator;
:mod:`tests.fault_cluster` plays the cases. A process that is to die stands still at its point until all that it has
sent has been noted by those who got it: no outcome depends on how fast a message leaves a process that ends.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

PATIENCE = 45.0
"""Seconds after which a process dies at its point even though nobody noted what it sent; the case fails then."""

Condition = Callable[..., Any]
_undo: list[Callable[[], None]] = []


# ---- calling in between --------------------------------------------------------------------------------------


def around(owner: Any, name: str, before: Condition | None = None, after: Condition | None = None) -> None:
    """Call ``before`` and ``after`` with the arguments of ``owner.name``, whenever that is called."""
    original, own = getattr(owner, name), name in vars(owner)

    def wrapper(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments)
        result = original(*arguments, **options)
        if after is not None:
            after(*arguments)
        return result

    setattr(owner, name, wrapper)
    _undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))


def stop_watching() -> None:
    """Everything is called as before :func:`watch`."""
    while _undo:
        _undo.pop()()


def at_the_end(undo: Callable[[], None]) -> None:
    """Call this too when :func:`stop_watching` is called."""
    _undo.append(undo)


def die(folder: Path, until: Callable[[], bool] | None = None, last: Callable[[], None] = lambda: None) -> None:
    """Stand still ``until`` that is true, do one ``last`` thing, then end this process."""
    deadline = time.monotonic() + PATIENCE
    while until is not None and not until() and time.monotonic() < deadline:
        time.sleep(0.005)
    if until is not None and not until():
        (folder / "unnoticed").touch()
    last()
    with open(folder / "killed", "a") as file:
        file.write(f"{os.getpid()}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def is_message(kind: type, job: str, number: int, message: Any) -> bool:
    """``message`` is one of ``kind`` about that round; a request to save names no round."""
    same = isinstance(message, kind) and message.job == job
    return same and getattr(message, "round", number) == number


class Order(msgspec.Struct):
    """Where the coordinator is to die, and those that are started after it; the file that says so is gone with the last
    of these points."""

    points: list[str]
    folder: str
    job: str
    number: int = 2


# ---- which process can die where -----------------------------------------------------------------------------

NO_NUMBERS = "it never has the numbers, only what nodes say of them"
NO_LOG = "nodes decide nothing and keep no log"
NOT_ADDED = "it adds nothing up: another node owns the slice"
NO_ANSWER = "only a coordinator asks nodes where they are"
KEPT = "the owner of a slice keeps its own work for it"

ABSENT: dict[str, dict[str, str]] = {
    "work not encoded": {"coordinator": NO_NUMBERS},
    "work encoded": {"coordinator": NO_NUMBERS},
    "ARRIVED sent": {"coordinator": "it says no ARRIVED"},
    "ARRIVED received": {"owner": "nobody says ARRIVED to a node", "member": "nobody says ARRIVED to a node"},
    "SEAL not logged": {"owner": NO_LOG, "member": NO_LOG},
    "SEAL logged": {"owner": NO_LOG, "member": NO_LOG},
    "SEAL sent to one": {"owner": NO_LOG, "member": NO_LOG},
    "SEAL sent to all": {"owner": NO_LOG, "member": NO_LOG},
    "SEAL received": {"coordinator": "it sends the SEAL"},
    "first chunk sent": {"owner": KEPT, "coordinator": NO_NUMBERS},
    "half of the chunks sent": {"owner": KEPT, "coordinator": NO_NUMBERS},
    "all chunks sent": {"owner": KEPT, "coordinator": NO_NUMBERS},
    "slice added up": {"member": NOT_ADDED, "coordinator": NO_NUMBERS},
    "first chunk of the mean sent": {"member": NOT_ADDED, "coordinator": NO_NUMBERS},
    "half of the mean sent": {"member": NOT_ADDED, "coordinator": NO_NUMBERS},
    "whole mean sent": {"member": NOT_ADDED, "coordinator": NO_NUMBERS},
    "all means here": {"coordinator": NO_NUMBERS},
    "PREPARED not sent": {"coordinator": "it says no PREPARED"},
    "PREPARED sent": {"coordinator": "it says no PREPARED"},
    "PREPARED of one noted": {"owner": NO_LOG, "member": NO_LOG},
    "COMMIT not logged": {"owner": NO_LOG, "member": NO_LOG},
    "COMMIT logged": {"owner": NO_LOG, "member": NO_LOG},
    "COMMIT sent to one": {"owner": NO_LOG, "member": NO_LOG},
    "COMMIT sent to all": {"owner": NO_LOG, "member": NO_LOG},
    "answer of one received after a restart": {"owner": NO_ANSWER, "member": NO_ANSWER},
    "COMMIT received": {"coordinator": "it sends the COMMIT"},
    "applying": {"coordinator": NO_NUMBERS},
    "applied": {"coordinator": NO_NUMBERS},
    "APPLIED not sent": {"coordinator": "it says no APPLIED"},
    "APPLIED received": {"owner": "nobody says APPLIED to a node", "member": "nobody says APPLIED to a node"},
    "checkpoint asked for": {"owner": "nobody asks a node", "member": "nobody asks a node"},
    "SAVE sent to all": {"owner": NO_LOG, "member": NO_LOG},
    "part of a checkpoint not sent": {"coordinator": "it has no part of a checkpoint"},
    "checkpoint half written": {"member": "one node writes it: the first", "coordinator": "a node writes it"},
    "SAVED received": {"owner": "it is what others wait for then", "member": "it is what others wait for then"},
    "SAVED sent to one": {"owner": NO_LOG, "member": NO_LOG},
}
"""Every named point in the order of a round, and why it does not exist for a role."""
SAVING = ("checkpoint", "part of a checkpoint", "SAVE")
"""How the points begin that only a cell reaches that saves a checkpoint."""


def points_of(role: str) -> list[str]:
    """Where a process with this role can die."""
    return [point for point, absent in ABSENT.items() if role not in absent]
