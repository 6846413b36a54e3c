"""What every launcher does, what it is told and what it says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


class LaunchError(Exception):
    """An engine does not do what it is asked for. One line: the engine's own words where it has some, and the way
    out."""


@dataclass(frozen=True, kw_only=True)
class LaunchOrder:
    """What an engine is to start: on each of ``hosts`` hosts one agent, in a place of its own (0, 1, 2 ...).

    ``argv`` is the command without what only the host knows: ``--place N``, ``--start N`` (how often the place was
    started before) and, where its time is limited, ``--until TIME`` are put behind it; ``--place any`` where the engine
    does not number what it starts. The host is given the launch's
    key either by ``--launch-key PATH`` with the path of ``secret``, which it must be able to read, or by
    ``--launch-key -`` with what is in ``secret`` as the first line of standard input, whose end then is a reason to
    leave. The key stands nowhere else: not in argv, environment or a script.
    """

    name: str
    """Of the launch, unique: for what an engine calls a job."""
    where: str
    """What was typed behind the engine's name and a colon."""
    hosts: int
    argv: Sequence[str]
    secret: Path
    """A file of mode 0600 in ``folder``."""
    folder: Path
    """Of this launch alone, mode 0700: for logs."""
    gpus: int = 0
    time: str = ""
    partition: str = ""
    setup: str = ""


@dataclass(frozen=True)
class Launch:
    """What an engine has accepted. ``handle`` is its own word for it: a job's number. Kept over a restart of the
    coordinator, so it must be all that a new launcher needs to find it again."""

    name: str
    handle: str
    hosts: int
    folder: Path


@dataclass(frozen=True)
class HostState:
    """One place of a launch. ``reason``: why it is pending or has ended, in the engine's words; ``expected``: when it
    is going to run, as the engine guesses, or empty. ``failed``: it ended, and nobody had asked for that."""

    condition: Literal["pending", "running", "ended"]
    reason: str = ""
    host: str = ""
    expected: str = ""
    failed: bool = False


@dataclass(frozen=True)
class LaunchState:
    """How a launch stands. A place that is missing has ended."""

    hosts: Mapping[int, HostState] = field(default_factory=dict)
    by_place: bool = True
    """False: the engine gives no places, its agents take free ones (``--place any``), so how many hosts are how is all
    that is known."""


class Launcher(Protocol):
    """One engine, for one cluster. Made without arguments; every call answers within some seconds or raises
    :class:`LaunchError`."""

    period: float
    """Seconds between two looks at a launch."""

    def hosts(self, where: str) -> int:
        """How many hosts ``where`` names; 0: it names none, and a number is asked for.

        Raises:
            LaunchError: it names none, and has to.
        """
        ...

    async def start(self, order: LaunchOrder) -> Launch:
        """Have the engine accept it; not: wait until anything runs."""
        ...

    async def state(self, launch: Launch) -> LaunchState:
        """How it stands now."""
        ...

    async def stop(self, launch: Launch, places: Sequence[int] = ()) -> None:
        """End it, or only these places of it, also those that do not run yet. ``launch.handle`` is empty where it is
        not known whether the engine has accepted it."""
        ...
