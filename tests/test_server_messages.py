"""What the server extension sends: JSON of any state, thinned curves, and what a slow browser gets."""

import asyncio
import json
import math
import os
from pathlib import Path

import pytest

from notebook_cluster.agent import AgentReady, SharingEvent, SharingFile, shared_machines
from notebook_cluster.protocol import state as s
from notebook_cluster.protocol.sidebar import ClusterRow, Curve, CurvePoints, Overview, ServerInfo, Sharing
from notebook_cluster.protocol.thinning import evenly
from notebook_cluster.server.browser import BadAction, BrowserOutbox, to_action, to_json
from notebook_cluster.server.sharing import sharing
from notebook_cluster.server.watching import SENT_POINTS, CurveHistory
from tests.fake_cluster import cluster_view, node_view

HTML = "<img src=x onerror=alert(1)>"
NOT_SHARED = Sharing(on=False, name="", code="", command="", qr_svg_data_url="")


def series(step: list[int], value: list[float], node: str = "mini") -> list[s.Series]:
    return [s.Series(node=node, name="loss", step=step, time=[float(number) for number in step], value=value)]


def test_numbers_that_are_not_finite_become_null() -> None:
    curve = Curve(
        node="mini", job="", name="loss", step=[1, 2, 3], time=[1.0, 2.0, 3.0], value=[math.nan, math.inf, 0.5]
    )
    message = json.loads(to_json(CurvePoints(cluster="digits", reset=True, series=[curve])))
    assert message["series"][0]["value"] == [None, None, 0.5]


def test_html_in_names_stays_text() -> None:
    nodes = [node_view(0, HTML, loss=math.nan)]
    row = ClusterRow(name="digits", condition="running", reason=HTML, state=cluster_view(nodes=nodes))
    message = Overview(peers=[], clusters=[row], sharing=NOT_SHARED, server=ServerInfo(version="1", protocol=1))
    (sent,) = json.loads(to_json(message))["clusters"]
    assert sent["reason"] == HTML
    assert sent["state"]["nodes"][0]["name"] == HTML
    assert sent["state"]["nodes"][0]["loss"] is None


def test_fields_with_default_values_are_sent_too() -> None:
    row = ClusterRow(name="digits", condition="running", reason="", state=cluster_view(events=[]))
    message = Overview(peers=[], clusters=[row], sharing=NOT_SHARED, server=ServerInfo(version="1", protocol=1))
    (sent,) = json.loads(to_json(message))["clusters"]
    assert sent["state"]["invitation"] == ""
    assert set(sent["state"]["nodes"][0]) == set(s.NodeView.__struct_fields__)


@pytest.mark.parametrize(("text", "id"), [("nothing", 0), ('{"id": true}', 0), ('{"id": 9, "action": 1}', 9)])
def test_an_action_that_is_none_keeps_the_id_that_it_has(text: str, id: int) -> None:
    with pytest.raises(BadAction) as refused:
        to_action(text)
    assert refused.value.id == id


def test_nested_brackets_are_refused_like_anything_else() -> None:
    with pytest.raises(BadAction):
        to_action("[" * 8000)


def test_a_long_curve_is_thinned_and_keeps_its_ends_and_its_spike() -> None:
    history = CurveHistory()
    steps = list(range(1900))
    history.begin(series(steps, [9.0 if step == 777 else 1.0 + step % 7 for step in steps]))
    (curve,) = history.all()
    assert len(curve.step) <= SENT_POINTS
    assert (curve.step[0], curve.step[-1]) == (0, 1899)
    assert curve.value[curve.step.index(777)] == 9.0
    for step in range(1900, 6000):
        history.add(series([step], [1.0 + step % 7]))
    (curve,) = history.all()
    assert (len(curve.step) <= SENT_POINTS, 777 in curve.step, curve.step[-1]) == (True, True, 5999)


def test_points_that_the_history_had_already_are_not_sent_again() -> None:
    history = CurveHistory()
    history.begin(series([1, 2, 3], [1.0, 2.0, 3.0]))
    history.add(series([2, 3, 4], [2.0, 3.0, 4.0]))
    history.add(series([5], [5.0]))
    (fresh,) = history.take_fresh()
    assert fresh.step == [4, 5]
    assert history.all()[0].step == [1, 2, 3, 4, 5]
    assert history.take_fresh() == []


def test_short_curves_are_left_whole() -> None:
    assert evenly([1.0, 2.0, 3.0], 200) == [0, 1, 2]
    assert evenly([1.0, 5.0, 3.0, 4.0, 2.0, 1.0], 4) == [0, 1, 4, 5]


def test_what_a_shared_agent_says_is_read_until_it_ends(jupyter_dirs: Path) -> None:
    file = SharingFile()
    file.ready(
        AgentReady(
            public_key="k",
            port=5,
            pid=os.getpid(),
            name="mini",
            pairing_port=6,
            code="tiger-lamp-42",
            hosts=["10.0.0.2"],
        )
    )
    assert sharing().command == "%cluster add 10.0.0.2:6 --code tiger-lamp-42"
    file.happened(SharingEvent("code-opened", "", code="lamp-tiger-24", port=7))
    assert (sharing().code, sharing().command) == ("lamp-tiger-24", "%cluster add 10.0.0.2:7 --code lamp-tiger-24")
    file.happened(SharingEvent("code-dead", ""))
    assert (sharing().on, sharing().code, sharing().qr_svg_data_url) == (True, "", "")
    file.close()
    assert sharing() == NOT_SHARED


def test_the_file_of_an_agent_that_was_killed_is_not_believed(jupyter_dirs: Path) -> None:
    file = SharingFile()
    file.ready(AgentReady(public_key="k", port=5, pid=os.getpid(), name="mini"))
    (path,) = (jupyter_dirs / "run" / "notebook_cluster" / "sharing").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    # As if this process had got the id of another one that was killed.
    path.write_text(path.read_text().replace('"started":', '"started":1'))
    assert shared_machines() == []
    assert not path.exists()


class SlowBrowser:
    """Takes one message each time that :meth:`take` is called."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.ready = asyncio.Semaphore(0)
        self.browser = BrowserOutbox(self._write, lambda cluster: f"all of {cluster}")

    async def _write(self, text: str) -> None:
        self.sent.append(text)
        await self.ready.acquire()

    async def take(self, count: int) -> list[str]:
        task = asyncio.ensure_future(self.browser.run())
        while len(self.sent) < count:
            self.ready.release()
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return self.sent


def test_a_slow_browser_gets_the_newest_overview_and_whole_curves() -> None:
    async def slow() -> list[str]:
        one = SlowBrowser()
        for number in range(100):
            one.browser.put_overview(f"overview {number}")
            one.browser.put_series("digits", f"points {number}")
        one.browser.put_series("other", "points")
        one.browser.put_answer("done")
        return await one.take(4)

    assert asyncio.run(slow()) == ["done", "overview 99", "all of digits", "points"]
