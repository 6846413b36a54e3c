"""What a server shows to sidebars in the tests of a page whose WebSocket ends in the test."""

import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from notebook_cluster.protocol import state as s
from notebook_cluster.protocol.sidebar import ClusterRow, Curve, CurvePoints, Done, Overview, ServerInfo, Sharing
from notebook_cluster.server.browser import to_json
from tests.fake_cluster import cluster_view, node_view, peer_view

if TYPE_CHECKING:
    from playwright.sync_api import Page, WebSocketRoute

HTML = '<img src=x onerror="window.hacked = 1"><b>desk</b>'
OTHER_VERSION = "cluster 'old' was started by notebook-cluster 0.0.9 (protocol 1), this is 0.1.0 (protocol 2)"


def nodes() -> list[s.NodeView]:
    conditions = ("ok", "lost", "suspect", "asleep", "rejoining", "refused")
    return [
        node_view(0, HTML, loss=math.nan, peer=HTML, device_name=HTML, checkpoint=HTML),
        *(node_view(rank, f"node-{rank}", condition=one, reason=HTML) for rank, one in enumerate(conditions, start=1)),
        node_view(7, "silent", loss=math.inf, memory_used=0, memory_peak=0, memory_total=0, samples_per_s=None),
    ]


def overview() -> Overview:
    events = [s.EventView(time=1.7e9, level=level, text=HTML) for level in ("info", "warning", "error")]  # type: ignore[arg-type]
    state = cluster_view(name=HTML, nodes=nodes(), events=events, invitation=f"192.0.2.1:4000 {HTML}")
    rows = [
        ClusterRow(name=HTML, condition="running", reason="", state=state),
        ClusterRow(name="old", condition="unreachable", reason=OTHER_VERSION, state=None),
        ClusterRow(name="gone", condition="ended", reason="cluster 'gone' has ended: stopped", state=cluster_view()),
    ]
    peers = [
        peer_view(HTML, device=HTML, trusted=False, pairing=True, reason=HTML),
        peer_view("attic", trusted=False, reason=HTML),
        peer_view("refused", condition="refused", reason=HTML),
    ]
    sharing = Sharing(on=True, name=HTML, code=HTML, command=HTML, qr_svg_data_url="javascript:window.hacked = 1")
    return Overview(peers=peers, clusters=rows, sharing=sharing, server=ServerInfo(version="1", protocol=2))


def curves() -> CurvePoints:
    def curve(node: str, name: str, values: list[float]) -> Curve:
        count = list(range(len(values)))
        return Curve(node=node, job="", name=name, step=count, time=[1.7e9 + one for one in count], value=values)

    nothing = [math.nan, math.inf, -math.inf]
    return CurvePoints(
        cluster=HTML, reset=True,
        series=[
            curve(HTML, "loss", [3.0, 2.0, math.nan, 1.5, 1.0]), curve("node-1", "loss", nothing),
            curve("nobody", HTML, [1.0]), curve(HTML, "memory", nothing),
        ],
    )  # fmt: skip


def plain_overview() -> Overview:
    """Cluster ``digits`` runs a cell."""
    (job,) = cluster_view().jobs
    job = msgspec.structs.replace(job, waits=[s.RoundWait(round=one, node="desk", seconds=one / 10) for one in (1, 2)])
    row = ClusterRow(name="digits", condition="running", reason="", state=cluster_view(jobs=[job]))
    sharing = Sharing(on=False, name="", code="", command="", qr_svg_data_url="")
    return Overview(peers=[], clusters=[row], sharing=sharing, server=ServerInfo(version="1", protocol=2))


def serve(page: "Page", shown: list[Any], answer: Callable[[dict[str, Any]], str]) -> None:
    """Pages get ``shown``; ``answer`` says how an action failed, or nothing."""

    def connected(socket: "WebSocketRoute") -> None:
        def told(message: Any) -> None:
            action = json.loads(message)
            socket.send(to_json(Done(id=action["id"], error=answer(action))))

        socket.on_message(told)
        for one in shown:
            socket.send(to_json(one))

    page.route_web_socket(re.compile("/notebook-cluster/stream"), connected)
