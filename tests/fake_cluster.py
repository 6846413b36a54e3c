"""A cluster for panel tests: the client's methods, fed by a thread that trains an invented model on three nodes."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from notebook_cluster.protocol.launches import LaunchView
from notebook_cluster.protocol.state import (
    CellView,
    ClusterView,
    EventView,
    JobView,
    NodeView,
    PeerView,
    RoundWait,
    Series,
)
from notebook_cluster.protocol.views import Closing, SeriesAdded, StateChanged

GB = 10**9
LIBRARY_CODE = "tiger-lamp-42"
"""Open at the peer ``library``."""


def node_view(rank: int, name: str, step: int = 0, **changes: Any) -> NodeView:
    """A node that trains; ``changes`` replace fields."""
    view = NodeView(
        name=name, rank=rank, peer=name.split("-")[0], device="cuda:0" if rank else "cpu",
        device_name="NVIDIA RTX 4070" if rank else "AMD Ryzen 7 7840U", incarnation=1, condition="ok", busy=True,
        memory_kind="VRAM" if rank else "RAM", memory_used=int((1.9 + 0.4 * math.sin(step / 7 + rank)) * GB),
        memory_peak=int(2.6 * GB), memory_total=(12 if rank else 32) * GB, step=step,
        loss=2.3 * math.exp(-step / 400) + 0.05 * (1 + math.sin(step * 1.7 + rank)), samples_per_s=900.0 + 40 * rank,
        last_round=step // 50, round_wait=0.4, checkpoint="digits at round 2", checkpoint_time=time.time() - 40,
        waiting="round 12" if rank == 2 else "",
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)


def peer_view(name: str, **changes: Any) -> PeerView:
    """A peer found over mDNS that can be added; ``changes`` replace fields."""
    view = PeerView(
        name=name, key=f"key-of-{name}", address="192.168.1.20:41733", condition="found", found_by="mdns", trusted=True,
        device="NVIDIA RTX 3060", round_trip_ms=1.8,
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)


def cluster_view(step: int = 120, **changes: Any) -> ClusterView:
    """Three nodes in the middle of a training run; ``changes`` replace fields."""
    now = time.time()
    view = ClusterView(
        name="digits", epoch=1, generation=3, started=now - 96, now=now,
        nodes=[node_view(0, "laptop", step), node_view(1, "mini", step), node_view(2, "desk", step)],
        peers=[
            peer_view("mini", condition="connected"), peer_view("attic"),
            peer_view("printer-room", condition="untrusted", trusted=False, device="Apple M2", reason="another user's"),
            peer_view("library", condition="untrusted", trusted=False, pairing=True, round_trip_ms=None),
        ],
        jobs=[
            JobView(
                name="model", strategy="DiLoCo", round=step // 50, attempt=0, phase="exchanging",
                members=["laptop", "mini", "desk"], parameters=1_199_882, bytes_sent=48_000_000,
                bytes_data_parallel=4_800_000_000, cell=7,
            )
        ],
        cell=CellView(
            id=7, source="for x, y in nc.shard(train, batch_size=64):\n    ...", status="running",
            nodes={"laptop": "running", "mini": "running", "desk": "running"}, started=now - 31,
        ),
        queued=0,
        events=[
            EventView(time=now - 90, level="info", text="laptop: kernel ready in 1.2 s"),
            EventView(time=now - 88, level="info", text="mini found over mDNS at 192.168.1.20"),
            EventView(time=now - 40, level="warning", text="desk: suspect, nothing heard for 2.6 s (Wi-Fi?)"),
            EventView(time=now - 38, level="info", text="desk: back after 4.1 s"),
        ],
        directory="/home/ada/work", run_log="/run/clusters/digits/run.journal",
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)


NODES = ("laptop", "mini", "desk")


def series_until(step: int, started: float, first: int = 0, names: Sequence[str] = NODES) -> list[Series]:
    """Loss and memory of the nodes from step ``first`` to ``step``, a point each 2 steps."""
    series = []
    for rank, name in enumerate(names):
        steps = list(range(first, step + 1, 2))
        views = [node_view(rank, name, one) for one in steps]
        times = [started + one * 0.1 for one in steps]
        series.append(Series(node=name, name="loss", step=steps, time=times, value=[float(v.loss or 0) for v in views]))
        memory = [float(view.memory_used) for view in views]
        series.append(Series(node=name, name="memory", step=steps, time=times, value=memory))
    return series


class FakeCluster:
    """What ``notebook_cluster.client.Cluster`` offers to a panel. ``calls`` lists what the panel asked for."""

    name = "digits"

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.step = 120
        self.started = time.time() - 96
        self.launches: list[LaunchView] = []
        self.latest = self._view()
        self._callbacks: list[Callable[[Any], None]] = []
        self._added: list[NodeView] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train, name="fake-training", daemon=True)
        self._thread.start()

    def state(self) -> ClusterView:
        return self.latest

    def series(self) -> list[Series]:
        return series_until(self.step, self.started)

    def subscribe(self, callback: Callable[[Any], None]) -> Callable[[], None]:
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def add(self, peer: str, count: int = 0, *, code: str = "") -> list[str]:
        self.calls.append(("add", peer))
        if peer == "library" and code != LIBRARY_CODE:
            raise RuntimeError("peer 'library': wrong code, 4 tries are left")
        if peer == "printer-room":
            raise RuntimeError("peer 'printer-room' is not trusted: run 'notebook-cluster pair' there")
        self._added = [node_view(3, peer, condition="starting", reason="replaying cell 3 of 7", loss=None, busy=False)]
        return [peer]

    def remove(self, node: str) -> None:
        self.calls.append(("remove", node))

    def restart(self, node: str, replay: bool = True) -> None:
        self.calls.append(("restart", node))
        raise RuntimeError(f"node {node!r} did not come back: <img src=x onerror=alert(1)>")

    def skip(self, node: str) -> int:
        self.calls.append(("skip", node))
        return 3

    def interrupt(self, force: bool = False) -> list[str]:
        self.calls.append(("interrupt", force))
        return [] if force else ["mini"]

    def checkpoint(self, name: str, job: str = "") -> str:
        self.calls.append(("checkpoint", name))
        return f"/home/ada/work/checkpoints/{name}"

    def stop(self) -> None:
        self.calls.append(("stop", None))
        self._over.set()
        self._thread.join(5)
        self._tell(Closing(reason="stopped from the panel"))

    def _view(self) -> ClusterView:
        view = cluster_view(self.step, started=self.started)
        nodes = view.nodes + getattr(self, "_added", [])
        rounds = range(max(self.step // 20 - 30, 1), self.step // 20)
        waits = [
            RoundWait(round=one, node=nodes[one % len(nodes)].name, seconds=one % 5 / 4, time=self.started + 2 * one)
            for one in rounds
        ]
        jobs = [msgspec.structs.replace(view.jobs[0], waits=waits)]
        return msgspec.structs.replace(view, nodes=nodes, launches=self.launches, jobs=jobs)

    def _tell(self, event: Any) -> None:
        for callback in list(self._callbacks):
            callback(event)

    def _train(self) -> None:
        while not self._over.wait(0.25):
            self.step += 2
            self.latest = self._view()
            self._tell(StateChanged(state=self.latest))
            names = [*NODES, *(node.name for node in self._added)]
            self._tell(SeriesAdded(series=series_until(self.step, self.started, first=self.step, names=names)))
