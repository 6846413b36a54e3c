"""What stays of a panel when its cluster has ended, and what it says of a cell that was stopped, is how things were."""

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from notebook_cluster.client import Cluster
from notebook_cluster.protocol.state import CellView, ClusterView
from notebook_cluster.protocol.views import Closing, StateChanged
from notebook_cluster.widgets import actions as actions_module
from notebook_cluster.widgets import render_html, render_text
from notebook_cluster.widgets.actions import Actions
from notebook_cluster.widgets.model import panel_model
from tests.cluster import run, running_cluster
from tests.fake_cluster import cluster_view, peer_view

ENDED = "ended at 12:00:00: stopped"


def test_the_last_state_that_a_view_gets_is_that_of_the_end(work: Path) -> None:
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with running_cluster("lesson", local=1) as cluster, Cluster.attach("lesson") as view:
        view.subscribe(heard.put)
        run(cluster, "x = 1")
        cluster.stop()
        states: list[ClusterView] = []
        while not isinstance(event := heard.get(timeout=60), Closing):
            if isinstance(event, StateChanged):
                states.append(event.state)
    assert states[-1].cell is not None
    assert states[-1].cell.status == "ok"


def test_no_cell_runs_and_no_peer_is_connected_in_the_picture_of_a_cluster_that_has_ended() -> None:
    model = panel_model(cluster_view(), ENDED)
    assert model["cell"]["status"] == "ended with the cluster"
    assert [peer["condition"] for peer in model["peers"]] == ["was connected", "found", "untrusted", "untrusted"]
    assert {peer["level"] for peer in model["peers"]} == {"muted"}
    assert {peer["blocked"] for peer in model["peers"]} == {"the cluster has ended"}
    for shown in (render_html(cluster_view(), ended=ENDED), render_text(cluster_view(), ended=ENDED)):
        assert "Cell 7 running" not in shown
        assert "can be added ·" not in shown
    assert ">connected<" not in render_html(cluster_view(), ended=ENDED)
    assert ">connected<" in render_html(cluster_view())


def test_a_cell_that_ended_before_its_cluster_keeps_how_it_ended() -> None:
    cell = CellView(id=7, source="x", status="ok", nodes={}, started=1.0, ended=2.0)
    assert panel_model(cluster_view(cell=cell), ENDED)["cell"]["status"] == "ok"


@pytest.mark.parametrize("end", ["node", "cell", "next cell", "nothing"])
def test_still_busy_is_said_only_while_it_is_so(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions_module, "STOP_SECONDS", 0.0)
    state = cluster_view(peers=[peer_view("mini")])
    assert state.cell is not None
    later = {
        "node": msgspec.structs.replace(state.cell, nodes=state.cell.nodes | {"mini": "interrupted"}),
        "cell": msgspec.structs.replace(state.cell, status="interrupted"),
        "next cell": msgspec.structs.replace(state.cell, id=8),
        "nothing": state.cell,
    }[end]
    asked: list[bool] = []

    def interrupt(force: bool) -> list[str]:
        asked.append(force)
        return ["mini"]

    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    actions = Actions(SimpleNamespace(interrupt=interrupt, state=lambda: state), ended.put)  # type: ignore[arg-type]
    actions.ask({"action": "interrupt", "id": "1"})
    ended.get(timeout=60)()
    actions.see(state.cell)
    assert [answer["text"] for answer in actions.answers()] == [
        "Still busy: mini. Stop cell again kills and restarts it"
    ]
    actions.see(later)
    assert len(actions.answers()) == (1 if end == "nothing" else 0)
    actions.ask({"action": "interrupt", "id": "2"})
    ended.get(timeout=60)()
    assert asked == [False, end == "nothing"]
