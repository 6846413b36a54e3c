"""Is somebody at this machine, and how full is its battery: from what systems print, and from this one."""

import math
import os
import time
from pathlib import Path

import pytest

from notebook_cluster.agent.sharing import presence
from notebook_cluster.agent.sharing.presence import (
    Battery,
    Presence,
    Sensors,
    mac_idle_seconds,
    sessions_idle_seconds,
    terminals_idle_seconds,
)

IOREG = """+-o IOHIDSystem  <class IOHIDSystem, id 0x100000abc, registered, matched, active>
  | {
  |   "HIDParameters" = {"HIDClickTime"=500000000}
  |   "HIDIdleTime" = 41234567890
  | }
"""
SESSIONS = """Type=tty
State=active
IdleHint=no
IdleSinceHintMonotonic=0

Type=wayland
State=active
IdleHint=yes
IdleSinceHintMonotonic=700000000
"""


def test_mac_says_nanoseconds_since_the_last_input() -> None:
    assert mac_idle_seconds(IOREG) == pytest.approx(41.23456789)
    assert mac_idle_seconds("") == math.inf
    assert mac_idle_seconds('"HIDIdleTime" = soon') == math.inf


def test_desktop_session_says_since_when_it_is_idle() -> None:
    assert sessions_idle_seconds(SESSIONS, now=1000) == 300
    assert sessions_idle_seconds(SESSIONS.replace("IdleHint=yes", "IdleHint=no"), now=1000) == 0
    # Sessions without a screen have terminals, which are looked at themselves; those that end have nobody.
    assert sessions_idle_seconds("Type=tty\nState=active\nIdleHint=no", now=1000) == math.inf
    assert sessions_idle_seconds("Type=x11\nState=closing\nIdleHint=no", now=1000) == math.inf
    assert sessions_idle_seconds("Type=x11\nIdleHint=yes\nIdleSinceHintMonotonic=x", now=1000) == math.inf


def test_terminal_that_was_typed_in_last_counts(tmp_path: Path) -> None:
    now = time.time()
    for name, ago in (("one", 500), ("two", 40)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - ago, now))
    found = terminals_idle_seconds([tmp_path / "one", tmp_path / "two", tmp_path / "gone"], now)
    assert found == pytest.approx(40, abs=1)
    assert terminals_idle_seconds([], now) == math.inf
    # A clock that was set back makes nobody younger than now.
    assert terminals_idle_seconds([tmp_path / "two"], now - 1000) == 0


def test_tools_that_are_missing_or_fail_say_nothing() -> None:
    assert presence._run("no-such-tool-here") == ""
    assert presence._run("false") == ""
    assert presence._run("echo", "words") == "words\n"


def test_this_machine_answers() -> None:
    sensors = Sensors()
    assert sensors.idle_seconds() >= 0
    total, own = sensors.busy_seconds()
    assert 0 < own < total
    battery = sensors.battery()
    assert battery is None or 0 <= battery.percent <= 100


class Machine(Sensors):
    """Work of its processors on command."""

    def __init__(self) -> None:
        self.total = self.own = 0.0

    def battery(self) -> Battery | None:
        return Battery(55, plugged=False)

    def idle_seconds(self) -> float:
        return math.inf

    def busy_seconds(self) -> tuple[float, float]:
        return self.total, self.own


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("notebook_cluster.agent.sharing.presence.time.monotonic", lambda: now[0])
    monkeypatch.setattr("notebook_cluster.agent.sharing.presence.os.cpu_count", lambda: 4)
    return now


def test_long_work_of_others_is_somebody(clock: list[float]) -> None:
    machine = Machine()
    here = Presence(machine)
    for _ in range(12):
        here.poll()
        clock[0] += 5
        machine.total += 5 * 2
    here.poll()
    assert here.idle == 0
    assert here.battery == Battery(55, plugged=False)
    for _ in range(100):
        clock[0] += 5
        here.poll()
    assert here.idle > 400


def test_own_work_and_short_work_are_nobody(clock: list[float]) -> None:
    machine = Machine()
    here = Presence(machine)
    for _ in range(20):
        here.poll()
        clock[0] += 5
        machine.total += 5 * 4
        machine.own += 5 * 4
    assert here.idle == math.inf
    machine.total += 5 * 4
    here.poll()
    clock[0] += 5
    here.poll()
    assert here.idle == math.inf
