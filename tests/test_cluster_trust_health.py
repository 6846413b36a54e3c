"""How peers are: round trip, asleep, awake again; and that a peer's clock does not matter."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from notebook_cluster.protocol.state import PeerView
from tests.cluster import kernel_pid, node, run, running_cluster
from tests.conftest import wait_until
from tests.strangers import Strangers

pytestmark = pytest.mark.usefixtures("work")

BATTERY = """
import psutil
from collections import namedtuple
psutil.sensors_battery = lambda: namedtuple("Battery", "percent secsleft power_plugged")(80.0, 3600, True)
"""
SLEEPS = """
import os, time
through_sleep = time.clock_gettime
def clock_gettime(clock):
    slept = clock == getattr(time, "CLOCK_BOOTTIME", None) and os.path.exists({path!r})
    return through_sleep(clock) + (3720.0 if slept else 0.0)
time.clock_gettime = clock_gettime
"""
A_DAY_AHEAD = """
import time
here = time.time
time.time = lambda: here() + 86_400.0
"""


def test_a_portable_machine_that_falls_silent_is_asleep_and_comes_back_with_what_it_holds(
    strangers: Strangers,
) -> None:
    mini = strangers("mini", start_up=BATTERY)
    with running_cluster(local=1) as cluster:
        cluster.add(mini.name, code=mini.code)

        def peer() -> PeerView:
            return next(row for row in cluster.state().peers if row.name == mini.name)

        row = wait_until(lambda: row if (row := peer()).jitter_ms is not None else None, 60, "a measured round trip")
        assert row.round_trip_ms is not None
        assert 0 < row.round_trip_ms < 10_000
        run(cluster, "x = 3")
        pid = kernel_pid(cluster, mini.name)
        os.kill(mini.process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: node(cluster.state(), mini.name).condition == "asleep", 60, "the node to be asleep")
            assert run(cluster, "print(world_size)") == {"local": "1\n"}
            row = node(cluster.state(), mini.name)
            pattern = rf"{mini.name} fell silent \d+ s ago: asleep or out of Wi-Fi; rounds go on without it"
            assert re.fullmatch(pattern, row.reason)
            assert (peer().condition, peer().reason.partition(" ")[0]) == ("asleep", mini.name)
        finally:
            os.kill(mini.process.pid, signal.SIGCONT)
        wait_until(
            lambda: node(cluster.state(), mini.name).condition == "ok",
            60,
            lambda: f"the node to be back: {node(cluster.state(), mini.name)}, {peer()}, {cluster.state().events[-5:]}",
        )
        assert kernel_pid(cluster, mini.name) == pid
        assert run(cluster, "print(x)") == {"local": "3\n", mini.name: "3\n"}


def test_a_machine_that_slept_says_for_how_long(strangers: Strangers, work: Path) -> None:
    lid = work / "lid-closed"
    mini = strangers("mini", start_up=SLEEPS.format(path=str(lid)))
    with running_cluster(local=0) as cluster:
        cluster.add(mini.name, code=mini.code)
        lid.touch()
        wait_until(
            lambda: any(event.text == f"{mini.name} slept for 62 min and is back" for event in cluster.state().events),
            60,
            lambda: f"the line about it in {cluster.state().events}",
        )
        (row,) = [row for row in cluster.state().peers if row.name == mini.name]
        assert row.slept == pytest.approx(3720, abs=30)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_peer_whose_clock_is_a_day_off_works_and_its_curves_are_of_today(strangers: Strangers, ahead: bool) -> None:
    mini = strangers("mini", start_up=A_DAY_AHEAD if ahead else A_DAY_AHEAD.replace("+ 86", "- 86"))
    with running_cluster(local=1) as cluster:
        began = time.time()
        cluster.add(mini.name, code=mini.code)
        said = run(
            cluster,
            "import time\nfor step in range(5):\n    nc.report(loss=1.0 / (step + 1))\n    time.sleep(0.05)\n"
            "nc.barrier()\nprint(time.time())",
        )
        assert abs(float(said[mini.name]) - float(said["local"])) > 80_000

        def curves() -> set[str]:
            return {curve.name for curve in cluster.series() if curve.node == mini.name}

        wait_until(lambda: {"loss", "memory"} <= curves(), 60, "the curves of the node")
        for curve in cluster.series():
            assert all(began - 5 < moment < time.time() + 5 for moment in curve.time), (curve.node, curve.name)
