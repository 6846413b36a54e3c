"""What a class's page says of each machine, and that no text of a machine is more than a text."""

import pytest

from notebook_cluster.protocol.state import CellView, ClusterView, EventView, NodeView, PeerView
from notebook_cluster.widgets import render_html, render_text
from notebook_cluster.widgets.class_board import class_board
from tests.fake_cluster import cluster_view, node_view

ATTACK = "<img src=x onerror=alert(1)>\x1b[31m"


def state_of(nodes: list[NodeView], statuses: dict[str, str], **more: object) -> ClusterView:
    errors = {name: f"NameError: {ATTACK}" for name, status in statuses.items() if status == "error"}
    cell = CellView(id=7, source="x", status="running", nodes=statuses, started=90.0, errors=errors)
    told: dict[str, object] = {"peers": [], "events": [], "invitation": "", "now": 100.0, **more}
    return cluster_view(nodes=nodes, cell=cell, **told)


def node(name: str, condition: str = "ok", **more: object) -> NodeView:
    return node_view(0, name, peer=name, condition=condition, **({"waiting": ""} | more))


def rows(state: ClusterView) -> dict[str, dict[str, object]]:
    return {row["name"]: row for row in class_board(state)["rows"]}


def test_the_worst_come_first_and_the_line_counts() -> None:
    nodes = [node("bo"), node("ada"), node("ida", "dead", reason="out of memory"), node("cy", "starting"), node("tom")]
    board = class_board(state_of(nodes, {"bo": "ok", "ada": "ok", "tom": "error"}))
    assert [row["name"] for row in board["rows"]] == ["ida", "tom", "cy", "ada", "bo"]
    assert board["said"] == "3 are in · 1 hangs · 1 is not in yet"
    assert board["cell"] == "cell 7, 10.0 s: 2 done · 1 failed"


@pytest.mark.parametrize(
    ("condition", "standing", "why"),
    [
        ("dead", "ended", "Restart begins its kernel anew"),
        ("lost", "not heard", "it comes back by itself"),
        ("asleep", "asleep", "open its lid"),
    ],
)
def test_who_hangs_is_told_why_and_the_way_out(condition: str, standing: str, why: str) -> None:
    row = rows(state_of([node("ida", condition)], {"ida": "running"}))["ida"]
    assert (row["standing"], row["cell"]) == (standing, "was running")
    assert why in str(row["why"])
    assert row["can"] == ["restart", "remove"]


def test_who_still_runs_while_most_are_done_is_pointed_at() -> None:
    nodes = [node(name) for name in ("ada", "bo", "cy")]
    assert rows(state_of(nodes, dict.fromkeys(("ada", "bo", "cy"), "running")))["cy"]["cell"] == "running"
    late = rows(state_of(nodes, {"ada": "ok", "bo": "error", "cy": "running"}))["cy"]
    assert (late["cell"], late["cell_level"]) == ("still running: most others are done", "warning")
    asks = rows(state_of([node("ada", waiting="input() asks")], {"ada": "running"}))["ada"]
    assert asks["cell"] == "running, waits: input() asks"


def test_machines_without_a_node_are_there_where_they_belong_to_the_class() -> None:
    def peer(name: str, condition: str, **more: object) -> PeerView:
        return PeerView(name, f"key-{name}", "10.0.0.1:1", condition, "mdns", True, **more)  # type: ignore[arg-type]

    peers = [
        peer("pip", "untrusted", pairing=True), peer("printer", "untrusted"),
        peer("old", "refused", reason="protocol 13"), peer("late", "connecting"),
        peer("idle", "connected"), peer("local", "found"),
    ]  # fmt: skip
    shown = rows(state_of([], {}, peers=peers))
    assert set(shown) == {"pip", "old", "late", "idle"}
    assert "another code" in str(shown["pip"]["why"])
    assert shown["old"]["why"] == "protocol 13"
    assert shown["idle"]["can"] == ["add"]


def test_failed_attempts_are_told_for_a_while_and_the_code_only_while_it_is_open() -> None:
    events = [
        EventView(99.0 - age, "info", f"invitation: peer 'x': {what}")
        for age, what in (
            (400, "wrong code: old"),
            (3, "wrong code: 18 tries left"),
            (2, "right code, key is trusted now"),
        )
    ]
    board = class_board(state_of([], {}, events=events, invitation="10.0.0.1:4 maple-river-7"))
    assert [line.split(" ", 1)[1] for line in board["heard"]] == ["peer 'x': wrong code: 18 tries left"]
    assert board["invited"]["command"] == "notebook-cluster share --dial 10.0.0.1:4 --code maple-river-7"
    assert board["invited"]["qr"].startswith("data:image/svg+xml")
    over = class_board(state_of([node("ada")], {}, invitation="10.0.0.1:4 maple-river-7"), "stopped")
    assert (over["invited"], over["heard"], over["rows"][0]["can"]) == (None, [], [])


def test_texts_of_machines_stay_texts() -> None:
    state = state_of([node(ATTACK, "dead", reason=ATTACK), node("tom")], {"tom": "error", ATTACK: "lost"})
    html, text = render_html(state, as_class=True), render_text(state, as_class=True)
    assert "<img" not in html
    assert "\x1b" not in html + text
    assert "&lt;img" in html
