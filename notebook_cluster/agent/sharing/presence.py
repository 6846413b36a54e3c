"""Whether somebody uses this machine, its battery, and whether it was asleep.

What the limits ``idle_only`` and ``on_power`` look at, and what coordinators are told after sleep.
"""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from notebook_cluster.protocol.awake import clock_through_sleep

IDLE_AFTER_S = 300.0
"""Without input for this long, a machine is idle."""
BUSY_LOAD = 0.25
"""Share of all processors that programs other than the agent's take while somebody uses the machine."""
_LOAD_OVER_S = 30.0
"""Time over which the load is averaged: a short job in the background is nobody at the keyboard."""
_TOOL_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Battery:
    """``percent`` 0 to 100; ``plugged``: on mains."""

    percent: float
    plugged: bool


class Sensors:
    """What this machine can tell. Calls may block for some milliseconds; a machine that lacks something says so with
    None or infinity, never with an error."""

    def battery(self) -> Battery | None:
        """The battery, or None without one."""
        try:
            found = psutil.sensors_battery()
        except (AttributeError, OSError, RuntimeError, ValueError):
            # Systems without the call, and kernels whose power supply files are broken.
            return None
        if found is None:
            return None
        # Not known whether it is plugged (None): then it does not discharge, as far as one can tell.
        return Battery(float(found.percent), found.power_plugged is not False)

    def idle_seconds(self) -> float:
        """Since the last key or pointer at this machine, or in a terminal of whoever is logged in; infinity when
        there is nobody."""
        if sys.platform == "darwin":
            return mac_idle_seconds(_run("ioreg", "-c", "IOHIDSystem", "-d", "4"))
        return min(terminals_idle_seconds(_terminals(), time.time()), _desktop_idle_seconds())

    def busy_seconds(self) -> tuple[float, float]:
        """(all processors together, this process and what it started): seconds of work so far."""
        times = psutil.cpu_times()
        waiting = times.idle + getattr(times, "iowait", 0.0)
        guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        own = 0.0
        for process in _own_processes():
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                own += used.user + used.system
        # Linux counts the time of guests in user as well.
        return sum(times) - waiting - guest, own


class Presence:
    """Is somebody here? Call :meth:`poll` every few seconds, in a worker thread.

    Attributes:
        idle: seconds since somebody used this machine, as far as was seen by the last poll; infinity for never.
        battery: at the last poll.
    """

    def __init__(self, sensors: Sensors) -> None:
        self._sensors = sensors
        self._processors = os.cpu_count() or 1
        self._work: tuple[float, float, float] | None = None
        self._load = 0.0
        self._busy_at = -math.inf
        self.idle = math.inf
        self.battery: Battery | None = None

    def poll(self) -> None:
        """Ask the sensors."""
        now = time.monotonic()
        self.battery = self._sensors.battery()
        self._measure(now)
        self.idle = min(max(0.0, self._sensors.idle_seconds()), now - self._busy_at)

    def _measure(self, now: float) -> None:
        total, own = self._sensors.busy_seconds()
        if self._work is not None and now > self._work[0]:
            passed = now - self._work[0]
            # What kernels that ended meanwhile had used is gone from the second number: never below zero.
            others = max(0.0, (total - self._work[1]) - max(0.0, own - self._work[2]))
            weight = 1 - math.exp(-passed / _LOAD_OVER_S)
            self._load += weight * (others / passed / self._processors - self._load)
        self._work = (now, total, own)
        if self._load > BUSY_LOAD:
            self._busy_at = now


def terminals_idle_seconds(terminals: Iterable[Path], now: float) -> float:
    """Seconds since somebody typed in one of ``terminals``: Linux keeps that as the time of the last access."""
    idle = math.inf
    for path in terminals:
        with contextlib.suppress(OSError):
            idle = min(idle, max(0.0, now - path.stat().st_atime))
    return idle


def sessions_idle_seconds(text: str, now: float) -> float:
    """Seconds since a graphical session was used, from what ``loginctl show-session`` prints (blocks of
    ``Name=value``); infinity when there is none. ``now``: the monotonic clock."""
    idle = math.inf
    for block in text.split("\n\n"):
        session = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if session.get("Type") not in ("x11", "wayland", "mir") or session.get("State") == "closing":
            continue
        if session.get("IdleHint") != "yes":
            return 0.0
        with contextlib.suppress(ValueError, KeyError):
            idle = min(idle, max(0.0, now - int(session["IdleSinceHintMonotonic"]) / 1e6))
    return idle


def mac_idle_seconds(text: str) -> float:
    """Seconds since the last input, from what ``ioreg -c IOHIDSystem`` prints; infinity when it says nothing."""
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.strip(' |"') == "HIDIdleTime":
            with contextlib.suppress(ValueError):
                return int(value) / 1e9
    return math.inf


def _terminals() -> Iterator[Path]:
    with contextlib.suppress(OSError, RuntimeError):
        for user in psutil.users():
            if user.terminal and not user.terminal.startswith(":"):
                yield Path("/dev") / user.terminal


def _desktop_idle_seconds() -> float:
    sessions = [
        line.split()[0] for line in _run("loginctl", "list-sessions", "--no-legend").splitlines() if line.split()
    ]
    if not sessions:
        return math.inf
    wanted = "Type,State,IdleHint,IdleSinceHintMonotonic"
    text = _run("loginctl", "show-session", *sessions, *(f"--property={name}" for name in wanted.split(",")))
    return sessions_idle_seconds(text, time.clock_gettime(time.CLOCK_MONOTONIC))


def _own_processes() -> list[psutil.Process]:
    here = psutil.Process()
    try:
        return [here, *here.children(recursive=True)]
    except psutil.Error:
        return [here]


def _run(tool: str, *arguments: str) -> str:
    """What ``tool`` prints; empty when it is not there, fails or hangs."""
    path = shutil.which(tool)
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TOOL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace")


SLEPT_S = 3.0
"""A shorter gap is none: clocks are not read at the same moment."""


class SleepWatch:
    """Compares a clock that goes on during sleep with one that stands still.

    Linux and macOS have such a pair, which setting the time of day leaves alone. Elsewhere it is the wall clock
    against the monotonic one, and a wall clock that somebody sets forward looks like sleep.

    Args:
        through: seconds of a clock that goes on during sleep.
        awake: seconds of one that does not.
    """

    def __init__(self, through: Callable[[], float] | None = None, awake: Callable[[], float] | None = None) -> None:
        self._through = through or clock_through_sleep
        self._awake = awake or time.monotonic
        self._offset = self._difference()

    def check(self) -> float:
        """Seconds of sleep since the last call; 0.0 for none."""
        offset = self._difference()
        slept, self._offset = offset - self._offset, offset
        return slept if slept > SLEPT_S else 0.0

    def _difference(self) -> float:
        return self._through() - self._awake()
